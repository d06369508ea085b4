"""System calls of this process that fail when they are told to: the n-th of a kind on files below one directory.

Only calls that Python code makes are seen: `os.open`, `os.stat`, `os.fstat`, `os.preadv`, `os.close`, `mmap.mmap`.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from k3.base.direct_io import ReadFile

CALLS = ("open", "stat", "fstat", "preadv", "close", "mmap")

ERRNOS = (
    errno.EIO, errno.ENODEV, errno.ENOENT, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT,
)  # fmt: skip


@dataclass
class FailingCall:
    """One call that fails: number `at` (from 0) of the kind `call`, and the next `times - 1` of them."""

    call: str
    number: int
    below: Path
    at: int = 0
    times: int = 1
    seen: int = 0
    struck: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}  # of open descriptors

    def _strike(self, path: str) -> None:
        if not path.startswith(str(self.below)):
            return
        with self._lock:
            number = self.seen
            self.seen += 1
            if not self.at <= number < self.at + self.times:
                return
            self.struck.append(path)
        raise OSError(self.number, os.strerror(self.number), path)

    @contextlib.contextmanager
    def active(self) -> Iterator[FailingCall]:
        """Replace the calls of this process by ones that can fail, until the end of the block."""
        real_open, real_close, real_mmap = os.open, os.close, mmap.mmap

        def opened(path: Any, *arguments: Any, **keywords: Any) -> int:
            name = os.fspath(path)
            if self.call == "open":
                self._strike(name)
            fd = real_open(path, *arguments, **keywords)
            self._paths[fd] = name
            return fd

        def closed(fd: int) -> None:
            name = self._paths.pop(fd, "")
            real_close(fd)
            if self.call == "close":
                self._strike(name)

        def mapped(*arguments: Any, **keywords: Any) -> Any:
            if self.call == "mmap":
                self._strike(str(self.below))
            return real_mmap(*arguments, **keywords)

        preadv = self._of_descriptor("preadv", os.preadv)
        fstat, stat = self._of_descriptor("fstat", os.fstat), self._of_path("stat", os.stat)
        with contextlib.ExitStack() as stack:
            for target, name, function in (
                (os, "open", opened), (os, "close", closed), (mmap, "mmap", mapped), (os, "preadv", preadv),
                (os, "fstat", fstat), (os, "stat", stat),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(target, name, function))
            if accessor := getattr(pathlib, "_NormalAccessor", None):  # Python 3.10: what Path.stat calls
                stack.enter_context(mock.patch.object(accessor, "stat", staticmethod(stat)))
            stack.enter_context(mock.patch.dict(ReadFile.__init__.__kwdefaults__, preadv=preadv))
            yield self

    def _of_descriptor(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(fd: int, *arguments: Any) -> Any:
            if self.call == call:
                self._strike(self._paths.get(fd, ""))
            return real(fd, *arguments)

        return function

    def _of_path(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def function(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if self.call == call and not isinstance(path, int):
                self._strike(os.fspath(path))
            return real(path, *arguments, **keywords)

        return function
