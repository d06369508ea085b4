"""Holds up: an engine says the same through files and through a daemon, cold and warm, alone and in company."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from k3.engine.cli import main
from tests.support.daemons import daemon_outside
from tests.support.engines import VECTORS
from tests.support.repacked import command
from tests.support.waiting import wait_until

IDS = "1,2,3,4,5,6,7"


@pytest.fixture(scope="module")
def one_root(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("one") / "home"
    assert command(VECTORS / "tiny_s1", home).exit_code == 0
    return [home]


@pytest.fixture(scope="module")
def three_roots(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("three")
    drives = [place / name for name in "abc"]
    done = command(VECTORS / "tiny_s1", place / "home", "--dirs", ",".join(map(str, drives)), "--shares", "1,1,1")
    assert done.exit_code == 0, done.stderr
    return [place / "home", *drives]


def start_run(*options: object) -> subprocess.Popen[str]:
    arguments = ["--ids", IDS, "--ngen", "10", "--json", *map(str, options)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("K3_")}
    code = "from k3.engine.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def outcome(process: subprocess.Popen[str]) -> tuple[list[int], dict[str, Any]]:
    """Its tokens and its summary."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    messages = [json.loads(line) for line in out.splitlines()]
    tokens = [message["id"] for message in messages if message["type"] == "token"]
    assert len(tokens) == 10
    return tokens, messages[-1]


@pytest.fixture(scope="module")
def wanted(one_root: list[Path]) -> list[int]:
    tokens, _ = outcome(start_run("--container", one_root[0]))
    return tokens


@pytest.mark.parametrize("roots", ["one_root", "three_roots"])
def test_cold_and_warm_and_several_at_once(
    request: pytest.FixtureRequest, roots: str, wanted: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with daemon_outside(path, request.getfixturevalue(roots)) as daemon:
        for _ in range(2):
            tokens, _ = outcome(start_run("--store", path))
            assert tokens == wanted
        misses = daemon.status()["cache"]["misses"]
        assert misses > 0
        runs = [start_run("--store", path) for _ in range(2)]
        assert [outcome(run)[0] for run in runs] == [wanted] * 2
        assert daemon.status()["cache"]["misses"] == misses  # all of it was there
        wait_until(lambda: daemon.status()["clients"] == [])
        assert daemon.status()["cache"]["states"]["held"] == 0


def test_several_at_once_from_cold_read_everything_once(
    three_roots: list[Path], wanted: list[int], tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with daemon_outside(path, three_roots) as daemon:
        runs = [start_run("--store", path) for _ in range(4)]
        assert [outcome(run)[0] for run in runs] == [wanted] * 4
        assert daemon.status()["cache"]["misses"] == daemon.status()["cache"]["states"]["cached"]


def test_without_a_daemon_the_files_say_the_same(
    three_roots: list[Path], wanted: list[int], tmp_path: Path
) -> None:
    home, *drives = three_roots
    options = ("--store", tmp_path / "none", "--fallback", "file", "--container", home)
    tokens, _ = outcome(start_run(*options, "--dirs", ",".join(map(str, drives))))
    assert tokens == wanted


def test_a_run_survives_the_daemons_death(three_roots: list[Path], wanted: list[int], tmp_path: Path) -> None:
    path = tmp_path / "s"
    with daemon_outside(path, three_roots) as daemon:
        run = start_run("--store", path, "--fallback", "file")
        wait_until(lambda: daemon.status()["clients"] != [] or run.poll() is not None)
        daemon.kill()
        tokens, _ = outcome(run)
        assert tokens == wanted


def test_refusals(tmp_path: Path) -> None:
    for options, code, words in [
        (("--store", tmp_path / "none"), 10, "no k3-store serves"),
        (("--store", tmp_path / "none", "--fallback", "file"), 10, "no k3-store serves"),
        (("--store", "s", "--container", "c"), 2, "add --fallback file"),
        (("--store", "s", "--snapshot", "c"), 2, "give two models"),
        (("--store", "s", "--bits", "8"), 2, "when the container was made"),
        (("--store", "s", "--expert-gb", "1"), 2, "--cache-gb on k3-store serve"),
        (("--container", "c", "--fallback", "file"), 2, "--fallback needs --store"),
    ]:
        refused = CliRunner().invoke(main, ["--ids", IDS, "--ngen", "10", *map(str, options)])
        assert (refused.exit_code, words in refused.stderr) == (code, True), refused.stderr
