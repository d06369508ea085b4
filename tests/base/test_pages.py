"""Holds up that large buffers are aligned and zero, and that populating changes nothing but what is present."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from k3.base import page_buffers
from k3.base.page_buffers import HUGE_PAGE_BYTES, huge_buffer, populate
from k3.base.pages import PAGE_BYTES


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


@pytest.mark.parametrize("nbytes", [0, 1, PAGE_BYTES, PAGE_BYTES + 1, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 9])
def test_buffers_are_whole_zero_pages(nbytes: int) -> None:
    buffer = huge_buffer(nbytes)
    assert nbytes <= len(buffer) < nbytes + PAGE_BYTES or len(buffer) == PAGE_BYTES
    assert len(buffer) % PAGE_BYTES == 0
    assert buffer.ctypes.data % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES) == 0
    assert not buffer.any()


@pytest.mark.parametrize("refused", [False, True])
def test_populating_makes_pages_present_and_keeps_what_is_there(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refused:  # as a kernel before 5.14 does: there is no such advice
        monkeypatch.setattr(page_buffers, "_POPULATE_WRITE", 12345)
    buffer = huge_buffer(32 << 20)
    buffer[PAGE_BYTES] = 7
    before = resident_bytes()
    populate(buffer)
    assert resident_bytes() - before >= (32 << 20) - 2 * HUGE_PAGE_BYTES
    assert buffer[PAGE_BYTES] == 7
    assert int(buffer.sum(dtype=np.int64)) == 7


def test_populating_a_part_leaves_the_rest_untouched() -> None:
    buffer = huge_buffer(64 << 20)
    before = resident_bytes()
    populate(buffer[: 8 << 20])
    assert resident_bytes() - before < 32 << 20
    populate(buffer[:0])


def test_no_more_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = huge_buffer(PAGE_BYTES)
    monkeypatch.setattr(page_buffers._libc, "madvise", lambda *_: -1)
    monkeypatch.setattr(ctypes, "get_errno", lambda: 12)
    with pytest.raises(MemoryError, match="4096 bytes"):
        populate(buffer)
