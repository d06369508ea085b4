"""How a refused write of this room (text, logits, trace) is reported. Pure; any thread."""

from __future__ import annotations

from pathlib import Path

from k3.container.direct import drive_error
from k3.container.errors import DriveError


def write_error(problem: str, error: OSError, path: Path) -> DriveError:
    """The typed error for a write that failed. Unlike a repack, a run does not continue where it stopped."""
    typed = drive_error(problem, error, path)
    typed.advice = "Nothing of it is kept; give another place, or make room, and run again"
    return typed
