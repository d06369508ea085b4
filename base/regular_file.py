"""One regular file of a snapshot, a container or a saved state, opened for plain (buffered) reads.

Every file that a user supplied is read through this class, so that a missing file, a dangling link, a pipe instead
of a file, a refusal of the operating system and a truncated file each get their own message. Nothing here
allocates by a number from a file: callers bound their lengths first. A `RegularFile` holds one descriptor until it
is closed; any thread may read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from types import TracebackType

from k3.base.direct_io import drive_error
from k3.base.errno_advice import Operation
from k3.base.errors import K3Error, ShardError

READ_BYTES_MAX = 1 << 30
"""Limit of one system call: some kernels return at most 2,147,479,552 bytes, others refuse more."""

_INCOMPLETE = "The download is incomplete or the file was truncated: fetch it again"


class RegularFile:
    """An open regular file. `path` is the given one, also if it is a link."""

    def __init__(self, path: Path, missing: type[K3Error] = ShardError, advice: str | None = None) -> None:
        """Open `path`.

        Raises `missing` when there is no such file, the link dangles or it is not a regular file, and DriveError
        when the operating system refuses. `advice` replaces "fetch it again" for files that were not downloaded.
        """
        self.path = path
        self._missing = missing
        self._advice = advice
        try:
            # O_NONBLOCK: open() of a pipe without a writer would block; regular files ignore the flag.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _open_failure(path, error, missing, advice) from error
        try:
            self.size_bytes = _checked_size(path, os.fstat(self._descriptor), missing, advice)
        except OSError as error:
            self._give_up()
            raise drive_error("cannot stat", error, path, operation=Operation.LOOK) from error
        except K3Error:
            self._give_up()
            raise

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises `missing` if the file ends early, DriveError on EIO."""
        try:
            data = os.pread(self._descriptor, min(length, READ_BYTES_MAX), offset)
        except OSError as error:
            raise drive_error("cannot read", error, self.path, offset, operation=Operation.READ) from error
        if len(data) == length:
            return data
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` (bytes) from `offset`; after an error its content is undefined."""
        done = 0
        while done < len(into):
            try:
                got = os.preadv(self._descriptor, [into[done : done + READ_BYTES_MAX]], offset + done)
            except OSError as error:
                raise drive_error(
                    "cannot read", error, self.path, offset + done, operation=Operation.READ
                ) from error
            if got == 0:
                raise self._missing(
                    f"the file ends {len(into) - done} bytes too early",
                    path=self.path,
                    offset=offset + done,
                    advice=self._advice or _INCOMPLETE,
                )
            done += got

    def close(self) -> None:
        """Close the descriptor; a second call does nothing. Raises DriveError when the system reports a fault."""
        descriptor, self._descriptor = self._descriptor, -1  # close() frees the descriptor even when it fails
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except InterruptedError:
                return  # Linux has freed the descriptor by then
            except OSError as error:
                raise drive_error("cannot close", error, self.path) from error

    def _give_up(self) -> None:
        """Close after an error that is already being raised: it says more than a close that fails as well."""
        with contextlib.suppress(K3Error):
            self.close()

    def __enter__(self) -> RegularFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._give_up()


def regular_size(path: Path, missing: type[K3Error] = ShardError, advice: str | None = None) -> int:
    """Return the size in bytes of a regular file, links followed, without opening it.

    Raises what `RegularFile` raises.
    """
    try:
        return _checked_size(path, path.stat(), missing, advice)
    except OSError as error:
        raise _open_failure(path, error, missing, advice) from error


def read_small_file(path: Path, max_bytes: int, error: type[K3Error], advice: str | None = None) -> bytes:
    """Return the content of a file of at most `max_bytes`. Raises `error` when it is missing or larger.

    `advice` replaces "fetch it again" for files that were not downloaded.
    """
    with RegularFile(path, missing=error, advice=advice) as file:
        if file.size_bytes > max_bytes:
            raise error(
                f"has {file.size_bytes} bytes, more than the {max_bytes} allowed for this file",
                path=path,
                advice=advice or "This is another file under this name: fetch it again",
            )
        return file.read(0, file.size_bytes)


def _open_failure(path: Path, error: OSError, missing: type[K3Error], advice: str | None) -> K3Error:
    if error.errno == errno.ELOOP:
        return missing("is a loop of links", path=path, advice=advice or "Fetch the file again")
    if error.errno == errno.ENXIO:
        problem = "is a socket or device where a file is expected"
        return missing(problem, path=path, advice=advice or "Put the file there")
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        return drive_error("cannot read", error, path)
    if path.is_symlink():
        target = path.readlink()
        return missing(
            f"is a dangling link: its target {target} does not exist",
            path=path,
            advice=advice
            or "Relative targets start at the link's own folder. Fetch the file again, or move the blobs along "
            "with the links",
        )
    problem = "does not exist" if advice is None else "is missing"
    return missing(problem, path=path, advice=advice or "Fetch the file, or name the directory that holds it")


def _checked_size(path: Path, status: os.stat_result, missing: type[K3Error], advice: str | None) -> int:
    if not stat.S_ISREG(status.st_mode):
        problem = f"is {_kind(status.st_mode)} where a file is expected"
        raise missing(problem, path=path, advice=advice or "Put the file itself there")
    return status.st_size


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a device or socket"
