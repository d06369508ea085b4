"""Holds up: k3-verify's verdict, exit code and place for every kind of damage, as text and as JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.container.layout import JOURNAL_NAME, ROOT_NAME
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.verify.cli import main
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.containers import Built, build_container, flip
from tests.support.waiting import wait_until_taken


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [3, 2, 1])


def verify(*arguments: object, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=env)


def messages(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def findings(result: Result) -> list[dict[str, Any]]:
    return [message for message in messages(result) if message["type"] == "finding"]


def summary(result: Result) -> dict[str, Any]:
    last = messages(result)[-1]
    assert last["type"] == "summary"
    assert last["exit_code"] == result.exit_code
    return last


def test_a_sound_container(built: Built) -> None:
    result = verify(built.home)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "structure OK; data not read (use --read-data)"
    result = verify(built.home, "--read-data", "all")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "sound: every byte matches its digest"
    result = verify(built.home, "--read-data", "1/2")
    assert result.stdout.splitlines()[-1].startswith("sound in the sample: ")


def _header(built: Built) -> Path:
    flip(built.path(1), 100)
    return built.path(1)


def _padding(built: Built) -> Path:
    path, extent = built.piece(1, 0, index=2)
    flip(path, extent.offset + extent.stored_bytes - 1)
    return path


def _expert(built: Built) -> Path:
    path, extent = built.piece(2, 3, index=1)
    flip(path, extent.offset + 9)
    return path


def _dense_scale(built: Built) -> Path:
    scales = built.tensors[1].scales
    assert scales is not None
    flip(built.path(0), scales.offset)
    return built.path(0)


def _manifest(built: Built) -> Path:
    flip(built.home / MANIFEST_NAME, 400)
    return built.home / MANIFEST_NAME


def _catalog(built: Built) -> Path:
    flip(built.home / CATALOG_NAME, 5000)
    return built.home / CATALOG_NAME


def _config(built: Built) -> Path:
    flip(built.home / "config.json", 10)
    return built.home / "config.json"


def _root_file(built: Built) -> Path:
    flip(built.directories[2] / ROOT_NAME, 60)
    return built.directories[2] / ROOT_NAME


def _truncated_by_a_byte(built: Built) -> Path:
    os.truncate(built.path(2), built.path(2).stat().st_size - 1)
    return built.path(2)


def _truncated_by_a_page(built: Built) -> Path:
    os.truncate(built.path(0), built.path(0).stat().st_size - 4096)
    return built.path(0)


def _missing(built: Built) -> Path:
    built.path(3).unlink()
    return built.path(3)


def _catalog_missing(built: Built) -> Path:
    (built.home / CATALOG_NAME).unlink()
    return built.home / CATALOG_NAME


@pytest.mark.parametrize(
    ("damage", "kind", "place", "needs_data"),
    [
        (_header, "damaged", {"root": 0, "offset": 100}, False),
        (_padding, "damaged", {"root": 2, "layer": 1, "expert": 0}, True),
        (_expert, "damaged", {"root": 1, "layer": 2, "expert": 3}, True),
        (_dense_scale, "damaged", {"tensor": "model.layers.1.self_attn.q_proj.weight.qs", "layer": 1}, True),
        (_manifest, "damaged", {"root": 0}, False),
        (_catalog, "damaged", {"root": 0}, False),
        (_config, "damaged", {"root": 0}, False),
        (_root_file, "damaged", {"root": 2}, False),
        (_truncated_by_a_byte, "truncated", {"root": 1, "layer": 1, "expert": 4}, False),
        (_truncated_by_a_page, "truncated", {"root": 0, "tensor": "model.norm.weight"}, False),
        (_missing, "missing", {"root": 2}, False),
        (_catalog_missing, "missing", {"root": 0}, False),
    ],
)
def test_damage(
    built: Built, damage: Callable[[Built], Path], kind: str, place: dict[str, Any], needs_data: bool
) -> None:
    path = damage(built)
    quick = verify(built.home, "--json")
    assert quick.exit_code == (0 if needs_data else 1)
    result = verify(built.home, "--read-data", "all", "--json")
    assert result.exit_code == 1
    first = findings(result)[0]
    assert {"kind": kind, "path": str(path), "severity": "error", **place}.items() <= first.items()
    assert summary(result)["sound"] is False
    text = verify(built.home, "--read-data", "all")
    assert text.exit_code == 1
    assert text.stdout.startswith(f"{kind}: ")
    assert str(path) in text.stdout
    assert text.stdout.splitlines()[-1].startswith("NOT SOUND: ")


def test_parts_find_it_exactly_once(built: Built) -> None:
    _expert(built)
    codes = [verify(built.home, "--read-data", f"{part}/5").exit_code for part in range(1, 6)]
    assert sorted(codes) == [0, 0, 0, 0, 1]


def test_a_sample_can_be_repeated_by_its_seed(built: Built) -> None:
    first = summary(verify(built.home, "--read-data", "40%", "--json"))["data"]
    again = summary(verify(built.home, "--read-data", "40%", "--seed", first["seed"], "--json"))["data"]
    assert (again["extents"], again["read_bytes"]) == (first["extents"], first["read_bytes"])
    assert 0 < first["extents"] < summary(verify(built.home, "--json"))["structure"]["extents"]


def test_extra_files_are_told_and_can_be_made_to_fail(built: Built) -> None:
    extra = built.home / "experts" / "old.safetensors"
    extra.write_bytes(b"x")
    result = verify(built.home, "--json")
    assert result.exit_code == 0
    (finding,) = findings(result)
    assert (finding["kind"], finding["severity"], finding["path"]) == ("extra", "warning", str(extra))
    assert ", 1 warning;" in verify(built.home).stdout
    assert verify(built.home, "--fail-on-extra").exit_code == 1


def test_a_missing_root_and_where_it_went(built: Built, tmp_path: Path) -> None:
    (tmp_path / "b").rename(tmp_path / "moved")
    result = verify(built.home, "--read-data", "all", "--json")
    assert result.exit_code == 4
    (finding,) = findings(result)
    assert (finding["kind"], finding["root"], finding["path"]) == ("incomplete", 2, str(tmp_path / "b"))
    assert summary(result)["data"]["skipped"] == 10
    places = f"{tmp_path / 'a'},{tmp_path / 'moved'}"
    assert verify(built.home, "--dirs", places, "--read-data", "all").exit_code == 0
    assert verify(built.home, env={"K3_DIRS": places}).exit_code == 0


def test_swapped_roots_are_sound(built: Built, tmp_path: Path) -> None:
    """Drives that are mounted the other way round, with and without saying where they are."""
    (tmp_path / "a").rename(tmp_path / "x")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "x").rename(tmp_path / "b")
    for options in ([], ["--dirs", f"{tmp_path / 'a'},{tmp_path / 'b'}"]):
        assert verify(built.home, "--read-data", "all", *options).exit_code == 0


def test_root_files_swapped_alone_are_not(built: Built, tmp_path: Path) -> None:
    """Two root.json in each other's place: then no file is what its root says."""
    a, b = tmp_path / "a" / ROOT_NAME, tmp_path / "b" / ROOT_NAME
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)
    result = verify(built.home, "--json")
    assert result.exit_code == 1
    assert {finding["kind"] for finding in findings(result)} <= {"truncated", "too-long", "damaged"}


