"""Free space and the largest file of a file system; some file systems report neither."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from k3.base.direct_io import drive_error
from k3.base.errno_advice import NOT_SUPPORTED, Operation


def free_bytes(place: Path) -> int | None:
    """Return the bytes free for this user on the file system of `place`; None when it does not report them.

    Some FUSE and network file systems report nothing: they have zero blocks, or refuse statvfs as unsupported.
    Raises DriveError when statvfs fails otherwise.
    """
    try:
        status = os.statvfs(place)
    except OSError as error:
        if error.errno in NOT_SUPPORTED | {errno.EPERM}:
            return None
        raise drive_error("cannot ask for the free space", error, place, operation=Operation.LOOK) from error
    if status.f_blocks == 0:
        return None
    return status.f_bavail * status.f_frsize


def largest_file_bytes(place: Path) -> int | None:
    """Return the size of the largest file that `place` allows; None when there is no limit or it is unknown.

    The limits are the process's own (ulimit -f), and 4 GB less one byte on FAT.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [] if limit == resource.RLIM_INFINITY else [limit]
    if _file_system(place) in _FAT:
        limits.append(FAT_FILE_BYTES)
    return min(limits, default=None)


FAT_FILE_BYTES = (1 << 32) - 1

_FAT = frozenset({"vfat", "msdos", "fat"})


def _file_system(place: Path) -> str | None:
    """Return the type of the file system that holds `place`, from the kernel's list of mounts."""
    try:
        device = place.stat().st_dev
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None  # unknown, so no limit is enforced
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in text.splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2:3] == [wanted] and rest:
            return rest.split()[0]
    return None
