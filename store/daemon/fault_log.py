"""Mistakes of the daemon's own that it outlived: each is counted, and its traceback is logged once.

One thread at a time; `count` may be read from any.
"""

from __future__ import annotations

import logging
import traceback

TRACEBACKS_MAX = 100

_log = logging.getLogger("k3.store")


class Faults:
    """Counts exceptions that nobody expected."""

    def __init__(self) -> None:
        self.count = 0
        self._told: set[tuple[str, int, str]] = set()

    def note(self, during: str, error: BaseException) -> None:
        """Count an error that came up `during` something, and log it: in full if it is the first of its place."""
        self.count += 1
        frames = traceback.extract_tb(error.__traceback__)
        place = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)
        key = (*place, type(error).__name__)
        is_new = key not in self._told and len(self._told) < TRACEBACKS_MAX
        if is_new:
            self._told.add(key)
        _log.error(
            "a fault of k3-store itself during %s: %s: %s%s",
            during, type(error).__name__, error, "" if is_new else " (its traceback was logged before)",
            exc_info=error if is_new else None,
        )  # fmt: skip
