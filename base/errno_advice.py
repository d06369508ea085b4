"""One table of refused system calls: operation and errno give the reason and the advice.

Every OSError that a user can meet gets its words here: `refusal` says what it means for one kind of call and what
to do about it. An errno without an entry gets the operation's general advice. Pure; the errors that carry the
words are made in `base.direct_io` and by the rooms.
"""

from __future__ import annotations

import enum
import errno
import os
from dataclasses import dataclass


class Operation(enum.Enum):
    """The kind of system call that was refused."""

    OPEN = "open"
    LOOK = "look at"  # stat, readdir, statvfs
    READ = "read"
    MAP = "map into memory"
    WRITE = "write"
    MAKE = "make"  # a file or a directory
    RENAME = "rename"
    REMOVE = "remove"
    SYNC = "make durable"
    LOCK = "lock"
    MEMORY = "reserve memory"  # memfd_create, ftruncate and fallocate of a memfd, anonymous mmap
    THREAD = "start a thread"
    LISTEN = "listen"  # bind, listen, chmod and chown of a socket
    CONNECT = "connect"  # and every call on a connected socket


@dataclass(frozen=True, slots=True)
class Refusal:
    """The meaning of an errno for one kind of call; `is_full` means that a drive or a quota has no room left."""

    reason: str
    advice: str
    is_full: bool = False


NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.ENOTTY})
"""Errors of a file system that lacks a feature; a failing drive answers with others."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_FILES = frozenset(Operation) - {Operation.MEMORY, Operation.THREAD, Operation.LISTEN, Operation.CONNECT}
_WRITES = frozenset({Operation.WRITE, Operation.MAKE, Operation.RENAME, Operation.SYNC})

_PERMISSIONS = "Check the permissions and the mount options of this place"
_HEALTH = "The drive reports a fault; check its health (dmesg, smartctl) before trying again"
_GONE_MOUNT = "The drive or the network mount is gone; check it (findmnt, dmesg), then run the command again"
_MEMORY_LIMIT = "Raise the limit (ulimit -v, the cgroup's memory.max), or let the command need less"
_DESCRIPTORS = "Too many open files: raise the limit (ulimit -n)"
_DESCRIPTORS_ALL = "Too many open files on this machine: raise fs.file-max, or end other programs"
_PATH = "Check the path: a part of it is not a directory, or is a loop of links"
_CANNOT_MAP = "This file system cannot map files into memory; copy the file to another one"
_CUT = "The file was truncated; k3-verify names everything that is missing"
_SEALED = "The system denies this process shared memory (a seccomp filter, or vm.memfd_noexec); allow memfd_create"

_ANY_FILE: dict[int, str] = {
    errno.EACCES: _PERMISSIONS,
    errno.EPERM: _PERMISSIONS,
    errno.EROFS: "This place is mounted read-only: check the mount options, and dmesg for a fault that caused it",
    errno.EIO: _HEALTH,
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _DESCRIPTORS_ALL,
    errno.ENOMEM: _MEMORY_LIMIT,
    errno.ENOENT: "It does not exist, or was removed meanwhile: check the path, and that its drive is mounted",
    errno.ENOTDIR: _PATH,
    errno.ELOOP: _PATH,
    errno.EISDIR: "A directory is where a file is expected",
    errno.EEXIST: "Something else has this name already: move it away",
    errno.ENOTEMPTY: "The directory is not empty: move its content away",
    errno.ENAMETOOLONG: "The file system does not allow names this long: choose a shorter path",
    errno.EILSEQ: "The file system does not allow these bytes in a name: choose another path",
    errno.ESTALE: "The network file system's server replaced this file: remount it, then try again",
    errno.ENOTCONN: _GONE_MOUNT,
    errno.ECONNABORTED: _GONE_MOUNT,
    errno.ECONNRESET: _GONE_MOUNT,
    errno.EHOSTDOWN: _GONE_MOUNT,
    errno.EHOSTUNREACH: _GONE_MOUNT,
    errno.ENETDOWN: _GONE_MOUNT,
    errno.ENETUNREACH: _GONE_MOUNT,
    errno.ENODEV: _GONE_MOUNT,
    errno.ENXIO: _GONE_MOUNT,
    errno.ENOMEDIUM: _GONE_MOUNT,
    errno.ESHUTDOWN: _GONE_MOUNT,
    errno.EREMOTEIO: _HEALTH,
    errno.EBADMSG: _HEALTH,
    errno.EUCLEAN: "The file system's own structure is damaged: check it (fsck) before trying again",
    errno.ETIMEDOUT: "The drive or its server does not answer; check it (dmesg) and run the command again",
    errno.EAGAIN: "The system is short of resources just now: run the command again",
    errno.EBUSY: "Another program is using it: end that one, then run the command again",
    errno.ETXTBSY: "Another program is using it: end that one, then run the command again",
    errno.EXDEV: "The two places are on different file systems: choose places on the same one",
    errno.EMLINK: "The file system allows no more entries in this directory: remove some, or choose another",
    errno.EOVERFLOW: "The file is too large for this system: choose another file system",
    errno.ENOKEY: "The directory is encrypted and its key is not loaded: unlock it first",
    errno.ENOSYS: "This system or file system lacks this call: choose another place",
    errno.EOPNOTSUPP: "This file system lacks this feature: choose another place",
    errno.EINVAL: "This file system refuses the request: choose a place on another one",
    errno.ENODATA: _CUT,
    errno.EFBIG: (
        "Files of this size are not allowed here: raise ulimit -f, or choose a file system without such a limit "
        "(FAT32 ends at 4 GB)"
    ),
    errno.ENOSPC: "Free space on this drive and run the same command again; it continues where it stopped",
    errno.EDQUOT: "The user's quota is used up: free space or raise it, and run the same command again",
}

_CANNOT_LOCK = (
    "This file system has no locks: start its lock service, mount it with local locks (local_lock=flock), or "
    "choose another place"
)

_SPECIAL: dict[tuple[Operation, int], str] = {
    (Operation.MAP, errno.ENODEV): _CANNOT_MAP,
    (Operation.MAP, errno.ENOSYS): _CANNOT_MAP,
    (Operation.MAP, errno.EINVAL): _CANNOT_MAP,
    (Operation.MAP, errno.EOPNOTSUPP): _CANNOT_MAP,
    (Operation.MAP, errno.EACCES): _CANNOT_MAP,
    (Operation.MAP, errno.EPERM): "The mount forbids mapping this file: check its options, or copy it elsewhere",
    (Operation.MAP, errno.EAGAIN): "Too much memory is locked: raise the limit (ulimit -l)",
    (Operation.LOCK, errno.ENOLCK): _CANNOT_LOCK,
    (Operation.LOCK, errno.ENOSYS): _CANNOT_LOCK,
    (Operation.LOCK, errno.EOPNOTSUPP): _CANNOT_LOCK,
    (Operation.LOCK, errno.EINVAL): _CANNOT_LOCK,
    (Operation.LOCK, errno.EAGAIN): "Another program holds this lock: wait for it to end",
    (Operation.SYNC, errno.EIO): (
        "The drive lost writes that it had accepted: check its health (dmesg, smartctl), then run again"
    ),
    (Operation.MEMORY, errno.ENOMEM): _MEMORY_LIMIT,
    (Operation.MEMORY, errno.ENOSPC): _MEMORY_LIMIT,
    (Operation.MEMORY, errno.EDQUOT): _MEMORY_LIMIT,
    (Operation.MEMORY, errno.EAGAIN): _MEMORY_LIMIT,
    (Operation.MEMORY, errno.EFBIG): "More than can be shared at once, or ulimit -f is too low: ask for less",
    (Operation.MEMORY, errno.EACCES): _SEALED,
    (Operation.MEMORY, errno.EPERM): _SEALED,
    (Operation.MEMORY, errno.ENOSYS): _SEALED,
    (Operation.MEMORY, errno.EMFILE): _DESCRIPTORS,
    (Operation.MEMORY, errno.ENFILE): _DESCRIPTORS_ALL,
    (Operation.THREAD, errno.EAGAIN): "Raise the limit of threads (ulimit -u, the cgroup's pids.max)",
    (Operation.THREAD, errno.ENOMEM): _MEMORY_LIMIT,
    (Operation.LISTEN, errno.ENOENT): "Make the directory first, or choose another --socket",
    (Operation.LISTEN, errno.EADDRINUSE): "This name is taken: move what has it, or choose another --socket",
    (Operation.LISTEN, errno.EMFILE): _DESCRIPTORS,
    (Operation.LISTEN, errno.ENFILE): _DESCRIPTORS_ALL,
    (Operation.LISTEN, errno.ENOLCK): "This file system has no locks: choose a --socket in /run",
    (Operation.CONNECT, errno.ENOTSOCK): "Give the path that k3-store serve was started with as --socket",
    (Operation.CONNECT, errno.EMFILE): _DESCRIPTORS,
    (Operation.CONNECT, errno.ENFILE): _DESCRIPTORS_ALL,
    (Operation.CONNECT, errno.EACCES): "Run k3-store with --group, or run as the same user",
    (Operation.CONNECT, errno.EPERM): "Run k3-store with --group, or run as the same user",
    (Operation.CONNECT, errno.ENOENT): "Start it (k3-store serve), or name its --socket",
    (Operation.CONNECT, errno.ECONNREFUSED): "Start it (k3-store serve), or name its --socket",
    (Operation.CONNECT, errno.EPROTOTYPE): "Another program serves on this socket: give the path of k3-store's",
    (Operation.CONNECT, errno.ETIMEDOUT): "It may be starting or overloaded; try again",
    **{
        (Operation.LISTEN, number): (
            "Choose a --socket in a directory that this user may write, such as $XDG_RUNTIME_DIR"
        )
        for number in (errno.EACCES, errno.EPERM, errno.EROFS)
    },
}  # fmt: skip

_GENERAL: dict[Operation, str] = {
    Operation.MEMORY: "Allow less cache, or more memory",
    Operation.THREAD: "Raise the limits of this process (ulimit -a, the cgroup's), or let it use fewer threads",
    Operation.LISTEN: "Choose another --socket",
    Operation.CONNECT: "Read the stderr of k3-store serve, and start it again",
    **dict.fromkeys(_FILES, "The system's log (dmesg) may say more; try again, or choose another place"),
}

_REASONS: dict[tuple[Operation, int], str] = {
    (Operation.READ, errno.ENODATA): "the file ends before these bytes",
    (Operation.MAP, errno.ENODEV): "this file system cannot map files",
    (Operation.MAP, errno.ENOSYS): "this file system cannot map files",
    (Operation.WRITE, errno.EFBIG): "the file would exceed the largest size that is allowed here",
    (Operation.MAKE, errno.EFBIG): "the file would exceed the largest size that is allowed here",
    (Operation.CONNECT, errno.ENOTSOCK): "this is not a socket",
}


def refusal(operation: Operation, number: int | None, words: str | None = None) -> Refusal:
    """Return the meaning of errno `number` for an operation.

    `words` are the system's own, taken from the error; without them they are looked up. A `number` that is None or
    in no table gets the operation's general advice.
    """
    known = number or 0
    reason = _REASONS.get((operation, known)) or words or (os.strerror(known) if known else "no reason given")
    advice = _SPECIAL.get((operation, known))
    if advice is None and operation in _FILES:
        advice = _ANY_FILE.get(known)
    return Refusal(reason, advice or _GENERAL[operation], operation in _FILES and known in FULL)
