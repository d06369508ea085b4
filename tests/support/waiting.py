"""Waits for a state that another thread or process reaches. Only here may a test sleep."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK_S = 0.002
"""Pause between two looks."""


def wait_until(holds: Callable[[], Any], seconds: float = 30.0) -> float:
    """Wait until something holds; return how long it took. AssertionError when the time is over."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < seconds, "waited in vain"
        time.sleep(LOOK_S)
    return time.monotonic() - began_s


def wait_until_standing(*threads: threading.Thread) -> None:
    """Wait until each thread has been at one place of its code for several looks: it waits for something."""
    standing = dict.fromkeys(threads, 0)
    places: dict[threading.Thread, object] = {}

    def all_stand() -> bool:
        frames = sys._current_frames()
        for thread in threads:
            frame = frames.get(thread.ident or 0)
            place = None if frame is None else (id(frame), frame.f_lasti)
            standing[thread] = standing[thread] + 1 if place is not None and places.get(thread) == place else 0
            places[thread] = place
        return min(standing.values()) >= 5

    wait_until(all_stand)


def let_others_run() -> None:
    """Hand the GIL and the processor to whoever is ready, many times."""
    for _ in range(50):
        time.sleep(0)


def wait_until_taken(pid: int, number: int) -> None:
    """Wait until no signal `number` is pending for a process: it has begun to handle the one that was sent."""
    status = Path(f"/proc/{pid}/status")

    def is_taken() -> bool:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
        return not pending >> (number - 1) & 1

    wait_until(is_taken)


def threads_here() -> int:
    """Return the number of this process's threads, native ones included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())
