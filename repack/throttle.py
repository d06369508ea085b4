"""A limit on bytes per second, for people who use the drive for something else at the same time."""

from __future__ import annotations

import threading
import time

SLEEP_MAX_S = 0.2
"""Longest sleep in one go. A signal that comes just before a sleep begins does not shorten it, and a block can be
due after minutes: Ctrl-C waits for the turn at most."""


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
            self._free_at = due = max(now, self._free_at) + nbytes / self.bytes_per_s
        while (wait_s := due - time.monotonic()) > 0:
            time.sleep(min(wait_s, SLEEP_MAX_S))
