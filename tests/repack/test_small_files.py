"""Holds up that small files are read once when planning, published as they were then, and compared ever after."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3.repack import run
from k3.repack.run import repack
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import SMALL, repacked, tree
from tests.support.resumed import Case, stop_after

NAMES = ("config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(SMALL, tmp_path_factory.mktemp("small") / "snapshot")


@pytest.fixture
def snapshot(small: Path, tmp_path: Path) -> Path:
    shutil.copytree(small, tmp_path / "snapshot")
    (tmp_path / "snapshot" / "LICENSE").write_text("All rights are somebody's")
    return tmp_path / "snapshot"


def append(path: Path) -> None:
    """Change a file in such a way that it still is what it should be."""
    if path.suffix != ".model":
        path.write_bytes(path.read_bytes() + b" ")
        return
    first, second, *others = path.read_text().splitlines()
    (one, rank), (other, next_rank) = first.split(), second.split()
    path.write_text("\n".join([f"{other} {rank}", f"{one} {next_rank}", *others]) + "\n")


def remove(path: Path) -> None:
    path.unlink()


CHANGES: dict[str, Callable[[Path], None]] = {"changed": append, "deleted": remove}


# --- while shards are streamed


@pytest.mark.parametrize("name", [*NAMES, "LICENSE"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_happens_to_a_file_during_the_run_changes_nothing(
    name: str, change: str, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repacked(snapshot, tmp_path / "wanted")
    original = run._check_shard

    def meanwhile(plan, ended, *arguments):  # type: ignore[no-untyped-def]
        if ended.number == 0:
            CHANGES[change](snapshot / name)
        return original(plan, ended, *arguments)

    monkeypatch.setattr(run, "_check_shard", meanwhile)
    repacked(snapshot, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")
    again = repacked(snapshot, tmp_path / "out", code=3 if (name, change) == ("config.json", "deleted") else 8)
    assert name in again.stderr


# --- when a finished container is recognised


@pytest.mark.parametrize("name", [*NAMES, "LICENSE", "added.py"])
def test_a_container_of_other_small_files_is_not_called_complete(
    name: str, snapshot: Path, tmp_path: Path
) -> None:
    repacked(snapshot, tmp_path / "out")
    before = tree(tmp_path / "out")
    assert "complete already" in repacked(snapshot, tmp_path / "out").output
    (snapshot / name).touch()
    append(snapshot / name)
    result = repacked(snapshot, tmp_path / "out", code=8)
    assert f"{name}: " in result.stderr
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("name", [*NAMES, "LICENSE"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_small_file_of_the_container_that_is_gone_or_changed_is_named(
    name: str, change: str, snapshot: Path, tmp_path: Path
) -> None:
    repacked(snapshot, tmp_path / "out")
    CHANGES[change](tmp_path / "out" / name)
    result = repacked(snapshot, tmp_path / "out", code=1)
    assert str(tmp_path / "out" / name) in result.stderr
    shutil.copy(snapshot / name, tmp_path / "out" / name)
    repacked(snapshot, tmp_path / "out")


# --- when a run goes on


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_goes_on_with_the_files_it_began_with(name: str, change: str, case: Case) -> None:
    if not (case.source / name).exists():
        pytest.skip("not in this snapshot")
    stop_after(case, 2)
    kept = (case.source / name).read_bytes()
    CHANGES[change](case.source / name)
    code = 3 if (name, change) == ("config.json", "deleted") else 8
    arguments = ("--dirs", ",".join(map(str, case.request.drives)), "--shares", "2,1")
    result = repacked(case.source, case.request.home, *arguments, code=code)
    assert name in result.stderr
    (case.source / name).write_bytes(kept)
    case.finishes_equal()


def test_a_readme_may_change_between_two_runs(case: Case) -> None:
    (case.source / "README.md").write_text("first")
    stop_after(case, 2)
    (case.source / "README.md").write_text("second")
    case.finish()
    assert (case.request.home / "README.md").read_text() == "second"


# --- what cannot be taken is found when planning


def refused_at_once(snapshot: Path, out: Path, code: int, *words: str) -> None:
    """Both the plan and the run refuse, and nothing is written."""
    for options in (("--plan",), ()):
        result = repacked(snapshot, out, *options, code=code)
        for word in words:
            assert word in result.stderr
        assert not out.exists()


def test_a_file_that_may_not_be_read(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.open

    def refuse(path: str | os.PathLike[str], *arguments: int) -> int:
        if str(path).endswith("LICENSE"):
            raise OSError(errno.EACCES, "Permission denied")
        return original(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    refused_at_once(snapshot, tmp_path / "out", 6, "LICENSE", "ermission")


@pytest.mark.parametrize(("length", "code"), [(248, 3), (255, 3), (247, 0)])
def test_a_name_that_is_too_long_with_its_ending(length: int, code: int, snapshot: Path, tmp_path: Path) -> None:
    name = "é" * ((length - 3) // 2) + "x" * ((length - 3) % 2) + ".py"
    (snapshot / name).write_text("# code")
    if code:
        refused_at_once(snapshot, tmp_path / "out", code, name, "255 are taken")
    else:
        repacked(snapshot, tmp_path / "out")
        assert (tmp_path / "out" / name).read_text() == "# code"


def test_two_directories_with_different_files_of_one_name(tmp_path: Path) -> None:
    snapshot = write_snapshot(SMALL, tmp_path / "s", more_directories=[tmp_path / "t"])
    shutil.copy(snapshot / "tiktoken.model", tmp_path / "t")
    repacked(snapshot, tmp_path / "fine", "--source-dirs", tmp_path / "t")
    append(tmp_path / "t" / "tiktoken.model")
    result = repacked(snapshot, tmp_path / "out", "--source-dirs", tmp_path / "t", code=3)
    assert str(tmp_path / "t" / "tiktoken.model") in result.stderr


# --- links


@pytest.mark.parametrize("target", ["{secret}", "../secret/id_rsa", "../other", "../blobs/id_rsa"])
def test_a_link_out_of_the_snapshot_is_not_followed(target: str, snapshot: Path, tmp_path: Path) -> None:
    for place in ("secret", "blobs"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "id_rsa").write_text("a key")
    (tmp_path / "other").symlink_to(tmp_path / "secret" / "id_rsa")
    (snapshot / "NOTICE.txt").symlink_to(target.format(secret=tmp_path / "secret" / "id_rsa"))
    refused_at_once(snapshot, tmp_path / "out", 3, "NOTICE.txt", "link out of the snapshot")


def test_a_blob_of_another_cache_is_taken_if_its_name_proves_it(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    name = "b2d1f6bd9ae9ad3ba7fb63ee6ab1ed1d38a1e0f5"
    (tmp_path / "blobs" / name).write_text("a key")
    (snapshot / "NOTICE.txt").symlink_to(tmp_path / "blobs" / name)
    refused_at_once(snapshot, tmp_path / "out", 3, "NOTICE.txt", "Git SHA-1")


def test_links_inside_the_snapshot_are_followed(snapshot: Path, tmp_path: Path) -> None:
    (snapshot / "COPYING").symlink_to("LICENSE")
    repacked(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "COPYING").read_text() == (snapshot / "LICENSE").read_text()
    assert not (tmp_path / "out" / "COPYING").is_symlink()


def test_a_cache_whose_blobs_lead_elsewhere(tmp_path: Path) -> None:
    snapshot = write_snapshot(dataclasses.replace(SMALL, layout="hf_cache"), tmp_path / "hub")
    blobs = tmp_path / "hub" / "models--synthetic--k3" / "blobs"
    (tmp_path / "id_rsa").write_text("a key")
    (blobs / "notes").symlink_to(tmp_path / "id_rsa")
    (snapshot / "NOTICE.txt").symlink_to("../../blobs/notes")
    refused_at_once(snapshot, tmp_path / "out", 3, "NOTICE.txt", "link out of the snapshot")


# --- what is left out


def test_logs_and_files_of_downloads_are_left_out(snapshot: Path, tmp_path: Path) -> None:
    repacked(snapshot, tmp_path / "wanted")
    for name in ("nohup.out", "repack.log", "x.json.tmp", "y.part", "z.crdownload", "old.aria2", "w.incomplete"):
        (snapshot / name).write_text("x")
    result = repacked(snapshot, tmp_path / "out")
    assert "repack.log is not taken along: it is a log" in result.stderr
    assert "files of unfinished downloads: old.aria2" in result.stderr
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")
    plan = json.loads(repacked(snapshot, tmp_path / "other", "--plan", "--json").stdout.splitlines()[-1])
    assert any("nohup.out" in warning for warning in plan["warnings"])


def test_the_manifest_proves_every_small_file(case: Case) -> None:
    repack(case.request, run.Watcher())
    listed = {
        entry["path"] for entry in json.loads((case.request.home / "manifest.json").read_text())["text_files"]
    }
    present = {path.name for path in case.request.home.iterdir() if path.is_file()}
    assert present - listed == {"manifest.json", "catalog.mdb", "dense.safetensors"}
