"""The leases of one request as they arrive, for whichever source: `RequestStream` over a `StreamOwner`.

A stream belongs to one thread at a time. One that is dropped without closing is forgotten by its source.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from k3.store._store import Lease, ReadyLeases

R = TypeVar("R")
_R = TypeVar("_R", contravariant=True)


class StreamOwner(Protocol[_R]):
    """The part of a source that its streams call."""

    def take(self, request: _R) -> Lease:
        """Return the next lease; StopIteration after the last."""

    def give_up(self, request: _R) -> None:
        """Give back what was not handed out."""

    def forget(self, request: _R) -> None:
        """Give back what a dropped stream has left. May be called anywhere, also inside the source's own lock."""


class RequestStream(ReadyLeases, Generic[R]):
    """The leases of one request of a source, as they arrive. Leaving a with block closes it."""

    def __init__(self, source: StreamOwner[R], request: R, ready: deque[Lease] | None = None) -> None:
        """Hand out the content of `ready` without asking the source, which empties it when it is closed."""
        super().__init__(deque() if ready is None else ready)
        self._is_over = False
        self._source = source
        self._request = request

    def _await_next(self) -> Lease:
        try:
            return self._source.take(self._request)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `LeaseStream.close`."""
        if not self._is_over:
            self._source.give_up(self._request)
            self._is_over = True

    def __enter__(self) -> RequestStream[R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Ctrl-C may have come before there was anything to give back.
        if hasattr(self, "_request") and not self._is_over:
            self._source.forget(self._request)
