"""Files that a command makes for itself in a directory which others may write to.

Nothing that is there already is opened, emptied or followed: not a link, not a second name of somebody's file,
not a file that happens to have the name. Functions without state.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
"""How file systems and kernels say that they have no files without a name."""


def create_instead(path: Path, mode: int = 0o666) -> int:
    """A descriptor of a new, empty file at `path`; what a stopped run left under this name is removed. OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, _FLAGS, mode)


def create_unguessed(directory: Path, kind: str, mode: int = 0o600) -> tuple[int, Path]:
    """A descriptor and the path of a new file whose name nobody could know before. OSError.

    `kind` says in the name what the file is, in case that a run is killed and it stays.
    """
    path = _unguessed(directory, kind)
    return os.open(path, _FLAGS, mode), path


def remove_unguessed(directory: Path, kind: str) -> None:
    """Remove what killed runs left of `create_unguessed`. For whoever has the directory to itself. OSError."""
    for path in directory.glob(f".k3-{kind}-*.partial"):
        path.unlink(missing_ok=True)


def create_linkable(directory: Path, mode: int = 0o600) -> int | None:
    """A descriptor of a new file that is gone with the process, unless `give_name` names it before. OSError.

    None where the file system, the kernel or the lack of /proc does not allow it.
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
    """Give the file of `create_linkable` a name that nobody could know before, and return its path. OSError."""
    path = _unguessed(directory, kind)
    os.link(f"/proc/self/fd/{descriptor}", path, follow_symlinks=True)
    return path


def create_nameless(directory: Path, kind: str) -> int:
    """A descriptor of a new file that is gone when it is closed, whatever happens to the process. OSError."""
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
    """A path by which a library opens the file behind `descriptor`, made at `path`, and no other in its place."""
    return _by_number(descriptor) or os.fspath(path)


def _by_number(descriptor: int) -> str | None:
    """The path of a descriptor, None where /proc is not mounted."""
    by_number = f"/proc/self/fd/{descriptor}"
    return by_number if os.path.exists(by_number) else None  # noqa: PTH110 - no Path is wanted


def _unguessed(directory: Path, kind: str) -> Path:
    return directory / f".k3-{kind}-{os.urandom(8).hex()}.partial"
