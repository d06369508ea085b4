"""A file that a user asked a command to write: logits, a trace, a routing trace.

Bytes go to a file without a name, so that a killed run leaves nothing behind. Where the file system has no such
files, they go to a temporary one in the same directory (`.k3-output-….partial`). It takes the wanted name when it
is published; an older file stays until then. A link is followed, and stays a link. A device or a pipe is written
directly and never replaced. A failed write is undone, so that the file only holds whole writes. One thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from k3.base.direct_io import drive_error, sync_directory, sync_file
from k3.base.errno_advice import FULL, NOT_SUPPORTED, Operation
from k3.base.errors import DriveError
from k3.base.new_file import create_linkable, create_unguessed, give_name

_Self = TypeVar("_Self", bound="OutputFile")

_KIND = "output"
_COPY_BYTES = 16 << 20
_CANNOT_LINK = NOT_SUPPORTED | {errno.EPERM, errno.EXDEV, errno.ENOENT}

NOTHING_KEPT = "Nothing was kept of it; choose another place, or free space, and run again"


class OutputFile:
    """A context manager; leaving it before `publish` removes the file."""

    def __init__(self, path: Path, what: str, advice: str = NOTHING_KEPT, *, private: bool = False) -> None:
        """Open the file. Raises DriveError when it cannot be written.

        `what` names it in messages ("cannot write the trace"). A `private` file can be read only by its owner.
        """
        self.path = path
        self.published = False
        self._what = what
        self._advice = advice
        self._size_bytes = 0
        self._mode = 0o600 if private else 0o666
        self._aside: Path | None = None  # the temporary name, while there is one
        try:
            self._target = None if _is_stream(path) else Path(os.path.realpath(path))
            if self._target is None:
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            else:
                nameless = create_linkable(self._target.parent, self._mode)
                if nameless is None:
                    descriptor, self._aside = create_unguessed(self._target.parent, _KIND, self._mode)
                else:
                    descriptor = nameless
            self._file = os.fdopen(descriptor, "wb", buffering=0)
        except OSError as error:
            raise self._error(error) from error

    def write(self, data: bytes) -> None:
        """Append all of `data` or nothing of it (a device or a pipe may get a part).

        Raises DriveError, SpaceError.
        """
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException as error:
            if self._target is not None:
                self._file.seek(self._size_bytes)
                self._file.truncate()
            if isinstance(error, OSError):
                raise self._error(error) from error
            raise
        self._size_bytes += len(data)

    def publish(self) -> None:
        """Make the bytes durable and give the file its name. Writing may continue. Raises DriveError."""
        if self._target is not None and not self.published:
            try:
                sync_file(self._file.fileno(), self._target)
                self._name(self._target.parent)
                assert self._aside is not None
                self._aside.replace(self._target)
                self._aside = None
                self.published = True
                sync_directory(self._target.parent)
            except OSError as error:
                raise self._error(error) from error
        self.published = True

    def close(self) -> None:
        """Close the file, and remove it unless it was published. Closing twice is harmless."""
        with contextlib.suppress(OSError):  # unbuffered: no write can fail in close()
            self._file.close()
        if self._aside is not None:
            self._aside.unlink(missing_ok=True)
            self._aside = None

    def _name(self, directory: Path) -> None:
        """Give the file a temporary name if it has none: only a rename can replace an older file."""
        if self._aside is not None:
            return
        try:
            self._aside = give_name(self._file.fileno(), directory, _KIND)
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            # This file system allows files without a name, but cannot link them: continue in a copy.
            descriptor, self._aside = create_unguessed(directory, _KIND, self._mode)
            copy = os.fdopen(descriptor, "wb", buffering=0)
            with self._file as unnamed:
                for at in range(0, self._size_bytes, _COPY_BYTES):
                    rest = memoryview(os.pread(unnamed.fileno(), min(_COPY_BYTES, self._size_bytes - at), at))
                    while rest:
                        rest = rest[copy.write(rest) :]
            self._file = copy
            sync_file(copy.fileno(), self._aside)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _error(self, error: OSError) -> DriveError:
        typed = drive_error(f"cannot write {self._what}", error, self.path, operation=Operation.WRITE)
        # The table's advice for a full drive is a repack's: it promises to continue.
        typed.advice = self._advice if error.errno in FULL else f"{typed.advice}. {self._advice}"
        return typed


def _is_stream(path: Path) -> bool:
    """Return True if `path` exists and is not a regular file, so must not be replaced. Raises OSError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode)
