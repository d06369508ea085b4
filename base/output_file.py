"""A file that a user asked a command to write: logits, a trace, a routing trace.

Bytes go to a temporary file beside the wanted one, which takes its name when it is published; what was there
before stays until then. A link is followed, and stays. A device or a pipe is written straight into and is
never replaced. A write that fails is taken back, so that a file holds whole writes. One thread.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from k3.base.direct_io import drive_error, sync_directory, sync_file
from k3.base.errno_advice import FULL, Operation
from k3.base.errors import DriveError
from k3.base.new_file import create_unguessed

_Self = TypeVar("_Self", bound="OutputFile")

NOTHING_KEPT = "Nothing of it is kept; give another place, or make room, and run again"


class OutputFile:
    """A context manager: left without `publish`, it removes what it wrote."""

    def __init__(self, path: Path, what: str, advice: str = NOTHING_KEPT, *, private: bool = False) -> None:
        """Begin to write `what` (as in "cannot write the trace"). DriveError when nothing can be written there.

        A `private` file can be read by its owner only.
        """
        self.path = path
        self.published = False
        self._what = what
        self._advice = advice
        self._size_bytes = 0
        try:
            self._target = None if _is_stream(path) else Path(os.path.realpath(path))
            if self._target is None:
                self._written, descriptor = path, os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            else:
                mode = 0o600 if private else 0o666
                descriptor, self._written = create_unguessed(self._target.parent, "output", mode)
            self._file = os.fdopen(descriptor, "wb", buffering=0)
        except OSError as error:
            raise self._error(error) from error

    def write(self, data: bytes) -> None:
        """Append all of `data`, or nothing of it (a device or a pipe may get a part). DriveError, SpaceError."""
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
        """Make what was written durable and give the file its name. Writing may go on. DriveError."""
        if self._target is not None and not self.published:
            try:
                sync_file(self._file.fileno(), self._target)
                self._written.replace(self._target)
                self.published = True
                sync_directory(self._target.parent)
            except OSError as error:
                raise self._error(error) from error
        self.published = True

    def close(self) -> None:
        """Close the file, and remove it unless it was published. Closing twice is harmless."""
        with contextlib.suppress(OSError):  # nothing is buffered here: every write was answered
            self._file.close()
        if self._target is not None and not self.published:
            self._written.unlink(missing_ok=True)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _error(self, error: OSError) -> DriveError:
        typed = drive_error(f"cannot write {self._what}", error, self.path, operation=Operation.WRITE)
        # A full drive's general advice is a repack's: that it continues where it stopped.
        typed.advice = self._advice if error.errno in FULL else f"{typed.advice}. {self._advice}"
        return typed


def _is_stream(path: Path) -> bool:
    """Whether something is there that is no regular file, and so must not be replaced. OSError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode)