@pytest.mark.parametrize(
    ("prepare", "code", "error"),
    [
        (lambda home: (home / MANIFEST_NAME).unlink(), 5, "NotAContainerError"),
        (shutil.rmtree, 5, "NotAContainerError"),
        (
            lambda home: (home / MANIFEST_NAME).rename(home / JOURNAL_NAME),
            4,
            "IncompleteError",
        ),
        (
            lambda home: (home / MANIFEST_NAME).write_text('{"format": "k3-container", "version": 2}'),
            9,
            "VersionError",
        ),
    ],
)
def test_what_cannot_be_checked(built: Built, prepare: Callable[[Path], Any], code: int, error: str) -> None:
    prepare(built.home)
    result = verify(built.home, "--json")
    assert result.exit_code == code
    message = json.loads(result.stderr)
    assert (message["type"], message["error"], message["exit_code"]) == ("error", error, code)
    text = verify(built.home)
    assert text.exit_code == code
    assert text.stderr.startswith("error: ")


def test_an_older_version_that_never_was(built: Built) -> None:
    path = built.home / MANIFEST_NAME
    path.write_text(path.read_text().replace('"version": 1,', '"version": 0,'))
    assert verify(built.home).exit_code == 1


def test_a_journal_beside_a_manifest_is_a_leftover(built: Built) -> None:
    (built.home / JOURNAL_NAME).write_bytes(b"")
    result = verify(built.home, "--json")
    assert result.exit_code == 0
    assert findings(result)[0]["kind"] == "extra"
    assert findings(result)[0]["path"] == str(built.home / JOURNAL_NAME)


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["c", "d"], ["c", "--nonsense"], ["c", "--read-data", "6/5"], ["c", "--read-data", "half"],
        ["c", "--seed", "x"], ["c", "--dirs", "a,,b"],
    ],
)  # fmt: skip
def test_wrong_arguments(arguments: list[str]) -> None:
    result = verify(*arguments)
    assert result.exit_code == 2
    assert "Error" in result.stderr


