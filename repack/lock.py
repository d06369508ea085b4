"""Locks that let one repack at a time write to a root."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from k3.base.direct_io import drive_error
from k3.base.errno_advice import NOT_SUPPORTED, Operation
from k3.base.errors import ResumeError
from k3.base.notes import note_once


class RootLocks(AbstractContextManager[None]):
    """One repack at a time per directory; released by the kernel whatever happens to the process."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._fds: list[int] = []
        for directory in directories:
            try:
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                self._fds.append(fd)
                _lock(fd, directory)
            except BlockingIOError:
                self.close()
                raise ResumeError(
                    "another k3-repack is working in this directory", path=directory, advice="Wait for it to end"
                ) from None
            except OSError as error:
                self.close()
                what = "cannot lock the directory"
                raise drive_error(what, error, directory, operation=Operation.LOCK) from error

    def close(self) -> None:
        """Give the locks back."""
        while self._fds:
            os.close(self._fds.pop())

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock(fd: int, directory: Path) -> None:
    """Take the lock, or note that the file system has none. OSError (BlockingIOError: it is taken)."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        note_once(
            "flock",
            f"the file system of {directory} has no locks ({error.strerror}): nothing stops a second k3-repack "
            "from writing there at the same time, so start none",
        )
