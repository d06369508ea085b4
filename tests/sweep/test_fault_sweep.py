"""Holds up that no failing system call makes a command lie: each call fails once, with each plausible errno.

After each fault: a documented exit code, no traceback, nothing claimed that was not done, and a right next run.
By default a small sample of every command's calls. `-m campaign` lets every call fail, with every errno at the
first and last of each function (as many as `K3_SWEEP_CALLS` says, 8 by default) and with one elsewhere, and prints
the counts.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.zygote import FUNCTIONS, Zygote
from tests.sweep.cases import CASES, Case, World, problem_of
from tests.sweep.plan import ERRNOS, MISSING, calls, faults, sample

SAMPLE = 5
MOST_CALLS = 24


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that lets calls fail, built with the compiler that built the project."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is needed, as for the project itself"
    made = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl", "-lpthread"], check=True)
    return made


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory, shim: Path) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("streams"), shim) as made:
        yield made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_snapshot: Path, zygote: Zygote) -> World:
    return World.make(tmp_path_factory.mktemp("world"), tiny_snapshot, zygote)


def sweep(case: Case, most_calls: int, size: int | None, seed: int) -> tuple[Counter[int], list[str]]:
    """Run a case with faults and return how the runs ended, by exit code, and what was wrong.

    With a `size`, so many of the faults at `most_calls` calls of each function. Without: all of them, and every
    other call once.
    """
    case.prepare()
    calm = case.run()
    assert problem_of(calm, case.allowed()) is None, calm
    assert (problem := case.judge(calm)) is None, problem
    planned = faults(calm.counts, most_calls, rest=size is None)
    ends: Counter[int] = Counter()
    wrong = []
    for fault in planned if size is None else sample(planned, size, seed):
        case.prepare()
        ended = case.run(fault)
        if not ended.struck:
            continue
        ends[ended.code] += 1
        problem = problem_of(ended, case.allowed() | ({1} if fault.number in MISSING else set())) or case.judge(
            ended
        )
        if problem is not None:
            name = f"{case.name}: {fault.function} {fault.nth} {errno.errorcode[fault.number]}"
            wrong.append(f"{name}: {problem}\n{ended.err[-3000:]}{ended.out[-300:]}")
            print(wrong[-1], flush=True)  # a campaign takes an hour: say so when it is found
    return ends, wrong


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.name)
def test_some_faults_of_every_command_are_told(kind: type[Case], world: World, zygote: Zygote) -> None:
    ends, wrong = sweep(kind(world, zygote), MOST_CALLS, SAMPLE, seed=len(kind.name))
    assert not wrong, "\n".join(wrong)
    assert sum(ends.values()) >= SAMPLE // 2, "the shim has hardly struck"


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.name)
def test_every_call_of_every_command_may_fail(kind: type[Case], world: World, zygote: Zygote) -> None:
    ends, wrong = sweep(kind(world, zygote), int(os.environ.get("K3_SWEEP_CALLS", "8")), None, seed=0)
    print(f"\n{kind.name}: {sum(ends.values())} faults, ended {dict(sorted(ends.items()))}, {len(wrong)} wrong")
    assert not wrong, f"{len(wrong)} wrong\n" + "\n".join(wrong)


@given(st.integers(0, 500), st.integers(4, 60))
def test_the_calls_that_are_chosen_are_calls(count: int, most: int) -> None:
    chosen = calls(count, most)
    assert chosen == sorted(set(chosen))
    assert len(chosen) <= most + 1
    assert all(1 <= nth <= count for nth in chosen)
    if count:
        assert {1, count} <= set(chosen)


def test_the_plan_knows_every_function_of_the_shim() -> None:
    assert set(ERRNOS) == set(FUNCTIONS)
    counts = dict.fromkeys(FUNCTIONS, 3)
    every = faults(counts, 10)
    assert len(every) == 3 * sum(len(set(numbers)) for numbers in ERRNOS.values())
    assert len(set(sample(every, 200, 1))) == 200
    with_rest = faults({**counts, "open": 30}, 10, rest=True)
    assert {fault.nth for fault in with_rest if fault.function == "open"} == set(range(1, 31))
    numbers = len(set(ERRNOS["open"]))
    assert sum(fault.function == "open" for fault in with_rest) == 10 * numbers + 20
    assert {fault.function for fault in sample(every, len(FUNCTIONS), 1)} == set(FUNCTIONS)