def test_help_lists_every_exit_code() -> None:
    result = verify("--help")
    assert result.exit_code == 0
    for code in (0, 1, 2, 3, 4, 5, 6, 9, 130):
        assert any(line.split()[:1] == [str(code)] for line in result.stdout.splitlines()), code


def test_the_page_cache_is_named(built: Built) -> None:
    result = verify(built.home, "--read-data", "all", "--no-direct")
    assert result.exit_code == 0
    assert f"note: {built.home / 'experts'} cannot be read with O_DIRECT" in result.stdout


def test_progress_and_summary_are_json_lines(built: Built) -> None:
    result = verify(built.home, "--read-data", "all", "--json")
    types = [message["type"] for message in messages(result)]
    assert types == ["progress", "summary"]
    progress = messages(result)[0]
    assert progress["done_bytes"] == progress["total_bytes"] == summary(result)["data"]["read_bytes"]
    assert {"gb_per_s", "eta_s"} <= progress.keys()


# Against the source


class Repacked:
    """A snapshot and a container made from it by the repacker."""

    def __init__(self, tmp_path: Path, *, in_place: bool, model: SyntheticModel) -> None:
        self.snapshot = write_snapshot(model, tmp_path / "snapshot")
        self.home = tmp_path / "home"
        drives = () if in_place else (self.home, tmp_path / "drive")
        self.request = RepackRequest(
            (self.snapshot,), self.home, drives, None if in_place else (3, 1), in_place=in_place
        )
        repack(self.request, Watcher())


@pytest.fixture(params=[False, True], ids=["copied", "in place"])
def repacked(request: pytest.FixtureRequest, tmp_path: Path) -> Repacked:
    model = SyntheticModel(layers=3, experts=6, expert_order="shuffled")
    return Repacked(tmp_path, in_place=request.param, model=model)


def test_a_repacked_container_equals_its_source(repacked: Repacked) -> None:
    result = verify(repacked.home, "--read-data", "all", "--source", repacked.snapshot, "--json")
    assert result.exit_code == 0, result.output
    assert findings(result) == []
    source = summary(result)["source"]
    assert (source["experts"], source["differences"]) == (12, 0)
    text = verify(repacked.home, "--source", repacked.snapshot)
    assert text.stdout.splitlines()[-1] == "sound: every byte is the source's"


