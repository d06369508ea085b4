"""Aligned reads and writes that bypass the page cache: the only module that knows O_DIRECT.

`ReadFile` and `WriteFile` test with a real transfer whether the file system supports O_DIRECT (opening alone
proves nothing); `.direct` holds the answer. They handle short transfers, interrupted calls and the end of a file.
Bytes that could not be read are an error, never zeros.

Several threads may use one file at once, with different buffers. NumPy is not imported here: commands begin to
read before they have time for that.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from k3.base.errno_advice import NOT_SUPPORTED, Operation, refusal
from k3.base.errors import DriveError, NoMemoryError, SpaceError, UnsupportedError
from k3.base.notes import note_once
from k3.base.pages import PAGE_BYTES, page_ceil

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Preadv = Callable[[int, Sequence[Any], int], int]
Pwritev = Callable[[int, Sequence[Any], int], int]

TRANSFER_BYTES = 1 << 30
"""Limit of one system call: Linux transfers at most 2 GiB - 4 KiB, macOS 2 GiB - 1."""

STALLS_MAX = 8
"""Writes in a row that may transfer less than a page before WriteFile.write gives up."""

CUT_ADVICE = refusal(Operation.READ, errno.ENODATA).advice

_Self = TypeVar("_Self", bound="_File")
_Buffer = TypeVar("_Buffer", Bytes, memoryview)


def aligned_buffer(nbytes: int) -> Bytes:
    """Return a zeroed, page-aligned buffer of `nbytes` rounded up to whole pages. Allocate once and reuse."""
    import numpy as np

    return np.frombuffer(mmap.mmap(-1, max(PAGE_BYTES, page_ceil(nbytes))), dtype=np.uint8)


def memory_of(buffer: Bytes | memoryview) -> memoryview:
    """Return an array or a memoryview as a memoryview, which Python's own functions take."""
    return buffer if isinstance(buffer, memoryview) else buffer.data


def span_bytes(offset: int, length: int) -> int:
    """Return the capacity that `ReadFile.read(offset, length, into)` needs: the pages that hold the range."""
    return page_ceil(offset + length) - offset // PAGE_BYTES * PAGE_BYTES


def sync_directory(path: Path) -> None:
    """Make renames and creations inside a directory durable. Raises DriveError when fsync reports a fault.

    A file system that does not support it (CIFS, vboxsf, some FUSE) is noted once and is no error.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            what = "cannot make the directory durable"
            raise drive_error(what, error, path, operation=Operation.SYNC) from error
        _note_not_durable(path, error, "the names of new files")


def sync_file(fd: int, path: Path) -> None:
    """Make a file's bytes durable. Raises OSError when fsync reports a fault.

    A file system that does not support it is noted once, as in `sync_directory`.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        _note_not_durable(path.parent, error, "the bytes of files")


def _note_not_durable(directory: Path, error: OSError, what: str) -> None:
    try:
        device = directory.stat().st_dev
    except OSError:
        device = -1
    note_once(
        f"durable {device} {what}",
        f"the file system of {directory} does not support making {what} durable ({error.strerror or error}): "
        "after a power cut, run the same command again and verify",
    )


def drive_error(
    problem: str,
    error: OSError,
    path: Path | None,
    offset: int | None = None,
    *,
    operation: Operation = Operation.OPEN,
) -> DriveError:
    """Return the typed error for a failed system call: SpaceError, NoMemoryError, or DriveError for all else."""
    found = refusal(operation, error.errno, error.strerror or str(error))
    kind = SpaceError if found.is_full else NoMemoryError if error.errno == errno.ENOMEM else DriveError
    return kind(f"{problem}: {found.reason}", path=path, offset=offset, advice=found.advice)


def memory_error(problem: str, error: OSError, operation: Operation = Operation.MEMORY) -> UnsupportedError:
    """Return the typed error for memory, descriptors or threads that the system refused."""
    found = refusal(operation, error.errno, error.strerror or str(error))
    return UnsupportedError(f"{problem}: {found.reason}", advice=found.advice)


