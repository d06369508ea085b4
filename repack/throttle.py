"""A limit on bytes per second, for people who use the drive for something else at the same time."""

from __future__ import annotations

import threading
import time


class Throttle:
    """Spreads transfers so that no more than `bytes_per_s` pass on average; None lets everything pass."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def pay(self, nbytes: int) -> None:
        """Account for `nbytes` and sleep until they are due."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + nbytes / self.bytes_per_s
            wait_s = self._free_at - now
        time.sleep(wait_s)
