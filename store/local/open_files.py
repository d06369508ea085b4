"""`OpenFiles`: a bounded number of open files, opened when first read, the longest unused closed first.

A container has one expert file per layer and root, hundreds in all, and a process may have as few as 64
descriptors. A file is never closed while somebody reads from it; with every file in use the bound is exceeded
by at most one file per reading thread. Thread-safe.

For each directory it is kept whether all of its files that were opened could be read past the page cache; the
first one that could not is also logged, since a drive that silently goes through the cache is a slow drive
that proves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from k3.base.direct_io import ReadFile

OpenFile = Callable[[Path, bool], ReadFile]

_log = logging.getLogger("k3.store")


def open_file(path: Path, direct: bool) -> ReadFile:
    """How files are opened when no test says otherwise."""
    return ReadFile(path, direct=direct)


def default_open_files() -> int:
    """A quarter of the descriptors that the process may have (a file can need two), at most 256."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 256 if soft == resource.RLIM_INFINITY else max(1, min(256, soft // 4))


@dataclass(slots=True)
class _Entry:
    file: ReadFile
    readers: int = 0
    dropped: bool = False  # no longer in the table: the last reader closes it


class OpenFiles:
    """Files opened for reading, by path."""

    def __init__(self, limit: int, *, direct: bool, opener: OpenFile = open_file) -> None:
        if limit < 1:
            raise ValueError(f"limit of open files must be at least 1, not {limit}")
        self._limit = limit
        self._direct = direct
        self._opener = opener
        self._lock = threading.Lock()
        self._opened = threading.Condition(self._lock)
        self._opening: set[Path] = set()
        self._entries: OrderedDict[Path, _Entry] = OrderedDict()
        self._direct_by_directory: dict[Path, bool] = {}

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[ReadFile]:
        """The open file at `path`, kept open inside the with block. DriveError when it cannot be opened."""
        entry = self._enter(path)
        try:
            yield entry.file
        finally:
            with self._lock:
                entry.readers -= 1
                if entry.dropped and entry.readers == 0:
                    entry.file.close()
                self._shrink(self._limit)

    def drop(self, path: Path) -> None:
        """Forget an open file, so that the next read opens whatever is at `path` then."""
        with self._lock:
            entry = self._entries.pop(path, None)
            if entry is not None:
                self._close(entry)

    def close(self) -> None:
        """Close every file that is not being read, and the others when their readers are done."""
        with self._lock:
            while self._entries:
                self._close(self._entries.popitem()[1])

    def __len__(self) -> int:
        return len(self._entries)

    def direct(self) -> dict[Path, bool]:
        """For each directory that was read from: do reads go past the page cache there."""
        with self._lock:
            return dict(self._direct_by_directory)

    def _enter(self, path: Path) -> _Entry:
        with self._lock:
            while path in self._opening:
                self._opened.wait()
            entry = self._entries.get(path)
            if entry is not None:
                self._entries.move_to_end(path)
                entry.readers += 1
                return entry
            self._opening.add(path)
            self._shrink(self._limit - len(self._opening))
        file = None
        try:
            file = self._opener(path, self._direct)  # may take a while: not under the lock
        finally:
            with self._lock:
                self._opening.remove(path)
                self._opened.notify_all()
                if file is not None:
                    entry = self._entries[path] = _Entry(file, readers=1)
                    self._note_direct(file)
        assert entry is not None
        return entry

    def _shrink(self, limit: int) -> None:
        """Close the longest unused files until at most `limit` are open, as far as nobody reads them."""
        for path, entry in list(self._entries.items()):
            if len(self._entries) <= limit:
                return
            if entry.readers == 0:
                self._close(self._entries.pop(path))

    def _note_direct(self, file: ReadFile) -> None:
        directory = file.path.parent
        before = self._direct_by_directory.get(directory, True)
        self._direct_by_directory[directory] = before and file.direct
        if before and self._direct and not file.direct:
            _log.warning("%s cannot be read with O_DIRECT: reads go through the page cache", directory)

    @staticmethod
    def _close(entry: _Entry) -> None:
        entry.dropped = True
        if entry.readers == 0:
            entry.file.close()
