"""Holds up that the tightest memory limit is found, and that what does not fit is refused with numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import VECTORS, snapshot

from k3.container.errors import UnsupportedError
from k3.container.memory_limit import Limit, memory_limit
from k3.engine import opening
from k3.engine.budget import Need, check_fits
from k3.engine.opening import dense_bytes, find_model, plan_memory
from k3.engine.settings import ModelSettings

GB = 10**9


def fake_system(
    root: Path, available: int, cgroup: str, limits: dict[str, tuple[str, int, int]]
) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup: limits per cgroup path as (memory.max, memory.current, inactive_file)."""
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


def test_loading_and_running_do_not_add_up() -> None:
    need = Need(10, 5, 1, 2, 3, 4)
    assert need.total_bytes == 10 + 1 + max(5, 2 + 3 + 4)


def test_a_refusal_names_every_term() -> None:
    need = Need(10 * GB, 2 * GB, GB // 2, GB // 4, GB, 3 * GB)
    check_fits(need, Limit(15 * GB, "the machine"))
    with pytest.raises(UnsupportedError) as caught:
        check_fits(need, Limit(12 * GB, "the machine"))
    for number in ("14.750 GB", "12.000 GB", "10.000 GB", "0.500 GB", "0.250 GB", "3.000 GB", "--expert-gb"):
        assert number in str(caught.value)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_dense_bytes_are_those_in_memory(bits: int) -> None:
    source = snapshot("tiny_s1", bits)
    for name in source.tensor_names():
        tensor = source.read_tensor(name)
        held = tensor.data.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)
        assert dense_bytes(source, name) == held


def plan(monkeypatch: pytest.MonkeyPatch, free_bytes: float, expert_bytes: int | None) -> int:
    monkeypatch.setattr(opening, "memory_limit", lambda: Limit(free_bytes, "a test"))
    settings = ModelSettings(snapshot=(VECTORS / "tiny_s1",), expert_bytes=expert_bytes)
    return plan_memory(find_model(settings), settings, capacity=64, chunk=8, every_logit=False)


def test_a_cache_of_given_size_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, 1e9, 123456) == 123456
    assert plan(monkeypatch, 1e9, 0) == 0
    with pytest.raises(UnsupportedError, match=r"a test leaves 1\.000 GB"):
        plan(monkeypatch, 1e9, GB)


def test_a_cache_of_no_given_size_takes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = plan(monkeypatch, 1e12, None)
    some = plan(monkeypatch, 8e6, None)
    assert 0 < some < everything < 10_000_000
    with pytest.raises(UnsupportedError):
        plan(monkeypatch, 1e6, None)