def test_a_container_of_another_source_is_different(tmp_path: Path) -> None:
    repacked = Repacked(tmp_path, in_place=False, model=SyntheticModel(layers=3, experts=6, seed=0))
    other = write_snapshot(SyntheticModel(layers=3, experts=6, seed=1), tmp_path / "other")
    result = verify(repacked.home, "--read-data", "all", "--source", other, "--json")
    assert result.exit_code == 1
    assert {finding["kind"] for finding in findings(result)} == {"different-from-source"}
    assert summary(result)["findings"] > 12


def test_another_shape_of_source_is_different_or_refused(tmp_path: Path) -> None:
    repacked = Repacked(tmp_path, in_place=False, model=SyntheticModel(layers=3, experts=6))
    other = write_snapshot(SyntheticModel(layers=3, experts=8), tmp_path / "other")
    result = verify(repacked.home, "--source", other, "--json")
    assert result.exit_code == 1
    shard = other / "model-00002-of-000006.safetensors"
    (first,) = (finding for finding in findings(result) if finding["path"] == str(shard))
    assert f"shard has {shard.stat().st_size} bytes, the container was made from one of" in first["problem"]


def test_a_damaged_byte_is_found_by_the_source_too(tmp_path: Path) -> None:
    repacked = Repacked(tmp_path, in_place=False, model=SyntheticModel(layers=3, experts=6))
    path = tmp_path / "drive" / "experts" / "layer-00001.safetensors"
    flip(path, path.stat().st_size - 4096)
    result = verify(repacked.home, "--source", repacked.snapshot, "--json")
    assert result.exit_code == 1
    (finding,) = findings(result)
    assert (finding["kind"], finding["layer"], finding["expert"]) == ("different-from-source", 1, 5)
    assert (finding["path"], finding["offset"]) == (str(path), path.stat().st_size - 4096)


def test_a_source_that_is_gone(repacked: Repacked, tmp_path: Path) -> None:
    result = verify(repacked.home, "--source", tmp_path / "nowhere")
    assert result.exit_code == 3


def test_a_container_that_cannot_be_opened_is_not_compared(tmp_path: Path) -> None:
    repacked = Repacked(tmp_path, in_place=False, model=SyntheticModel(layers=3, experts=6))
    (tmp_path / "drive" / "experts" / "layer-00002.safetensors").unlink()
    result = verify(repacked.home, "--source", repacked.snapshot)
    assert result.exit_code == 1
    assert result.stdout.startswith("missing: ")
    assert "source: not compared" in result.stdout


def test_scattered_experts_go_through_the_scratch_directory(tmp_path: Path) -> None:
    model = SyntheticModel(layers=2, experts=80, experts_per_token=4, expert_order="scattered", vision=False)
    repacked = Repacked(tmp_path, in_place=False, model=model)
    (tmp_path / "scratch").mkdir()
    result = verify(repacked.home, "--source", repacked.snapshot, "--scratch", tmp_path / "scratch")
    assert result.exit_code == 0, result.output
    assert list((tmp_path / "scratch").iterdir()) == []


def test_ctrl_c(tmp_path: Path) -> None:
    """The real process and the real signal."""
    built = build_container(tmp_path / "home", experts=200)
    go, let_go = os.pipe()
    waiting = (
        "import os, sys; from k3.verify import cli, digest_check as b; run = b._Check._check_run\n"
        "go = int(sys.argv.pop())\n"
        "def waiting(self, *a): os.write(1, b'reading\\n'); os.read(go, 1); run(self, *a)\n"
        "b._Check._check_run = waiting; b.READ_BYTES = 1 << 15; cli.main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting, str(built.home), "--read-data", "all", "--json", str(go)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[go],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("reading")
    process.send_signal(signal.SIGINT)
    wait_until_taken(process.pid, signal.SIGINT)
    os.close(let_go)
    output, errors = process.communicate(timeout=60)
    os.close(go)
    assert process.returncode == 130
    assert json.loads(errors.splitlines()[-1])["error"] == "Interrupted"
    assert "Traceback" not in errors
    assert output.count("reading") < 20, "went on reading"
