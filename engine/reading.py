"""Dense tensors on their way into memory: what hands them out by name, and the way that suits any source.

Reading a tensor is a drive's work, checking its digest or quantizing it a core's; one after the other would
leave each idle half of the time. Tensors are begun in the order given, `READ_AHEAD` at most being read or
waiting to be taken, so memory stays bounded. Taken by one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

from k3.container.source import EncodedTensor, ModelSource

READ_AHEAD = 4
"""Tensors that are being read or waiting; as many threads."""


class TensorReader(Protocol):
    """Where a model takes its dense tensors from while they are being read."""

    def take(self, name: str) -> EncodedTensor:
        """A tensor, once. Waits until it is there; raises what reading it raised."""


class ReadAhead:
    """A context manager; leaving it drops what was not taken."""

    def __init__(self, source: ModelSource, names: Sequence[str]) -> None:
        """`names` are all tensors that will be taken, in the order in which they lie best."""
        self._source = source
        self._waiting = deque(names)
        self._begun: dict[str, Future[EncodedTensor]] = {}
        self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="k3-dense")

    def take(self, name: str) -> EncodedTensor:
        """A tensor of `names`, once. Raises what reading it raised."""
        if name not in self._begun:  # taken out of order: it may not wait behind others
            self._waiting.remove(name)
            self._begin(name)
        self._fill()
        tensor = self._begun[name].result()
        del self._begun[name]
        self._fill()
        return tensor

    def _fill(self) -> None:
        while self._waiting and len(self._begun) < READ_AHEAD:
            self._begin(self._waiting.popleft())

    def _begin(self, name: str) -> None:
        self._begun[name] = self._pool.submit(self._source.read_tensor, name)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