IRREGULAR_ADVICE = "Put the file itself there"
_FOREIGN = "Remove it, or choose another directory; nothing was written to it"


class _File:
    """A file descriptor that is closed once, at the latest on leaving a with block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.direct = False
        self._fd = -1

    def close(self) -> None:
        """Close the descriptor; a second call does nothing. Raises DriveError when the system reports a fault."""
        fd, self._fd = self._fd, -1  # close() frees the descriptor even when it fails
        if fd >= 0:
            try:
                os.close(fd)
            except InterruptedError:
                return  # Linux has freed the descriptor by then
            except OSError as error:
                raise drive_error("cannot close", error, self.path) from error

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ReadFile(_File):
    """A file opened for positioned reads.

    `direct=True` tries O_DIRECT with a probe read; `.direct` says whether it is in use. `preadv` is the system
    call, which tests replace. Raises DriveError when the file cannot be opened.
    """

    def __init__(self, path: Path, *, direct: bool = True, preadv: Preadv = os.preadv) -> None:
        super().__init__(path)
        self._preadv = preadv
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe without a writer would block
        try:
            if direct:
                self._fd = self._open_direct(flags)
            if self._fd < 0:
                self._fd = os.open(path, flags)
            else:
                self.direct = True
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise DriveError(
                    "is not a regular file but a pipe, device or directory", path=path, advice=IRREGULAR_ADVICE
                )
            self.size_bytes = status.st_size
        except DriveError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise drive_error("cannot open for reading", error, path) from error

    def _open_direct(self, flags: int) -> int:
        """Return a descriptor on which an O_DIRECT read succeeded, or -1."""
        try:
            fd = os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno in NOT_SUPPORTED:
                return -1
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return fd  # the caller refuses it; reading a device could block
        try:
            os.preadv(fd, [mmap.mmap(-1, PAGE_BYTES)], 0)
        except OSError as error:
            os.close(fd)
            if error.errno in NOT_SUPPORTED:
                return -1
            raise
        return fd

    def read(self, offset: int, length: int, into: _Buffer) -> _Buffer:
        """Read exactly [offset, offset + length) and return it as a view of `into`.

        `into` is page-aligned and holds at least `span_bytes(offset, length)` bytes; the view starts `offset mod
        4096` bytes into it. Raises DriveError with file and offset when the file ends early or the drive fails.
        """
        if offset + length > self.size_bytes:
            missing_bytes = offset + length - self.size_bytes
            raise DriveError(
                f"the file ends at {self.size_bytes} bytes, {missing_bytes} bytes too early",
                path=self.path,
                offset=offset,
                advice="The file is truncated; verify it and restore it",
            )
        skip = offset % PAGE_BYTES
        start = offset - skip
        need = skip + length
        assert need <= len(into), "buffer smaller than span_bytes()"
        ask = min(page_ceil(need), len(into)) if self.direct else need
        done = 0 if self.direct else skip
        while done < need:
            count = self._transfer(start + done, into[done : min(ask, done + TRANSFER_BYTES)])
            if count == 0:
                raise DriveError(
                    "the file ended while being read", path=self.path, offset=start + done, advice=CUT_ADVICE
                )
            done += count
            if self.direct and done < need and done % PAGE_BYTES:
                # A short direct read may stop anywhere: repeat the page, or read it without O_DIRECT.
                page = done // PAGE_BYTES * PAGE_BYTES
                if count > done - page:
                    done = page
                else:
                    done = self._read_page_buffered(start, page, min(need, page + PAGE_BYTES), into)
        return into[skip : skip + length]

    def _transfer(self, position: int, target: Bytes | memoryview) -> int:
        while True:
            try:
                return self._preadv(self._fd, [target], position)
            except InterruptedError:
                continue
            except OSError as error:
                raise drive_error("cannot read", error, self.path, position, operation=Operation.READ) from error

    def _read_page_buffered(self, start: int, page: int, stop: int, into: Bytes | memoryview) -> int:
        """Read the rest of a page through the page cache: some devices never return more than a part directly."""
        try:
            with open(self.path, "rb", buffering=0) as file:
                while page < stop:
                    count = os.preadv(file.fileno(), [memory_of(into[page:stop])], start + page)
                    if count == 0:
                        raise DriveError(
                            "the file ended while being read",
                            path=self.path,
                            offset=start + page,
                            advice=CUT_ADVICE,
                        )
                    page += count
        except OSError as error:
            raise drive_error("cannot read", error, self.path, start + page, operation=Operation.READ) from error
        return page

    def drop_cache(self) -> None:
        """Drop this file's pages from the page cache, so that later reads come from the drive.

        Where the kernel refuses, that is noted once, and reads may come from memory.
        """
        try:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            reason = error.strerror or str(error)
            note_once(
                f"fadvise {reason}",
                f"the cached pages of {self.path} could not be dropped ({reason}): bytes read from it may have "
                "come from memory and not from the drive",
            )


class WriteFile(_File):
    """A file opened for positioned writes of whole pages.

    Never writes through a link, nor into a file that has a second hard link. Creates the file if needed, sets its
    size to `size_bytes` (an existing file keeps its bytes) and reserves the space where the file system can, so
    that a full drive is found at once. Raises SpaceError or DriveError otherwise.
    """

    def __init__(self, path: Path, size_bytes: int, *, direct: bool = True, pwritev: Pwritev = os.pwritev) -> None:
        super().__init__(path)
        assert size_bytes % PAGE_BYTES == 0
        self.size_bytes = size_bytes
        self._pwritev = pwritev
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if path.is_symlink():
                raise DriveError("is a link where a file is to be written", path=path, advice=_FOREIGN)
            self._fd = os.open(path, flags, 0o644)
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                problem = "is not a regular file, or has a second hard link"
                raise DriveError(problem, path=path, advice=_FOREIGN)
            if status.st_size != size_bytes:
                os.ftruncate(self._fd, size_bytes)
            self._reserve(size_bytes)
            if direct:
                self._switch_to_direct(flags)
        except DriveError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise drive_error("cannot open for writing", error, path, operation=Operation.MAKE) from error

    def _reserve(self, size_bytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise

    def _switch_to_direct(self, flags: int) -> None:
        try:
            fd = os.open(self.path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno in NOT_SUPPORTED:
                return
            raise
        probe = aligned_buffer(PAGE_BYTES)
        try:
            # The first page is a header: writing back the same bytes loses nothing.
            if os.preadv(fd, [probe.data], 0) == PAGE_BYTES:
                os.pwritev(fd, [probe.data], 0)
        except OSError as error:
            os.close(fd)
            if error.errno in NOT_SUPPORTED:
                return
            raise
        os.close(self._fd)
        self._fd = fd
        self.direct = True

    def write(self, offset: int, data: Bytes) -> None:
        """Write whole pages at a page offset. Raises SpaceError when the drive is full, DriveError otherwise."""
        assert offset % PAGE_BYTES == 0
        assert len(data) % PAGE_BYTES == 0
        done = stalls = 0
        while done < len(data):
            try:
                count = self._pwritev(self._fd, [data[done : done + TRANSFER_BYTES]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise drive_error(
                    "cannot write", error, self.path, offset + done, operation=Operation.WRITE
                ) from error
            # A short direct write may stop inside a page, but can continue only at a page's start.
            step = count // PAGE_BYTES * PAGE_BYTES if self.direct else count
            stalls = 0 if step else stalls + 1
            if stalls > STALLS_MAX:
                raise DriveError("writing makes no progress", path=self.path, offset=offset + done)
            done += step

    def sync(self) -> None:
        """Make the bytes durable. Raises DriveError when the drive reports that earlier writes were lost."""
        try:
            sync_file(self._fd, self.path)
            if not self.direct:  # leave the page cache to others; verification must read the drive
                with contextlib.suppress(OSError):
                    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise drive_error("cannot make writes durable", error, self.path, operation=Operation.SYNC) from error
