"""Looking whether something is there: "not there" and "cannot be looked at" are two answers.

`Path.exists()` takes some errors for "no", others not, and not the same ones on every Python. Here only ENOENT and
ENOTDIR mean that nothing is there; a directory without rights or a drive that fails is an error.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from k3.container.direct import drive_error

NOT_THERE = (FileNotFoundError, NotADirectoryError)
"""The two answers of the system that mean: there is nothing of this name."""


def status(path: Path) -> os.stat_result | None:
    """The status of what is at `path`, links followed; None when nothing is. DriveError when nobody can tell."""
    try:
        return path.stat()
    except NOT_THERE:
        return None
    except OSError as error:
        raise drive_error("cannot look at", error, path) from error


def is_there(path: Path) -> bool:
    """True when something is at `path`. DriveError when that cannot be told."""
    return status(path) is not None


def is_directory(path: Path) -> bool:
    """True when a directory is at `path`. DriveError when that cannot be told."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def was_absent(error: BaseException) -> bool:
    """True for an operating error that came from nothing being there."""
    return isinstance(error, NOT_THERE) or isinstance(error.__cause__, NOT_THERE)
