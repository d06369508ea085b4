"""One regular file of a snapshot, a container or a saved state, opened for plain (buffered) reads.

Everything that reads a file which a user put there goes through here, so that a missing file, a dangling link,
a pipe in place of a file, a refusal of the operating system and a file that ends too early are told apart and
named once. Nothing here allocates by a number that came from a file: callers bound their lengths first.

A `RegularFile` holds one descriptor until it is closed; reads may be made from any thread.
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
"""One system call never asks for more: some kernels return at most 2,147,479,552 bytes, others refuse."""

_INCOMPLETE = "The download is incomplete or the file was cut: fetch it again"


class RegularFile:
    """An open regular file: `path` as it was named (links are followed, never replaced by their target)."""

    def __init__(self, path: Path, missing: type[K3Error] = ShardError, advice: str | None = None) -> None:
        """Open `path`.

        Raises `missing` when there is no such file, the link dangles or it is not a regular file, and
        DriveError when the operating system refuses. `advice` is what to do about a file that is not there
        or not whole, for those that were not fetched.
        """
        self.path = path
        self._missing = missing
        self._advice = advice
        try:
            # A pipe without a writer would block in open(); for regular files the flag changes nothing.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _open_failure(path, error, missing, advice) from error
        try:
            self.size_bytes = _checked_size(path, os.fstat(self._descriptor), missing, advice)
        except OSError as error:
            self._give_up()
            raise drive_error("cannot look at", error, path, operation=Operation.LOOK) from error
        except K3Error:
            self._give_up()
            raise

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. The `missing` error if the file ends early, DriveError on EIO."""
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
        """Fill `into` (bytes) from `offset`; on any error its content means nothing."""
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
        """Close the descriptor; a second call does nothing. DriveError when the system reports a fault."""
        descriptor, self._descriptor = self._descriptor, -1  # a close that fails has closed all the same
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except InterruptedError:
                return  # Linux has closed the descriptor before it says so
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
    """Size in bytes of a regular file, links followed, without opening it. Raises like `RegularFile`."""
    try:
        return _checked_size(path, path.stat(), missing, advice)
    except OSError as error:
        raise _open_failure(path, error, missing, advice) from error


def read_small_file(path: Path, max_bytes: int, error: type[K3Error], advice: str | None = None) -> bytes:
    """All of a file that is known to be small. `error` when it is missing or larger than `max_bytes`.

    `advice` is what to do about that, when it is not a file that somebody fetched.
    """
    with RegularFile(path, missing=error, advice=advice) as file:
        if file.size_bytes > max_bytes:
            raise error(
                f"has {file.size_bytes} bytes where at most {max_bytes} make sense",
                path=path,
                advice=advice or "This is some other file under this name: fetch it again",
            )
        return file.read(0, file.size_bytes)


def _open_failure(path: Path, error: OSError, missing: type[K3Error], advice: str | None) -> K3Error:
    if error.errno == errno.ELOOP:
        return missing("is a link that leads back to itself", path=path, advice=advice or "Fetch the file again")
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
            or "Relative targets count from the link's own folder. Fetch the file again, or move the "
            "blobs along with the links",
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
