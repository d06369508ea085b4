"""Holds up: the tightest memory limit is found, whoever sets it, and all of them can be told."""

from __future__ import annotations

import os
from pathlib import Path

from k3.base.memory_limit import memory_limit, memory_limits

GB = 10**9


def fake_system(
    root: Path, available: int, cgroup: str, limits: dict[str, tuple[str, int, int]]
) -> tuple[Path, Path]:
    """Make a /proc and a /sys/fs/cgroup; limits of each cgroup are (memory.max, memory.current, inactive_file)."""
    proc, tree = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(f"0::{cgroup}\n")
    for path, (most, current, cache) in limits.items():
        directory = tree / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{most}\n")
        (directory / "memory.current").write_text(f"{current}\n")
        (directory / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    return proc, tree


def test_the_machine(tmp_path: Path) -> None:
    limit = memory_limit(*fake_system(tmp_path, 8 * 2**30, "/a", {"/a": ("max", GB, 0)}))
    assert (limit.free_bytes, limit.set_by) == (8 * 2**30, "the machine (MemAvailable)")


def test_without_proc_the_free_pages_count_and_that_is_told(tmp_path: Path) -> None:
    (limit,) = memory_limits(tmp_path / "proc", tmp_path / "cgroup")
    assert 0 < limit.free_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert "meminfo cannot be read" in limit.set_by


def test_the_tightest_ancestor(tmp_path: Path) -> None:
    limits = {"/": ("max", 0, 0), "/a": (str(5 * GB), 3 * GB, GB), "/a/b": (str(9 * GB), GB, 0)}
    limit = memory_limit(*fake_system(tmp_path, 64 * GB, "/a/b", limits))
    assert limit.free_bytes == 3 * GB  # what can be taken back from the page cache counts as free
    assert "cgroup" in limit.set_by
    assert "5.000 GB" in limit.set_by


def test_a_container_that_sees_only_its_own_root(tmp_path: Path) -> None:
    limits = {"/": (str(2 * GB), GB, 0)}
    assert memory_limit(*fake_system(tmp_path, 64 * GB, "/docker/1234", limits)).free_bytes == GB


def test_version_1(tmp_path: Path) -> None:
    proc, tree = fake_system(tmp_path, 64 * GB, "/", {})
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/x\n")
    directory = tree / "memory" / "x"
    directory.mkdir(parents=True)
    (directory / "memory.limit_in_bytes").write_text(f"{4 * GB}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{GB}\n")
    assert memory_limit(proc, tree).free_bytes == 3 * GB


def test_this_machine_says_something() -> None:
    assert 0 < memory_limit().free_bytes < float("inf")


def test_every_limit_is_told(tmp_path: Path) -> None:
    limits = {"/": ("max", 0, 0), "/a": (str(5 * GB), 3 * GB, GB), "/a/b": (str(9 * GB), GB, 0)}
    found = memory_limits(*fake_system(tmp_path, 64 * GB, "/a/b", limits))
    assert [limit.free_bytes for limit in found] == [64 * GB, 8 * GB, 3 * GB]


def test_version_1_without_a_limit_is_no_limit(tmp_path: Path) -> None:
    proc, tree = fake_system(tmp_path, 64 * GB, "/", {})
    (proc / "self" / "cgroup").write_text("4:memory:/x\n")
    directory = tree / "memory" / "x"
    directory.mkdir(parents=True)
    (directory / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (directory / "memory.usage_in_bytes").write_text(f"{GB}\n")
    assert [limit.free_bytes for limit in memory_limits(proc, tree)] == [64 * GB]
