"""Holds up that shared memory is there before anybody counts on it, in huge pages where they can be had."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from k3.base.errors import UnsupportedError
from k3.store.protocol.native import NativeServer, ServerSettings, make_memfd, map_shared, seal_future_write

MB = 1 << 20
HUGE = 2 * MB


def mapped_huge_bytes() -> int:
    """Return the bytes of shared memory that this process maps with huge pages, as the kernel reports them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, HUGE - 4096, HUGE, 3 * HUGE + 4096, 70 * MB + 12288])
def test_all_of_it_is_present_zero_and_counted(size_bytes: int) -> None:
    told: list[int] = []
    fd, huge_bytes = make_memfd("test", size_bytes, told.append)
    try:
        status = os.fstat(fd)
        assert status.st_size == size_bytes
        assert status.st_blocks * 512 >= size_bytes
        assert told == sorted(told)
        assert told[-1:] == ([size_bytes] if size_bytes else [])
        assert huge_bytes % HUGE == 0
        assert huge_bytes <= size_bytes
        before = mapped_huge_bytes()
        view = map_shared(fd, size_bytes)
        assert not view.any()
        assert mapped_huge_bytes() - before == huge_bytes, "the count is not what the kernel says"
        assert not view.flags.writeable
    finally:
        os.close(fd)


def test_every_whole_huge_page_is_one_where_the_kernel_gives_them() -> None:
    fd, huge_bytes = make_memfd("test", 5 * HUGE + 4096)
    os.close(fd)
    if huge_bytes == 0:
        pytest.skip("this kernel gives shared memory no huge pages")
    assert huge_bytes == 5 * HUGE


def test_the_arena_says_how_much_of_it_is_huge() -> None:
    settings = ServerSettings(slot_bytes=MB, slots=8, max_clients=1, quota=1)
    told: list[int] = []
    with NativeServer(settings, told.append) as server:
        assert told == [8 * MB]
        assert server.arena_huge_bytes in (0, 8 * MB)
        before = mapped_huge_bytes()
        view = map_shared(server.arena_fd, server.arena_bytes)
        assert not view.any()
        assert mapped_huge_bytes() - before == server.arena_huge_bytes


def test_what_is_written_through_one_mapping_is_read_through_another() -> None:
    fd, _ = make_memfd("test", 3 * HUGE)
    writable = map_shared(fd, 3 * HUGE, writable=True)
    readable = map_shared(fd, 3 * HUGE)
    writable[:] = np.arange(3 * HUGE, dtype=np.uint64).view(np.uint8)[: 3 * HUGE]
    assert np.array_equal(readable, writable)
    seal_future_write(fd)
    with pytest.raises(OSError, match="Operation not permitted"):
        map_shared(fd, 3 * HUGE, writable=True)
    writable[5] = 99  # the mapping that was there stays
    assert readable[5] == 99
    os.close(fd)


def test_a_view_outlives_descriptor_and_mapping_object() -> None:
    fd, _ = make_memfd("test", HUGE)
    view = map_shared(fd, HUGE, writable=True)[100:200]
    os.close(fd)
    view[:] = 7
    assert view.sum() == 700


def test_more_than_there_is_is_refused_with_the_numbers() -> None:
    with pytest.raises(UnsupportedError, match=str(1 << 50)):
        make_memfd("test", 1 << 50)


def test_a_caller_can_end_a_reservation() -> None:
    """As Ctrl-C does: what the callback raises comes out, and the memory is given back."""
    open_before = len(list(Path("/proc/self/fd").iterdir()))

    def stop(done_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_memfd("test", 200 * MB, stop)
    with pytest.raises(KeyboardInterrupt):
        NativeServer(ServerSettings(slot_bytes=MB, slots=8, max_clients=1, quota=1), stop)
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before
