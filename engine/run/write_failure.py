"""The error of a refused write to stdout. Pure; any thread."""

from __future__ import annotations

from pathlib import Path

from k3.base.direct_io import drive_error
from k3.base.errno_advice import Operation
from k3.base.errors import DriveError
from k3.base.output_file import NOTHING_KEPT


def write_error(problem: str, error: OSError, path: Path) -> DriveError:
    """Return the typed error for a write that failed.

    Its advice differs from a repack's: a run does not continue where it stopped.
    """
    typed = drive_error(problem, error, path, operation=Operation.WRITE)
    typed.advice = NOTHING_KEPT
    return typed
