"""Page-aligned buffers that are allocated once and go round: this is what bounds the repacker's memory.

Large ones lie in huge pages, where drives take and give bytes faster.
"""

from __future__ import annotations

import queue
import threading

from k3.base.direct_io import Bytes
from k3.base.page_buffers import huge_buffer


class BufferPool:
    """`count` buffers of `nbytes` each. `take` waits for a free one; safe between threads."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self.nbytes = nbytes
        self.made: list[Bytes] = []
        """Every buffer of the pool, free or in use."""
        self._making = threading.Lock()
        self._free: queue.SimpleQueue[Bytes] = queue.SimpleQueue()

    def take(self) -> Bytes:
        """Return a free buffer, waiting for one if need be. Its content is undefined; it is made on first need."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._making:
            if len(self.made) < self.count:
                buffer = huge_buffer(self.nbytes)
                self.made.append(buffer)
                return buffer
        return self._free.get()

    def give(self, buffer: Bytes) -> None:
        """Return a buffer that `take` gave out."""
        self._free.put(buffer)
