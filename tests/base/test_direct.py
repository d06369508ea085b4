"""Holds up aligned I/O: every byte asked for or an error with its place, whatever drive and kernel do."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base import direct_io
from k3.base.direct_io import (
    ReadFile,
    WriteFile,
    aligned_buffer,
    drive_error,
    span_bytes,
    sync_directory,
)
from k3.base.errors import DriveError, SpaceError
from k3.base.pages import PAGE_BYTES
from tests.support.mounts import read_only, resize, small_tmpfs

SIZE = 9 * PAGE_BYTES + 1234
CONTENT = np.random.default_rng(5).integers(1, 256, SIZE, dtype=np.uint8).tobytes()
"""No byte is zero, so a zero that was never read shows."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "data"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() <= before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def read(path: Path, offset: int, length: int, **options: Any) -> bytes:
    with ReadFile(path, **options) as opened:
        view = opened.read(offset, length, aligned_buffer(span_bytes(offset, length)))
        assert len(view) == length
        return view.tobytes()


@pytest.fixture(params=["direct", "buffered"])
def is_direct(request: pytest.FixtureRequest, file: Path) -> bool:
    if request.param == "direct":
        with ReadFile(file) as opened:
            if not opened.direct:
                pytest.skip("the temporary directory does not take O_DIRECT")
    return bool(request.param == "direct")


# --- reading


@pytest.mark.parametrize("phase", [0, 1, 2, 511, 512, 513, 2048, 4095])
@pytest.mark.parametrize("length", [0, 1, 511, 512, 4095, 4096, 4097, 3 * 4096, 20_000])
def test_every_phase_gives_exactly_its_bytes(file: Path, is_direct: bool, phase: int, length: int) -> None:
    for page in (0, 1, 3):
        offset = page * PAGE_BYTES + phase
        assert read(file, offset, length, direct=is_direct) == CONTENT[offset : offset + length]


@pytest.mark.parametrize("back", [0, 1, 511, 1233, 1234, 1235, 5000])
def test_the_end_of_an_unaligned_file_is_reached(file: Path, is_direct: bool, back: int) -> None:
    assert read(file, SIZE - back, back, direct=is_direct) == CONTENT[SIZE - back :]


@pytest.mark.parametrize(("offset", "length"), [(SIZE, 1), (0, SIZE + 1), (SIZE + 9999, 1), (SIZE - 1, 2)])
def test_a_range_beyond_the_end_is_an_error(file: Path, is_direct: bool, offset: int, length: int) -> None:
    with ReadFile(file, direct=is_direct) as opened, pytest.raises(DriveError) as caught:
        opened.read(offset, length, aligned_buffer(span_bytes(offset, length)))
    assert caught.value.path == str(file)
    assert caught.value.offset == offset
    assert f"{offset + length - SIZE} bytes too early" in caught.value.problem


class ScriptedReads:
    """os.preadv with faults: each call is answered by the next word of a script, then as it is."""

    def __init__(self, script: Callable[[int, int], int | OSError | None]) -> None:
        self.script = script
        self.calls: list[tuple[int, int]] = []

    def __call__(self, fd: int, buffers: Any, offset: int) -> int:
        (buffer,) = buffers
        self.calls.append((offset, len(buffer)))
        answer = self.script(offset, len(buffer))
        if isinstance(answer, OSError):
            raise answer
        return os.preadv(fd, [buffer if answer is None else buffer[:answer]], offset)


