"""Looking whether something is there: "not there" and "cannot be looked at" are two answers.

`Path.exists()` takes some errors for "no", others not, and not the same ones on every Python. Here only ENOENT and
ENOTDIR mean that nothing is there, and names that no file can have; a directory without rights or a drive that
fails is an error.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from k3.base.direct_io import drive_error

NOT_THERE = (FileNotFoundError, NotADirectoryError)
"""The two answers of the system that mean: there is nothing of this name."""


def status(path: Path) -> os.stat_result | None:
    """The status of what is at `path`, links followed; None when nothing is. DriveError when nobody can tell."""
    return _ask(path, path.stat)


def _ask(path: Path, call: Callable[[], os.stat_result]) -> os.stat_result | None:
    try:
        return call()
    except (*NOT_THERE, ValueError):  # ValueError: a name with a zero byte
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise drive_error("cannot look at", error, path) from error


def is_named(path: Path) -> bool:
    """True when a directory has an entry of this name, be it a link that leads nowhere. DriveError as `status`."""
    return _ask(path, path.lstat) is not None


def is_there(path: Path) -> bool:
    """True when something is at `path`. DriveError when that cannot be told."""
    return status(path) is not None


def is_directory(path: Path) -> bool:
    """True when a directory is at `path`. DriveError when that cannot be told."""
    found = status(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_file(path: Path) -> bool:
    """True when a regular file is at `path`. DriveError when that cannot be told."""
    found = status(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def was_absent(error: BaseException) -> bool:
    """True for an operating error that came from nothing being there."""
    return isinstance(error, NOT_THERE) or isinstance(error.__cause__, NOT_THERE)
