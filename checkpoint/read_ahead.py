"""`ReadAhead`: dense tensors read and quantized by a few threads before they are needed.

Reading a tensor occupies a drive, quantizing it a core; one after the other would leave each idle half of the
time. Tensors are begun in the order given. At most `READ_AHEAD` are being read or waiting to be taken, so memory
stays bounded. Taken by one thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from k3.base.huge_pages import HugePages
from k3.model.model_source import EncodedTensor

READ_AHEAD = 4
"""Limit of the tensors that are being read or wait to be taken, and number of threads."""


class ReadAhead:
    """A `TensorLoad` over a function that reads one tensor.

    A context manager; leaving it drops the tensors that were not taken.
    """

    retries = 0  # this class repeats no read

    def __init__(
        self,
        read_tensor: Callable[[str], EncodedTensor],
        names: Sequence[str],
        *,
        on_read: Callable[[str], None] = lambda name: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to read the first of `names`: all tensors that will be taken, in the best order of reading.

        `on_read` is called for each tensor that was read, `on_end` once, when all were read or at `close`: one
        call at a time, from threads of the load or from the one that closes it.
        """
        self._read_tensor = read_tensor
        self._waiting = deque(names)
        self._left = len(names)
        self._begun: dict[str, Future[EncodedTensor]] = {}
        self._on_read = on_read
        self._on_end = on_end
        self._lock = threading.Lock()  # held during the callbacks, and guards `_left` and `_ended_s`
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="k3-dense")
        self._fill()

    @property
    def load_s(self) -> float:
        """Seconds from the beginning of the load to the end of reading, or until now while it lasts."""
        return (time.monotonic() if self._ended_s is None else self._ended_s) - self._began_s

    def take(self, name: str) -> EncodedTensor:
        """Return a tensor of `names`, once. Raises what reading it raised."""
        if name not in self._begun:  # taken out of order: begin it before the others
            self._waiting.remove(name)
            self._begin(name)
        self._fill()
        tensor = self._begun[name].result()
        del self._begun[name]
        self._fill()
        return tensor

    def huge_pages(self) -> HugePages:
        """Return zeros: no huge pages are requested."""
        return HugePages()

    def close(self) -> None:
        """Wait for the reads in flight and drop the tensors that were not taken."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._end()

    def _fill(self) -> None:
        while self._waiting and len(self._begun) < READ_AHEAD:
            self._begin(self._waiting.popleft())

    def _begin(self, name: str) -> None:
        self._begun[name] = self._pool.submit(self._read, name)

    def _read(self, name: str) -> EncodedTensor:
        tensor = self._read_tensor(name)
        with self._lock:
            self._on_read(name)
            self._left -= 1
            if self._left == 0:
                self._end()
        return tensor

    def _end(self) -> None:
        if self._ended_s is None:
            self._ended_s = time.monotonic()
            self._on_end()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