def half(offset: int, count: int) -> int:
    return max(1, count // 2)


@pytest.mark.parametrize("script", [half, lambda o, n: 1, lambda o, n: min(n, 513), lambda o, n: max(1, n - 1)])
def test_short_reads_are_continued(file: Path, is_direct: bool, script: Any) -> None:
    for offset, length in ((0, SIZE), (1, 5000), (4096, 8192), (4000, 200), (SIZE - 10, 10)):
        got = read(file, offset, length, direct=is_direct, preadv=copying(script))
        assert got == CONTENT[offset : offset + length]


def copying(script: Callable[[int, int], int]) -> Callable[[int, Any, int], int]:
    """Return a read that fills only as many bytes as the script says, like a kernel that stops early."""

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        (buffer,) = buffers
        data = CONTENT[offset : offset + len(buffer)]
        count = min(len(data), script(offset, len(buffer)))
        buffer[:count] = np.frombuffer(data[:count], np.uint8)
        return count

    return preadv


@given(seed=st.integers(0, 2**32), offset=st.integers(0, SIZE), length=st.integers(0, SIZE))
@settings(max_examples=60, deadline=None)
def test_random_short_and_interrupted_reads_lose_nothing(file: Path, seed: int, offset: int, length: int) -> None:
    length = min(length, SIZE - offset)
    for is_direct in (True, False):
        rng = random.Random(seed)

        def answer(offset: int, count: int, rng: random.Random = rng) -> int:
            if rng.random() < 0.3:
                raise InterruptedError
            return rng.randint(1, count)

        got = read(file, offset, length, direct=is_direct, preadv=copying(answer))
        assert got == CONTENT[offset : offset + length]


def test_thousands_of_interruptions_are_survived(file: Path) -> None:
    remaining = [5000]

    def script(offset: int, count: int) -> OSError | None:
        remaining[0] -= 1
        return InterruptedError() if remaining[0] > 0 else None

    assert read(file, 10, 100, preadv=ScriptedReads(script)) == CONTENT[10:110]


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_fault_of_the_drive_names_file_and_offset(file: Path, is_direct: bool, at: int) -> None:
    def script(offset: int, count: int) -> int | OSError:
        return OSError(errno.EIO, "Input/output error") if offset >= at * PAGE_BYTES else PAGE_BYTES

    with ReadFile(file, direct=is_direct, preadv=ScriptedReads(script)) as opened:
        with pytest.raises(DriveError) as caught:
            opened.read(0, SIZE, aligned_buffer(SIZE))
        assert caught.value.offset == at * PAGE_BYTES
    assert caught.value.path == str(file)
    assert "cannot read: Input/output error" in caught.value.problem
    assert "smartctl" in str(caught.value.advice)


def test_a_file_that_shrinks_is_an_error_and_never_zeros(tmp_path: Path, is_direct: bool) -> None:
    path = tmp_path / "shrinking"
    for kept in (0, 1, 4096, 5000, 8192):
        path.write_bytes(CONTENT)
        with ReadFile(path, direct=is_direct) as opened:
            os.truncate(path, kept)
            with pytest.raises(DriveError, match="ended while being read") as caught:
                opened.read(0, 3 * PAGE_BYTES, aligned_buffer(3 * PAGE_BYTES))
            assert caught.value.offset is not None
            assert caught.value.offset <= kept


def test_a_buffer_that_is_too_small_is_a_programmers_error(file: Path, is_direct: bool) -> None:
    with ReadFile(file, direct=is_direct) as opened, pytest.raises(AssertionError):
        opened.read(0, 3 * PAGE_BYTES, aligned_buffer(PAGE_BYTES))


def test_large_reads_are_cut_into_transfers(file: Path, is_direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel moves at once (2 GiB - 4 KiB), in small: the limit is lowered instead."""
    monkeypatch.setattr(direct_io, "TRANSFER_BYTES", 2 * PAGE_BYTES)
    recorded = ScriptedReads(lambda offset, count: None)
    assert read(file, 1, SIZE - 1, direct=is_direct, preadv=recorded) == CONTENT[1:]
    assert len(recorded.calls) == 5
    assert all(count <= 2 * PAGE_BYTES for _, count in recorded.calls)
    assert direct_io.TRANSFER_BYTES < 2**31 - 4096


def test_offsets_beyond_four_gigabytes(tmp_path: Path, is_direct: bool) -> None:
    path = tmp_path / "sparse"
    place = (5 << 30) + 777
    with open(path, "wb") as out:
        out.truncate(6 << 30)
        out.seek(place)
        out.write(CONTENT)
    assert read(path, place, SIZE, direct=is_direct) == CONTENT
    assert read(path, place - 10, 20, direct=is_direct) == bytes(10) + CONTENT[:10]


def test_concurrent_reads_do_not_disturb_each_other(file: Path) -> None:
    failures: list[int] = []
    with ReadFile(file, preadv=copying(half)) as opened:

        def work(seed: int) -> None:
            rng = random.Random(seed)
            buffer = aligned_buffer(SIZE + 2 * PAGE_BYTES)
            for _ in range(100):
                offset = rng.randrange(SIZE)
                length = rng.randrange(SIZE - offset)
                if opened.read(offset, length, buffer).tobytes() != CONTENT[offset : offset + length]:
                    failures.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("name", ["missing", "directory/missing"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DriveError, match="cannot open for reading: No such file") as caught:
        ReadFile(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DriveError), ReadFile(tmp_path) as opened:
        opened.read(0, 1, aligned_buffer(1))


# --- where O_DIRECT is not taken


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("step", ["open", "probe"])
def test_a_fallback_is_told(file: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str) -> None:
    refuse_direct(monkeypatch, number, step)
    with ReadFile(file) as opened:
        assert not opened.direct
        assert opened.read(100, 9000, aligned_buffer(span_bytes(100, 9000))).tobytes() == CONTENT[100:9100]
    with ReadFile(file, direct=False) as opened:
        assert not opened.direct


def refuse_direct(monkeypatch: pytest.MonkeyPatch, number: int, step: str) -> None:
    """Make the system refuse O_DIRECT when a file is opened, or only when it is used."""
    open_, preadv = os.open, os.preadv
    refused: set[int] = set()

    def opening(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        fd = open_(path, flags, *rest, **more)
        refused.discard(fd)
        if flags & os.O_DIRECT:
            if step == "open":
                os.close(fd)
                raise OSError(number, os.strerror(number))
            refused.add(fd)
        return fd

    def reading(fd: int, buffers: Any, offset: int) -> int:
        if fd in refused:
            raise OSError(number, os.strerror(number))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "preadv", reading)


def test_a_fault_during_the_probe_is_no_fallback(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch, errno.EIO, "probe")
    with pytest.raises(DriveError, match="Input/output error"):
        ReadFile(file)
    with pytest.raises(DriveError, match="Input/output error"):
        WriteFile(file.with_name("new"), PAGE_BYTES)


def test_memory_file_systems_say_what_they_take(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "memory", "1m") as place:
        path = place / "data"
        path.write_bytes(CONTENT)
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
            takes = True
        except OSError:
            takes = False
        with ReadFile(path) as opened:
            assert opened.direct == takes
            assert opened.read(3, 5000, aligned_buffer(span_bytes(3, 5000))).tobytes() == CONTENT[3:5003]
        with WriteFile(place / "out", PAGE_BYTES) as written:
            assert written.direct == takes


# --- writing


def pages(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    buffer = aligned_buffer(count * PAGE_BYTES)
    buffer[:] = np.random.default_rng(seed).integers(1, 256, len(buffer), dtype=np.uint8)
    return buffer


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def write_direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_written_pages_are_read_back_and_the_rest_is_zero(tmp_path: Path, write_direct: bool) -> None:
    path = tmp_path / "out"
    with WriteFile(path, 10 * PAGE_BYTES, direct=write_direct) as opened:
        opened.write(3 * PAGE_BYTES, pages(2))
        opened.write(9 * PAGE_BYTES, pages(1, 1))
        opened.sync()
    data = path.read_bytes()
    assert len(data) == 10 * PAGE_BYTES
    assert data[3 * PAGE_BYTES : 5 * PAGE_BYTES] == pages(2).tobytes()
    assert data[9 * PAGE_BYTES :] == pages(1, 1).tobytes()
    assert not any(data[: 3 * PAGE_BYTES])
    assert path.stat().st_blocks * 512 >= 10 * PAGE_BYTES, "space is reserved"


def test_an_existing_file_keeps_its_bytes(tmp_path: Path, write_direct: bool) -> None:
    path = tmp_path / "out"
    for size in (2, 6):
        path.write_bytes(pages(4).tobytes())
        with WriteFile(path, size * PAGE_BYTES, direct=write_direct):
            pass
        data = path.read_bytes()
        kept = min(4, size) * PAGE_BYTES
        assert len(data) == size * PAGE_BYTES
        assert data[:kept] == pages(4).tobytes()[:kept]
        assert not any(data[kept:])


@pytest.mark.parametrize("keep", [lambda n: max(1, n // 2), lambda n: min(n, 4096), lambda n: max(1, n - 1)])
def test_short_writes_are_continued(tmp_path: Path, write_direct: bool, keep: Callable[[int], int]) -> None:
    path = tmp_path / "out"
    turns = [0]

    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        (buffer,) = buffers
        turns[0] += 1
        count = keep(len(buffer)) if turns[0] % 3 else len(buffer)
        if turns[0] % 5 == 0:
            raise InterruptedError
        with open(path, "r+b", buffering=0) as file:  # a copy of the prefix: O_DIRECT takes whole pages only
            os.pwrite(file.fileno(), buffer[:count].tobytes(), offset)
        return count

    with WriteFile(path, 40 * PAGE_BYTES, direct=write_direct, pwritev=pwritev) as opened:
        opened.write(PAGE_BYTES, pages(37))
    assert path.read_bytes() == bytes(PAGE_BYTES) + pages(37).tobytes() + bytes(2 * PAGE_BYTES)


@pytest.mark.parametrize("count", [0, 100])
def test_a_write_that_stands_still_is_an_error(tmp_path: Path, count: int) -> None:
    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        return count

    with WriteFile(tmp_path / "out", PAGE_BYTES, pwritev=pwritev) as opened:
        if count and not opened.direct:
            pytest.skip("the temporary directory does not take O_DIRECT")
        with pytest.raises(DriveError, match="no progress") as caught:
            opened.write(0, pages(1))
    assert caught.value.offset == 0


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, DriveError), (errno.ENOSPC, SpaceError), (errno.EDQUOT, SpaceError)])  # fmt: skip  # noqa: E501
def test_a_refused_write_names_its_place(tmp_path: Path, number: int, kind: type[DriveError]) -> None:
    def pwritev(fd: int, buffers: Any, offset: int) -> int:
        if offset >= 2 * PAGE_BYTES:
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, [buffers[0][:PAGE_BYTES]], offset)

    opened = WriteFile(tmp_path / "out", 4 * PAGE_BYTES, pwritev=pwritev)
    with opened, pytest.raises(DriveError) as caught:
        opened.write(PAGE_BYTES, pages(3))
    assert type(caught.value) is kind
    assert caught.value.offset == 2 * PAGE_BYTES
    assert caught.value.path == str(tmp_path / "out")


def test_a_lost_write_shows_when_it_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with WriteFile(tmp_path / "out", PAGE_BYTES) as opened:
        opened.write(0, pages(1))
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(DriveError, match="cannot make writes durable"):
            opened.sync()


@pytest.mark.parametrize(("offset", "count"), [(1, 4096), (4096, 100), (512, 4096)])
def test_unaligned_writes_are_a_programmers_error(tmp_path: Path, offset: int, count: int) -> None:
    with WriteFile(tmp_path / "out", 4 * PAGE_BYTES) as opened, pytest.raises(AssertionError):
        opened.write(offset, aligned_buffer(PAGE_BYTES)[:count])


def test_a_full_drive_shows_when_the_file_is_made(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "drive", "1m") as place:
        with pytest.raises(SpaceError, match="cannot open for writing: No space left") as caught:
            WriteFile(place / "big", 2 << 20)
        assert "Free space on this drive" in str(caught.value.advice)
        resize(place, "4m")
        with WriteFile(place / "big", 2 << 20) as opened:
            opened.write(0, pages(3))
        assert (place / "big").read_bytes()[: 3 * PAGE_BYTES] == pages(3).tobytes()


def test_a_read_only_drive_is_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    with read_only(tmp_path / "real", tmp_path / "view") as view:
        with pytest.raises(DriveError, match="Read-only file system") as caught:
            WriteFile(view / "x", PAGE_BYTES)
        assert "mount options" in str(caught.value.advice)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("step", ["open", "probe"])
def test_writing_without_o_direct_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    refuse_direct(monkeypatch, number, step)
    with WriteFile(tmp_path / "out", 2 * PAGE_BYTES) as opened:
        assert not opened.direct
        opened.write(PAGE_BYTES, pages(1))
        opened.sync()
    assert (tmp_path / "out").read_bytes() == bytes(PAGE_BYTES) + pages(1).tobytes()


def test_a_file_system_that_cannot_reserve_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with WriteFile(tmp_path / "out", 2 * PAGE_BYTES) as opened:
        opened.write(0, pages(2))
    assert (tmp_path / "out").read_bytes() == pages(2).tobytes()


def test_closing_twice_is_harmless_and_a_failed_opening_leaks_nothing(tmp_path: Path, file: Path) -> None:
    opened = ReadFile(file)
    opened.close()
    opened.close()
    before = descriptors()
    for _ in range(5):
        with pytest.raises(DriveError):
            ReadFile(tmp_path / "none")
        with pytest.raises(DriveError):
            WriteFile(tmp_path / "no" / "file", PAGE_BYTES)
    assert descriptors() == before


# --- the small ones


@given(st.integers(0, 2**50), st.integers(0, 2**32))
def test_a_span_is_whole_pages_around_its_range(offset: int, length: int) -> None:
    capacity = span_bytes(offset, length)
    assert capacity % PAGE_BYTES == 0
    assert offset % PAGE_BYTES + length <= capacity < offset % PAGE_BYTES + length + PAGE_BYTES


@given(st.integers(0, 5 * PAGE_BYTES))
def test_buffers_are_aligned_zeroed_and_whole(nbytes: int) -> None:
    buffer = aligned_buffer(nbytes)
    assert buffer.ctypes.data % PAGE_BYTES == 0
    assert len(buffer) % PAGE_BYTES == 0
    assert len(buffer) >= max(1, nbytes)
    assert not buffer.any()


def test_errors_of_the_system_get_their_class() -> None:
    path = Path("/x")
    assert type(drive_error("p", OSError(errno.ENOSPC, "No space left on device"), path, 7)) is SpaceError
    assert type(drive_error("p", OSError(errno.EDQUOT, "Disk quota exceeded"), path)) is SpaceError
    error = drive_error("cannot read", OSError(errno.EIO, "Input/output error"), path, 7)
    assert str(error).startswith("cannot read: Input/output error (file /x, offset 7). The drive reports a fault")
    assert "permissions" in str(drive_error("p", OSError(errno.EACCES, "Permission denied"), path))


def test_a_directory_can_be_made_durable(tmp_path: Path) -> None:
    sync_directory(tmp_path)
    with pytest.raises(DriveError, match="cannot make the directory durable: No such file"):
        sync_directory(tmp_path / "none")
