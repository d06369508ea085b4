"""Large buffers in huge pages, and faulting their pages in before data arrives.

The first touch of fresh memory costs a page fault and the zeroing of a page: with 4 KiB pages that is slower than
any drive, and a direct read into untouched memory pays it page by page inside the system call. A buffer of private
anonymous memory on a 2 MiB boundary gets huge pages where the system grants them on request (shared anonymous
memory, which `mmap.mmap(-1, n)` makes by default, mostly does not); `populate` then faults in a part of it from
any idle thread, without the GIL.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from k3.base.direct_io import Bytes, memory_of
from k3.base.pages import PAGE_BYTES, page_ceil

HUGE_PAGE_BYTES = 2 << 20

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later, which Python's mmap module does not define."""

_REFUSES_POPULATE = (errno.EINVAL, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int


def huge_buffer(nbytes: int) -> Bytes:
    """Return `huge_memory(nbytes)` as a uint8 array."""
    import numpy as np

    return np.frombuffer(huge_memory(nbytes), dtype=np.uint8)


def huge_memory(nbytes: int) -> memoryview:
    """Return a zeroed buffer of `nbytes` rounded up to whole pages, none of them populated yet.

    From 2 MiB on it begins on a huge page's boundary, and huge pages are requested; a system that has none gives
    small ones. Raises MemoryError or OSError when there is no address space.
    """
    capacity = max(PAGE_BYTES, page_ceil(nbytes))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if capacity < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return memoryview(mmap.mmap(-1, capacity, flags=flags))
    # Untouched pages on both sides keep it a separate mapping, which `huge_pages` finds by its address.
    whole = memoryview(mmap.mmap(-1, capacity + HUGE_PAGE_BYTES + PAGE_BYTES, flags=flags))
    skip = PAGE_BYTES + -(address(whole) + PAGE_BYTES) % HUGE_PAGE_BYTES
    buffer = whole[skip : skip + capacity]
    # EINVAL on a kernel built without huge pages; the buffer then has small ones.
    _libc.madvise(address(buffer), capacity, mmap.MADV_HUGEPAGE)
    return buffer


def address(buffer: Bytes | memoryview) -> int:
    """Return the address at which a writable buffer begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory_of(buffer)))


def populate(buffer: Bytes | memoryview) -> None:
    """Fault in the pages under `buffer`. Its content stays; no other thread may write to it meanwhile.

    `buffer` begins on a page boundary. Raises MemoryError when the system gives no more memory.
    """
    if not len(buffer):
        return
    start = address(buffer)
    assert start % PAGE_BYTES == 0
    if _libc.madvise(start, page_ceil(len(buffer)), _POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number in _REFUSES_POPULATE:
        touched = memory_of(buffer)[::PAGE_BYTES]
        touched[:] = bytes(touched)  # before Linux 5.14: write to every page
        return
    raise MemoryError(f"cannot populate {len(buffer)} bytes: {os.strerror(number)}")
