"""New files in a directory to which others may write.

An existing entry is never opened, truncated or followed: no link, no second hard link of another's file, no file
that happens to have the name. Functions without state.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
"""Errors of file systems and kernels that have no unnamed files (O_TMPFILE)."""


def create_instead(path: Path, mode: int = 0o666) -> int:
    """Return a descriptor of a new, empty file at `path`, after removing what an earlier run left there.

    Raises OSError.
    """
    path.unlink(missing_ok=True)
    return os.open(path, _FLAGS, mode)


def create_unguessed(directory: Path, kind: str, mode: int = 0o600) -> tuple[int, Path]:
    """Return descriptor and path of a new file with an unpredictable name. Raises OSError.

    `kind` is a part of the name, so that the file of a killed run can be recognised.
    """
    path = _unguessed(directory, kind)
    return os.open(path, _FLAGS, mode), path


def remove_unguessed(directory: Path, kind: str) -> None:
    """Remove the files of `create_unguessed` that killed runs left. The caller owns the directory alone.

    Raises OSError.
    """
    for path in directory.glob(f".k3-{kind}-*.partial"):
        path.unlink(missing_ok=True)


def create_linkable(directory: Path, mode: int = 0o600) -> int | None:
    """Return a descriptor of a new file that vanishes with the process unless `give_name` names it first.

    Return None where the file system or the kernel does not support it, or /proc is not mounted. Raises OSError.
    """
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in _NO_NAMELESS:
            raise
        return None
    if _by_number(descriptor) is None:
        os.close(descriptor)
        return None
    return descriptor


def give_name(descriptor: int, directory: Path, kind: str) -> Path:
    """Give the file of `create_linkable` an unpredictable name, and return its path. Raises OSError."""
    path = _unguessed(directory, kind)
    os.link(f"/proc/self/fd/{descriptor}", path, follow_symlinks=True)
    return path


def create_nameless(directory: Path, kind: str) -> int:
    """Return a descriptor of a new file without a name, which vanishes when it is closed. Raises OSError."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
    descriptor, path = create_unguessed(directory, kind)
    path.unlink()
    return descriptor


def path_of(descriptor: int, path: Path) -> str:
    """Return a path under which a library opens exactly the file behind `descriptor`, which was made at `path`."""
    return _by_number(descriptor) or os.fspath(path)


def _by_number(descriptor: int) -> str | None:
    """Return the path of a descriptor in /proc, None where /proc is not mounted."""
    by_number = f"/proc/self/fd/{descriptor}"
    return by_number if os.path.exists(by_number) else None  # noqa: PTH110 - no Path is wanted


def _unguessed(directory: Path, kind: str) -> Path:
    return directory / f".k3-{kind}-{os.urandom(8).hex()}.partial"
