"""Holds up that every command tells once, in a line, that it was refused huge pages, and nothing if it was not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.barred import BARRED, machine_grants

COMMANDS = {
    name: [sys.executable, "-c", f"from k3.{room}.cli import main; main(prog_name='{name}')"]
    for name, room in (("k3-repack", "repack"), ("k3-run", "engine"), ("k3-verify", "verify"))
}
TOLD = "huge pages: granted 0 B of "


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, a dense blob and expert files that are larger than a huge page each."""
    model = SyntheticModel.tiny(vocab=24576, experts=96, vision=False)
    return write_snapshot(model, tmp_path_factory.mktemp("wide") / "snapshot")


@pytest.fixture(scope="module")
def container(snapshot: Path) -> Path:
    home = snapshot.parent / "container"
    outcome("k3-repack", str(snapshot), str(home))
    return home


def outcome(name: str, *arguments: str, before: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run([*before, *COMMANDS[name], *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def told_once(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that tells of the refusal."""
    (line,) = [line for line in (ended.stdout + ended.stderr).splitlines() if "huge pages:" in line]
    assert TOLD in line
    assert "PR_SET_THP_DISABLE" in line
    return line


def test_repack_tells(snapshot: Path, tmp_path: Path) -> None:
    arguments = [str(snapshot), str(tmp_path / "container"), "--verify-full"]
    ended = outcome("k3-repack", *arguments, before=BARRED)
    assert told_once(ended).startswith("note: ")
    assert TOLD in ended.stderr
    again = outcome("k3-repack", *arguments, "--json", before=BARRED)
    assert json.loads(told_once(again))["type"] == "note"
    granted = json.loads(again.stdout.splitlines()[-1])["huge_pages"]
    assert granted["granted_bytes"] == 0 < granted["asked_bytes"]


def test_verify_tells(snapshot: Path, container: Path) -> None:
    for way in (["--read-data", "all"], ["--source", str(snapshot)]):
        ended = outcome("k3-verify", str(container), *way, before=BARRED)
        assert told_once(ended).startswith("note: ")
    both = ["--read-data", "all", "--source", str(snapshot)]
    ended = outcome("k3-verify", str(container), *both, "--json", before=BARRED)
    granted = json.loads(ended.stdout.splitlines()[-1])["huge_pages"]
    assert granted["granted_bytes"] == 0 < granted["asked_bytes"]


def test_a_run_tells(container: Path) -> None:
    ended = outcome("k3-run", "--container", str(container), "--ids", "1,2", "--ngen", "1", before=BARRED)
    assert told_once(ended).startswith("warning: ")
    assert TOLD in ended.stderr


def test_nothing_is_told_when_all_are_granted(snapshot: Path, container: Path, tmp_path: Path) -> None:
    if not machine_grants():
        pytest.skip("this machine grants no huge pages")
    for name, *arguments in (
        ["k3-repack", str(snapshot), str(tmp_path / "container"), "--verify-full"],
        ["k3-verify", str(container), "--read-data", "all", "--source", str(snapshot)],
        ["k3-run", "--container", str(container), "--ids", "1,2", "--ngen", "1"],
    ):
        ended = outcome(name, *arguments)
        if "huge pages" in ended.stdout + ended.stderr and not machine_grants():
            pytest.skip("this machine grants no more huge pages")
        assert "huge pages" not in ended.stdout + ended.stderr
