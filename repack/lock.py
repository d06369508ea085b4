"""One repack at a time on any root, whoever else is told to write there."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from k3.container.direct import drive_error
from k3.container.errors import ResumeError


class RootLocks(AbstractContextManager[None]):
    """One repack at a time per directory; released by the kernel whatever happens to the process."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._fds: list[int] = []
        for directory in directories:
            try:
                self._fds.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                fcntl.flock(self._fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self.close()
                if not isinstance(error, BlockingIOError):
                    raise drive_error("cannot lock the directory", error, directory) from error
                raise ResumeError(
                    "another k3-repack is working in this directory", path=directory, advice="Wait for it to end"
                ) from None

    def close(self) -> None:
        """Give the locks back."""
        while self._fds:
            os.close(self._fds.pop())

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
