"""Holds up that what huge pages were granted is the kernel's word, and that a refusal is told with its reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from k3.base import huge_pages as module
from k3.base.huge_pages import HugePages, huge_pages
from k3.base.page_buffers import HUGE_PAGE_BYTES, huge_buffer, populate
from k3.base.pages import PAGE_BYTES
from tests.support.barred import BARRED, machine_grants

MB = 1 << 20


def test_what_is_granted_is_counted_as_far_as_it_is_in_use() -> None:
    if not machine_grants():
        pytest.skip("this machine grants no huge pages")
    buffers = [huge_buffer(7 * MB), huge_buffer(4 * MB)]
    assert huge_pages(buffers) == HugePages()
    populate(buffers[0])
    assert huge_pages(buffers) == HugePages(6 * MB, 6 * MB)
    buffers[1][0] = 1
    assert huge_pages(buffers) == HugePages(8 * MB, 8 * MB)
    assert not huge_pages(buffers).refused


def test_less_than_a_huge_page_is_nothing_asked_for() -> None:
    small = huge_buffer(HUGE_PAGE_BYTES - PAGE_BYTES)
    populate(small)
    assert huge_pages([small]) == HugePages()


def test_what_is_refused_is_counted_in_whole_huge_pages() -> None:
    """In a process that really gets none."""
    code = (
        "from k3.base.huge_pages import huge_pages\n"
        "from k3.base.page_buffers import huge_buffer, populate\n"
        "buffers = [huge_buffer(7 << 20), huge_buffer(9 << 20), huge_buffer(2 << 20)]\n"
        "populate(buffers[0]); populate(buffers[1][: 3 << 20]); populate(buffers[2][: 1 << 20])\n"
        "found = huge_pages(buffers)\n"
        "print(found.asked_bytes >> 20, found.granted_bytes, found.refused)\n"
        "print(found.line())\n"
    )
    ended = subprocess.run([*BARRED, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    counts, line = ended.stdout.splitlines()
    assert counts == "8 0 True"
    assert line.startswith("huge pages: granted 0 B of 8.4 MB requested; ")
    assert line.endswith(
        "This process was started with huge pages disabled (PR_SET_THP_DISABLE): start it without"
    )


def test_a_kernel_that_does_not_tell_is_not_accused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    buffer = huge_buffer(4 * MB)
    populate(buffer)
    monkeypatch.setattr(module, "_SMAPS", tmp_path / "smaps")
    assert huge_pages([buffer]) == HugePages()


@pytest.mark.parametrize(
    ("size", "every", "said"),
    [
        (None, "always madvise [never]", "Set {}/enabled to madvise or always"),
        ("always [inherit] madvise never", "always madvise [never]", "Set {}/enabled to madvise or always"),
        ("always inherit madvise [never]", "[always] madvise never", "Set {}/hugepages-2048kB/enabled to madvise"),
        ("[always] inherit madvise never", "always madvise [never]", "Memory is fragmented: free some"),
        ("always [inherit] madvise never", "always [madvise] never", "Memory is fragmented: free some"),
    ],
)
def test_what_to_do_depends_on_what_stands_in_the_way(
    size: str | None, every: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module._libc, "prctl", lambda *_: 0)
    (tmp_path / "enabled").write_text(every)
    if size is not None:
        (tmp_path / "hugepages-2048kB").mkdir()
        (tmp_path / "hugepages-2048kB" / "enabled").write_text(size)
    monkeypatch.setattr(module, "_SETTINGS", tmp_path)
    assert said.format(tmp_path) in HugePages(4 * MB, 2 * MB).line()


def test_a_kernel_without_huge_pages_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_SETTINGS", tmp_path / "none")
    assert "This kernel has no huge pages" in HugePages(4 * MB).line()
