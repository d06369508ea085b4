"""What one request of a `DaemonSource` has still to come (`Request`), and the stream that hands it out.

A request is guarded by its source's lock, except that the stream's thread may take from `ready` without it. The
stream belongs to one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from k3.store.native import Granted
from k3.store.session import Session
from k3.store.source import Lease, LeaseStream


@dataclass(eq=False, slots=True)
class Request:
    """Experts that were asked for: not yet of the daemon (`unstarted`), of the daemon (`awaited`), or `ready`.

    `tickets` are rights to leases that it has not used; `delegate` is the fallback's stream, once it took over.
    """

    layer: int
    tag: int
    unstarted: deque[int]
    awaited: set[int] = field(default_factory=set)
    ready: deque[tuple[Session, Granted] | Exception] = field(default_factory=deque)
    tickets: int = 0
    busy_since_ns: int | None = None
    closed: bool = False
    delegate: LeaseStream | None = None


class StreamOwner(Protocol):
    """What a stream needs of its source."""

    abandoned: deque[Request]

    def take(self, request: Request) -> Lease:
        """The next lease; StopIteration after the last."""

    def give_up(self, request: Request) -> None:
        """Give back what was not handed out."""


class DaemonStream:
    """The leases of one request of a `DaemonSource`, as they arrive. Leaving a with block closes it."""

    def __init__(self, source: StreamOwner, request: Request) -> None:
        self._source = source
        self._request = request

    def __iter__(self) -> Iterator[Lease]:
        return self

    def __next__(self) -> Lease:
        try:
            return self._source.take(self._request)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `LeaseStream.close`."""
        self._source.give_up(self._request)

    def __enter__(self) -> DaemonStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # May run anywhere, also inside the source's lock: only leave a note.
        self._source.abandoned.append(self._request)
