"""Holds up shares and rates: integers in proportion to speed, noise left out, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import DriveError, SpaceError
from k3.repack import probe
from k3.repack.buffers import BufferPool
from k3.repack.jobs import ONE
from k3.repack.probe import drive_rate, read_rate, shares_from_rates
from k3.repack.shard_stream import ShardStreamer
from k3.repack.throttle import SLEEP_MAX_S, Throttle
from tests.support.mounts import small_tmpfs

rates_lists = st.lists(st.floats(1e5, 1e11), min_size=1, max_size=8)


@given(rates_lists)
def test_shares_follow_rates(rates: list[float]) -> None:
    shares = shares_from_rates(rates)
    assert len(shares) == len(rates)
    assert all(type(share) is int and 1 <= share <= 100 for share in shares)
    if max(rates) <= 1.1 * min(rates):
        assert set(shares) == {1}
        return
    for rate, share in zip(rates, shares, strict=True):
        assert abs(share - 100 * rate / sum(rates)) <= 1 or share == 1
    for (a, share_a), (b, share_b) in zip(
        sorted(zip(rates, shares, strict=True)), sorted(zip(rates, shares, strict=True))[1:], strict=False
    ):
        assert a <= b
        assert share_a <= share_b


@given(rates_lists, st.floats(0.01, 100))
def test_only_the_proportion_counts(rates: list[float], factor: float) -> None:
    first, second = shares_from_rates(rates), shares_from_rates([rate * factor for rate in rates])
    assert all(abs(a - b) <= 1 for a, b in zip(first, second, strict=True)) or {1} in (set(first), set(second))


def test_examples() -> None:
    assert shares_from_rates([3e9]) == (1,)
    assert shares_from_rates([7.0e9, 7.5e9]) == (1, 1)
    assert shares_from_rates([7e9, 3e9]) == (70, 30)
    assert shares_from_rates([1e9, 1e5]) == (100, 1)


def test_a_drive_is_measured_and_the_file_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PROBE_BYTES", 16 << 20)
    assert drive_rate(tmp_path) > 0
    assert not list(tmp_path.iterdir())


def test_a_drive_without_room_is_said_so(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "drive", "1m") as drive:
        with pytest.raises(SpaceError):
            drive_rate(drive)
        assert not list(drive.iterdir())


def test_small_files_are_not_measured(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(1000))
    assert read_rate(tmp_path / "small") is None
    with pytest.raises(DriveError):
        read_rate(tmp_path / "missing")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Sleeps of a throttle, in seconds, on a clock that only sleeping moves."""
    naps: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(naps), sleep=naps.append)
    monkeypatch.setattr("k3.repack.throttle.time", clock)
    return naps


def test_a_throttle_spreads_bytes_over_time(slept: list[float]) -> None:
    free = Throttle(None)
    for _ in range(1000):
        free.pay(1 << 30)
    assert slept == []
    throttle = Throttle(1_000_000)
    for paid in range(1, 5):
        throttle.pay(50_000)
        assert sum(slept) == pytest.approx(0.05 * paid)


def test_a_throttle_sleeps_in_short_turns(slept: list[float]) -> None:
    """A signal just before a sleep does not shorten it: Ctrl-C must not wait for a whole block."""
    Throttle(1_000_000).pay(30_000_000)
    assert max(slept) <= SLEEP_MAX_S
    assert sum(slept) == pytest.approx(30)


@given(st.integers(1, 5), st.integers(1, 20_000))
def test_buffers_go_round_and_are_made_once(count: int, nbytes: int) -> None:
    pool = BufferPool(count, nbytes)
    taken = [pool.take() for _ in range(count)]
    assert len({buffer.ctypes.data for buffer in taken}) == count
    assert all(len(buffer) >= nbytes and buffer.ctypes.data % os.sysconf("SC_PAGE_SIZE") == 0 for buffer in taken)
    pool.give(taken[0])
    assert np.shares_memory(pool.take(), taken[0])


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
def test_large_buffers_ask_for_huge_pages() -> None:
    pool = BufferPool(2, 3 << 20)
    with ShardStreamer(ONE) as streamer:
        buffers = [pool.take(), pool.take(), *streamer.buffers]
        assert len(buffers) == 2 + ONE.blocks
        assert all(asks_for_huge_pages(buffer.ctypes.data) for buffer in buffers)
    small = BufferPool(1, 1 << 20).take()
    assert not asks_for_huge_pages(small.ctypes.data)


def asks_for_huge_pages(address: int) -> bool:
    """Whether the mapping around an address carries the kernel's `hg` flag."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("no such mapping")
