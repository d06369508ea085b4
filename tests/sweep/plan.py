"""Which call fails with what: pure.

For every function that a command was seen to call, some of its calls (the first ones, the last ones, and some
between) and every errno that such a call can plausibly answer with.
"""

from __future__ import annotations

import errno as e
import random
from collections.abc import Mapping, Sequence

from tests.support.zygote import Fault

_PATH = (e.EIO, e.EACCES, e.ENOENT, e.ELOOP, e.ENAMETOOLONG, e.ENOTDIR, e.ESTALE, e.ENOMEM)
_TRANSFER = (e.EIO, e.EINTR, e.EBADF, e.ESTALE, e.ENODEV)
_WRITING = (e.EIO, e.ENOSPC, e.EDQUOT, e.EFBIG, e.EINTR, e.EROFS, e.EPIPE)

MISSING = frozenset({e.ENOENT, e.ENOTDIR, e.ELOOP, e.ENAMETOOLONG})
"""Answers that say a file is not there: of a file that must be, that is damage (exit code 1)."""

ERRNOS: Mapping[str, Sequence[int]] = {
    "open": (*_PATH, e.EMFILE, e.ENFILE, e.EROFS, e.EINVAL, e.EINTR, e.ENOSPC, e.ETXTBSY),
    "read": (*_TRANSFER, e.EISDIR, e.ENOTCONN, e.ETIMEDOUT),
    "pread": (*_TRANSFER, e.EINVAL, e.ENODATA, e.ETIMEDOUT),
    "write": _WRITING,
    "pwrite": (*_WRITING, e.EINVAL),
    "fsync": (e.EIO, e.EINVAL, e.EOPNOTSUPP, e.ENOSPC, e.EROFS, e.EINTR),
    "fdatasync": (e.EIO, e.EINVAL, e.ENOSPC),
    "rename": (e.EIO, e.EACCES, e.EXDEV, e.ENOSPC, e.EROFS, e.EBUSY),
    "link": (e.EIO, e.EPERM, e.EMLINK, e.EEXIST),
    "unlink": (e.EIO, e.EACCES, e.EPERM, e.EBUSY, e.EROFS),
    "mkdir": (e.EIO, e.EACCES, e.ENOSPC, e.EEXIST, e.EROFS),
    "stat": _PATH,
    "fstat": (e.EIO, e.EBADF, e.ESTALE, e.ENOMEM),
    "statvfs": (e.EIO, e.ENOSYS, e.EACCES, e.ENOENT),
    "mmap": (e.ENOMEM, e.ENODEV, e.EACCES, e.EAGAIN, e.EINVAL, e.ENOSYS, e.EPERM),
    "munmap": (e.ENOMEM, e.EINVAL),
    "msync": (e.EIO, e.ENOMEM),
    "ftruncate": (e.EIO, e.EFBIG, e.ENOSPC, e.EINVAL, e.EPERM),
    "fallocate": (e.EIO, e.ENOSPC, e.EOPNOTSUPP, e.EINVAL, e.EFBIG, e.EINTR),
    "fadvise": (e.EINVAL, e.ESPIPE, e.ENOSYS),
    "close": (e.EIO, e.EINTR, e.EDQUOT, e.ENOSPC),
    "flock": (e.ENOLCK, e.EOPNOTSUPP, e.EINTR, e.EWOULDBLOCK, e.EIO),
    "fcntl": (e.EINVAL, e.EPERM, e.EAGAIN, e.ENOLCK, e.EMFILE),
    "opendir": (e.EIO, e.EACCES, e.ENOENT, e.EMFILE, e.ENOTDIR, e.ENOMEM),
    "readdir": (e.EIO, e.ESTALE, e.ENOENT),
    "memfd": (e.EMFILE, e.ENFILE, e.EACCES, e.ENOMEM, e.ENOSYS),
    "socket": (e.EMFILE, e.ENFILE, e.EACCES, e.ENOMEM, e.EAFNOSUPPORT),
    "bind": (e.EADDRINUSE, e.EACCES, e.EROFS, e.EIO, e.ENOENT),
    "listen": (e.EADDRINUSE, e.EOPNOTSUPP),
    "accept": (e.EMFILE, e.ECONNABORTED, e.EINTR, e.ENOMEM, e.EPERM),
    "connect": (e.ECONNREFUSED, e.EACCES, e.ENOENT, e.EINTR, e.EAGAIN, e.ETIMEDOUT, e.EPROTOTYPE),
    "sendmsg": (e.EPIPE, e.ECONNRESET, e.EAGAIN, e.ENOBUFS, e.EINTR, e.EMSGSIZE),
    "recvmsg": (e.ECONNRESET, e.EINTR, e.EAGAIN, e.ENOMEM),
    "eventfd": (e.EMFILE, e.ENOMEM, e.ENODEV),
    "poll": (e.EINTR, e.ENOMEM),
    "epoll": (e.EINTR, e.EMFILE, e.ENOMEM, e.ENOSPC),
    "thread": (e.EAGAIN, e.ENOMEM, e.EPERM),
    "madvise": (e.EINVAL, e.ENOMEM, e.EAGAIN),
    "affinity": (e.EINVAL, e.ENOSYS, e.EPERM),
    "syscall": (e.ENOSYS, e.EPERM, e.ENOMEM, e.EINVAL),
    "chmod": (e.EPERM, e.EIO, e.EROFS, e.EOPNOTSUPP),
    "lseek": (e.EINVAL, e.ESPIPE, e.EIO),
    "readlink": (e.EIO, e.EACCES, e.ENOENT),
    "rmdir": (e.EIO, e.EACCES, e.ENOTEMPTY, e.EBUSY),
    "pipe": (e.EMFILE, e.ENFILE),
    "sockopt": (e.EINVAL, e.ENOPROTOOPT, e.ENOMEM),
}


def calls(count: int, most: int) -> list[int]:
    """Return about `most` of the calls 1 to `count`: half of them the first, some the last, some between."""
    if count <= most:
        return list(range(1, count + 1))
    first, last = most // 2, most // 4
    middle = most - first - last
    rest = range(first + 1, count - last + 1)
    between = [rest[len(rest) * place // middle] for place in range(middle)]
    return sorted({*range(1, first + 1), *between, *range(count - last + 1, count + 1)})


def faults(counts: Mapping[str, int], most_calls: int, *, rest: bool = False) -> list[Fault]:
    """Return every fault of the calls that were counted, at most `most_calls` of each function.

    With `rest` each of the calls between fails too: with one errno, the function's next in turn.
    """
    planned = []
    for function, listed in ERRNOS.items():
        numbers = tuple(dict.fromkeys(listed))
        chosen = set(calls(counts[function], most_calls))
        for nth in range(1, counts[function] + 1) if rest else sorted(chosen):
            answers = numbers if nth in chosen else (numbers[nth % len(numbers)],)
            planned += [Fault(function, nth, number) for number in answers]
    return planned


def sample(all_faults: Sequence[Fault], size: int, seed: int) -> list[Fault]:
    """Return `size` of the faults, drawn by `seed` so that every function has its turn."""
    source = random.Random(seed)
    by_function: dict[str, list[Fault]] = {}
    for fault in all_faults:
        by_function.setdefault(fault.function, []).append(fault)
    piles = list(by_function.values())
    for pile in piles:
        source.shuffle(pile)
    source.shuffle(piles)
    drawn: list[Fault] = []
    while piles and len(drawn) < size:
        drawn += [pile.pop() for pile in piles][: size - len(drawn)]
        piles = [pile for pile in piles if pile]
    return drawn
