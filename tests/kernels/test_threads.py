"""Holds up: the thread pool takes no more CPUs than it may, survives fork and many callers, and is never felt."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from k3 import kernels
from k3.kernels import _kernels

SetThreads = Callable[[int], None]


@pytest.fixture
def threads() -> Iterator[SetThreads]:
    before = kernels.get_threads()
    yield kernels.set_threads
    kernels.set_threads(before)


def work(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((256, 640), np.float32)
    x = rng.standard_normal((2, 640), np.float32)
    q, scales = kernels.quantize_int8(w)
    return kernels.matmul_encoded(x, q, scales, "int8").tobytes()


def test_the_number_of_threads_is_checked(threads: SetThreads) -> None:
    for n in (1, 2, 7, 1):
        threads(n)
        assert kernels.get_threads() == n
    for n in (0, -1, 1025):
        with pytest.raises(ValueError, match="threads"):
            threads(n)
    assert kernels.get_threads() == 1


def test_the_default_respects_affinity() -> None:
    assert 1 <= kernels.usable_cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_helpers_stay_where_somebody_else_puts_them(threads: SetThreads) -> None:
    """As `taskset -a -p` does with a running process."""
    before = os.sched_getaffinity(0)
    one, other = sorted(before)[:2]
    threads(2)
    wanted = work(1)
    everyone = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    try:
        os.sched_setaffinity(0, {other})
        assert work(1) == wanted
        for task in everyone:
            os.sched_setaffinity(task, {one})
        assert work(1) == wanted  # the caller has moved, and helpers would make room
        assert {task: os.sched_getaffinity(task) for task in everyone} == {task: {one} for task in everyone}
    finally:
        for task in everyone:
            os.sched_setaffinity(task, before)


def test_many_callers_at_once(threads: SetThreads) -> None:
    threads(3)
    want = [work(seed) for seed in range(4)]
    failures: list[int] = []

    def call(seed: int) -> None:
        failures.extend(seed for _ in range(20) if work(seed) != want[seed])

    callers = [threading.Thread(target=call, args=(seed % 4,)) for seed in range(8)]
    for caller in callers:
        caller.start()
    for n in (1, 4, 2, 3):  # changing the pool while it is used
        threads(n)
    for caller in callers:
        caller.join()
    assert failures == []


def _in_child(seed: int, threads: int) -> None:
    assert kernels.get_threads() == threads
    os._exit(0 if work(seed) == _WANTED[seed] else 1)


_WANTED: dict[int, bytes] = {}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_its_own_threads(threads: SetThreads) -> None:
    threads(3)
    _WANTED[5] = work(5)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_in_child, args=(5, 3)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert work(5) == _WANTED[5]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/\n", {}, 0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 0),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "cpu.max": "900000 100000\n"}, 4),
        ("0::/not/visible\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "nonsense\n"}, 0),
        (
            "4:cpu,cpuacct:/x\n3:cpuset:/y\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "150000", "cpu,cpuacct/x/cpu.cfs_period_us": "50000"},
            3,
        ),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 0),
        (
            "4:cpuacct,cpu:/x\n",
            {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("garbage\n", {"cpu.max": "100000 100000\n"}, 0),
    ],
)
def test_cpu_quotas(tmp_path: Path, groups: str, files: dict[str, str], cpus: int) -> None:
    write(tmp_path, "self", groups)
    for name, text in files.items():
        write(tmp_path, f"mount/{name}", text)
    assert _kernels.quota_cpus(str(tmp_path / "self"), str(tmp_path / "mount")) == cpus


def test_quota_of_a_missing_file(tmp_path: Path) -> None:
    assert _kernels.quota_cpus(str(tmp_path / "none"), str(tmp_path)) == 0


def test_variants() -> None:
    names = kernels.cpu_variants()
    assert names[0] == "baseline"
    assert kernels.cpu_variant() in names
    with pytest.raises(ValueError, match="no variant sse9"):
        kernels.set_variant("sse9")
