"""Existence checks that tell "absent" from "cannot be checked".

`Path.exists()` returns False for some errors and raises for others, and not for the same ones in every version of
Python. Here only ENOENT, ENOTDIR and names that no file can have mean "absent"; a directory without permissions or
a failing drive is an error.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from k3.base.direct_io import drive_error

NOT_THERE = (FileNotFoundError, NotADirectoryError)
"""The two errors that mean that nothing has this name."""


def status(path: Path) -> os.stat_result | None:
    """Return the status of `path`, links followed; None when nothing is there.

    Raises DriveError when stat fails.
    """
    return _ask(path, path.stat)


def _ask(path: Path, call: Callable[[], os.stat_result]) -> os.stat_result | None:
    try:
        return call()
    except (*NOT_THERE, ValueError):  # ValueError: a name with a zero byte
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise drive_error("cannot stat", error, path) from error


def is_named(path: Path) -> bool:
    """Return True if a directory has an entry of this name, even a dangling link.

    Raises DriveError when stat fails.
    """
    return _ask(path, path.lstat) is not None


def is_there(path: Path) -> bool:
    """Return True if something is at `path`. Raises DriveError when stat fails."""
    return status(path) is not None


def is_directory(path: Path) -> bool:
    """Return True if a directory is at `path`. Raises DriveError when stat fails."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_file(path: Path) -> bool:
    """Return True if a regular file is at `path`. Raises DriveError when stat fails."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def was_absent(error: BaseException) -> bool:
    """Return True if an operating error was caused by a missing file."""
    return isinstance(error, NOT_THERE) or isinstance(error.__cause__, NOT_THERE)
