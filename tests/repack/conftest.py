"""What the repack tests share: unfinished runs to be resumed, and drives that answer at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lmdb
import pytest

from k3.repack.run import Watcher, repack
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import WIDE
from tests.support.resumed import STEPS, Case, prepared_case, request_in, stop_before

REAL_DRIVE = ("test_durability", "test_refusals")
"""Modules that need every fsync; test_kill runs in processes of its own and has them anyway."""


@pytest.fixture(autouse=True, scope="module")
def drives_answer_at_once(request: pytest.FixtureRequest) -> Any:
    """Skip fsync: no test loses power in its own process, and to wait for a drive is most of its time."""
    if request.module.__name__.rpartition(".")[2] in REAL_DRIVE:
        yield
        return
    open_ = lmdb.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        patch.setattr(lmdb, "open", lambda path, **options: open_(path, **{**options, "sync": False}))
        yield


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories to be copied for each test: one for every state, "new" and "done" among them."""
    new = tmp_path_factory.mktemp("new")
    write_snapshot(WIDE, new / "snapshot")
    states = {"new": new}
    for state in ("done", *STEPS):
        states[state] = tmp_path_factory.mktemp(state)
        shutil.copytree(new / "snapshot", states[state] / "snapshot")
    repack(request_in(states["done"]), Watcher())
    with pytest.MonkeyPatch.context() as patch:
        for step in STEPS:
            stop_before(request_in(states[step]), patch, step)
    return states


@pytest.fixture
def case(prepared: dict[str, Path], tmp_path: Path) -> Case:
    return prepared_case(prepared, "new", tmp_path)


@pytest.fixture(params=STEPS)
def stopped(request: pytest.FixtureRequest, prepared: dict[str, Path], tmp_path: Path) -> Case:
    return prepared_case(prepared, request.param, tmp_path)


@pytest.fixture
def done(prepared: dict[str, Path], tmp_path: Path) -> Case:
    return prepared_case(prepared, "done", tmp_path)
