"""Holds up what is refused: by name, with its exit code, with nothing written; and that running again mends it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k3.base import direct_io
from k3.repack import run
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.attacks import ATTACKS, Attack, base
from tests.support.mounts import read_only, resize, small_tmpfs
from tests.support.repacked import (
    SMALL,
    WIDE,
    Tensor,
    check_container,
    command,
    rearrange,
    repacked,
    shard_tensors,
    tree,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("sound") / "snapshot")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(WIDE, tmp_path_factory.mktemp("source") / "snapshot")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, snapshot: Path) -> dict[str, str]:
    place = tmp_path_factory.mktemp("undisturbed")
    repacked(snapshot, place / "out")
    return tree(place / "out")


# --- broken snapshots


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_no_attack_gets_into_a_container(attack: Attack, sound: Path, tmp_path: Path) -> None:
    path = attack.make(sound, tmp_path / "snapshot")
    before = sorted(tmp_path.iterdir())
    result = repacked(path, tmp_path / "out", "--head-bits", "4", code=3)
    assert result.stdout == "" or attack.stage == "read"
    message = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(message) == 1
    assert attack.says in message[0]
    assert attack.file in message[0]
    if attack.stage != "read":
        assert sorted(tmp_path.iterdir()) == before, "nothing was written"
    assert not (tmp_path / "out" / "manifest.json").exists()
    plan = repacked(path, tmp_path / "plan", "--plan", code=0 if attack.stage == "read" else 3)
    assert "error: " in plan.output or attack.stage == "read"


def test_there_are_attacks() -> None:
    assert len(ATTACKS) > 50


# --- places


def refused(snapshot: Path, target: Path, *options: object, code: int) -> str:
    """Return the message of a refusal that leaves everything as it was."""
    before = tree(snapshot)
    result = repacked(snapshot, target, *options, code=code)
    assert tree(snapshot) == before
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.output
    return errors[0]


@pytest.mark.parametrize("inside", ["", "out", "deep/er/out"])
def test_a_destination_inside_the_source(snapshot: Path, tmp_path: Path, inside: str) -> None:
    source = tmp_path / "snapshot"
    shutil.copytree(snapshot, source)
    message = refused(source, source / inside, code=3)
    assert "the destination lies inside the source" in message
    link = tmp_path / "link"
    link.symlink_to(source)
    assert "inside the source" in refused(source, link / inside, code=3)
    assert "inside the source" in refused(link, source / inside, code=3)
    assert "inside the source" in refused(
        source, tmp_path / "home", "--dirs", f"{source / 'x'},{tmp_path}/b", code=3
    )
    assert not (tmp_path / "home").exists()


def test_a_destination_inside_a_cached_snapshot(tmp_path: Path) -> None:
    source = write_snapshot(dataclasses.replace(SMALL, layout="hf_cache"), tmp_path / "hub")
    repository = source.parent.parent
    assert "inside the source" in refused(repository, source / "out", code=3)
    assert "inside the source" in refused(repository, repository / "out", code=3)


def test_a_source_inside_a_destination_that_is_a_snapshot(snapshot: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    shutil.copytree(snapshot, outer)
    shutil.copytree(snapshot, outer / "inner")
    before = tree(outer)
    message = refused(outer / "inner", outer, code=3)
    assert "lies inside the destination" in message
    assert tree(outer) == before


def test_a_source_inside_a_destination_is_never_written_to(snapshot: Path, tmp_path: Path) -> None:
    """Drives are often given by their mount points: the snapshot may lie on one of them."""
    source = tmp_path / "drive" / "models" / "k3"
    shutil.copytree(snapshot, source)
    before = tree(source)
    options = ("--dirs", f"{tmp_path}/drive,{tmp_path}/b", "--shares", "1,1")
    repacked(source, tmp_path / "home", *options, "--verify-full")
    assert tree(source) == before
    shutil.copytree(snapshot, tmp_path / "other" / "experts")
    before = tree(tmp_path / "other")
    assert "belongs to no unfinished repack" in refused(tmp_path / "other" / "experts", tmp_path / "other", code=5)
    assert tree(tmp_path / "other") == before


@pytest.mark.parametrize("which", ["home", "drive", "parent"])
def test_a_destination_that_is_a_file(snapshot: Path, tmp_path: Path, which: str) -> None:
    (tmp_path / "file").write_text("mine")
    if which == "home":
        message = refused(snapshot, tmp_path / "file", code=5)
    elif which == "drive":
        message = refused(snapshot, tmp_path / "home", "--dirs", f"{tmp_path}/file", code=5)
    else:
        message = refused(snapshot, tmp_path / "file" / "home", code=6)
    assert "file" in message
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


OWN_NAMES = (
    "config.json", "tiktoken.model", "generation_config.json", "dense.safetensors", "catalog.mdb", "root.json",
    "experts/layer-00001.safetensors", "experts/notes.txt", "dense.safetensors.partial", "config.json.partial",
)  # fmt: skip


@pytest.mark.parametrize("name", OWN_NAMES)
def test_files_of_others_are_never_written_over(snapshot: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "home" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = tree(tmp_path)
    message = refused(snapshot, tmp_path / "home", code=5)
    assert f"the directory holds {name}, which belongs to no unfinished repack" in message
    assert tree(tmp_path) == before


def test_a_link_that_leads_nowhere_is_somebody_elses_too(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "config.json").symlink_to(tmp_path / "precious")
    refused(snapshot, tmp_path / "home", code=5)
    assert not (tmp_path / "precious").exists()


def test_a_manifest_of_something_else_is_not_written_over(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    for content in ("{}", '{"format": "app"}', "not json"):
        (tmp_path / "home" / "manifest.json").write_text(content)
        assert "manifest" in refused(snapshot, tmp_path / "home", code=1 if content == "not json" else 5)
        assert (tmp_path / "home" / "manifest.json").read_text() == content


@pytest.mark.parametrize("name", ["root.json", "experts/layer-00009.safetensors"])
def test_a_drive_in_use_by_another_container(snapshot: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "drive" / name
    path.parent.mkdir(parents=True)
    path.write_text("another's")
    before = tree(tmp_path)
    message = refused(snapshot, tmp_path / "home", "--dirs", tmp_path / "drive", code=5)
    assert name in message
    assert tree(tmp_path) == before


def test_unrelated_files_in_the_destination_do_not_matter(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "home" / "lost+found").mkdir(parents=True)
    (tmp_path / "home" / "notes.txt").write_text("mine")
    (tmp_path / "home" / "experts").mkdir()
    repacked(snapshot, tmp_path / "home", "--verify-full")
    assert (tmp_path / "home" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("exists", [True, False])
def test_a_read_only_destination(snapshot: Path, tmp_path: Path, exists: bool) -> None:
    (tmp_path / "real" / "home").mkdir(parents=True)
    with read_only(tmp_path / "real", tmp_path / "view") as view:
        message = refused(snapshot, view / ("home" if exists else "new"), code=6)
    assert "Read-only file system" in message
    assert list((tmp_path / "real").rglob("*")) == [tmp_path / "real" / "home"]


def test_a_path_that_is_no_text(snapshot: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9")
    assert "the path is not text" in refused(snapshot, odd, code=3)
    assert not odd.exists()
    shutil.copytree(snapshot, tmp_path / "source")
    (tmp_path / "source" / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    assert "not printable text" in refused(tmp_path / "source", tmp_path / "out", code=3)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["nowhere", "file", "empty"])
def test_no_snapshot_there(tmp_path: Path, missing: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    result = repacked(tmp_path / missing, tmp_path / "out", code=3)
    assert missing in result.stderr
    assert not (tmp_path / "out").exists()


# --- names and values that only odd snapshots have


def add_tensors(snapshot: Path, target: Path, tensors: list[Any], config: dict[str, Any] | None = None) -> Path:
    shutil.copytree(snapshot, target)
    shards = {path.name: shard_tensors(path) for path in sorted(target.glob("*.safetensors"))}
    last = max(shards)
    shards[last] = [*shards[last], *tensors]
    rearrange(target, shards)
    if config is not None:
        path = target / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return target


@pytest.mark.parametrize(
    "name",
    [
        "__pad__.0",
        "__pad__.x",
        "language_model.lm_head.weight.qs",
        "language_model.model.layers.0.mlp.up_proj.weight.qs",
    ],
)
def test_names_that_the_container_needs_itself(snapshot: Path, tmp_path: Path, name: str) -> None:
    source = add_tensors(snapshot, tmp_path / "source", [Tensor(name, "U8", (3,), b"abc")])
    message = refused(source, tmp_path / "out", code=3)
    assert f"needs the tensor name {name} for itself" in message
    assert not (tmp_path / "out").exists()
    if name.endswith("lm_head.weight.qs"):
        repacked(source, tmp_path / "out", "--head-bits", "16", "--verify-full")


def test_vision_experts_are_vision(snapshot: Path, tmp_path: Path) -> None:
    """A vision tower may have layers and experts of its own; they must not be taken for the text model's."""
    names = [f"vision_tower.layers.1.moe.experts.{e}.w1.weight_packed" for e in (0, 1)]
    source = add_tensors(
        snapshot, tmp_path / "source", [Tensor(name, "U8", (160, 64), bytes(10240)) for name in names]
    )
    repacked(source, tmp_path / "out", "--verify-full")
    check_container(tmp_path / "out", [source], skipped=names)


@pytest.mark.parametrize("in_place", [False, True])
def test_expert_parts_without_elements(snapshot: Path, tmp_path: Path, in_place: bool) -> None:
    block = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}"
    tensors = [
        Tensor(block.format(layer, expert, part), "F32", (0, 4), b"")
        for layer in (1, 2) for expert in range(6) for part in ("w0.bias", "w2.zero", "w9.bias")
    ]  # fmt: skip
    source = add_tensors(snapshot, tmp_path / "source", tensors)
    repacked(source, tmp_path / "out", "--verify-full", *(["--in-place"] if in_place else []))
    check_container(tmp_path / "out", [source])


@pytest.mark.parametrize("architectures", [5, "Kimi", [], None, [7], {"a": 1}, ["x\ny"]])
def test_a_strange_config_does_not_end_a_run_at_its_end(
    snapshot: Path, tmp_path: Path, architectures: Any
) -> None:
    config = {"architectures": architectures, "model_type": ["odd"]}
    source = add_tensors(snapshot, tmp_path / "source", [], config)
    repacked(source, tmp_path / "out", "--verify-full")
    model = json.loads((tmp_path / "out" / "manifest.json").read_text())["model"]
    assert (model["model_type"], model["architecture"]) == (None, None)


# --- space


def test_too_little_space_is_known_before_a_byte_is_written(snapshot: Path, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "drive", "1m") as drive:
        message = refused(snapshot, drive / "home", code=7)
        assert "not enough space" in message
        assert "bytes needed" in message
        assert "1,048,576 free" in message
        assert "missing" in message
        assert not list(drive.iterdir())
    with small_tmpfs(tmp_path / "drive", "256k") as drive:
        message = refused(
            snapshot, tmp_path / "home", "--dirs", f"{drive / 'a'},{tmp_path / 'b'}", "--shares", "999,1", code=7
        )
        assert str(drive) in message
        assert not list(drive.iterdir())
        assert not (tmp_path / "home").exists()
        assert not (tmp_path / "b").exists()


def test_space_is_counted_per_file_system(snapshot: Path, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "drive", "32m") as drive:
        result = repacked(
            snapshot, drive / "home", "--dirs", f"{drive}/a,{drive}/b", "--shares", "1,1", "--plan", "--json"
        )
        (need,) = json.loads(result.stdout)["drives"]
        assert len(need["directories"]) == 3
        repacked(snapshot, drive / "home", "--dirs", f"{drive}/a,{drive}/b", "--shares", "1,1")
        result = repacked(
            snapshot, drive / "home", "--dirs", f"{drive}/a,{drive}/b", "--shares", "1,1", "--plan", "--json"
        )
        (again,) = json.loads(result.stdout)["drives"]
        assert again["present_bytes"] == again["write_bytes"] == need["write_bytes"], (
            "what is there is not counted twice"
        )


def test_a_drive_that_fills_up_is_said_so_at_every_step_and_the_run_goes_on(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, str]
) -> None:
    """The preflight is fooled; the drive grows by 64 KiB from run to run until the container is complete."""
    monkeypatch.setattr(run, "check_space", lambda needs: None)
    monkeypatch.setattr("k3.repack.write.COMMIT_BYTES", 50_000)
    with small_tmpfs(tmp_path / "drive", "64k") as drive:
        stages = set()
        for size in range(64, 4096, 64):
            resize(drive, f"{size}k")
            result = command(snapshot, drive / "out")
            if result.exit_code == 0:
                break
            assert result.exit_code == 7, result.output
            assert "Traceback" not in result.output
            assert "o space left on device" in result.stderr
            stages.add(result.stderr.split("error: ")[1].split(":")[0])
            assert not (drive / "out" / "manifest.json").exists()
        assert tree(drive / "out") == undisturbed
    assert len(stages) > 1, "the drive was full at more than one step"


# --- drives that fail


def failing(monkeypatch: pytest.MonkeyPatch, kind: str, part: str, number: int = errno.EIO, skip: int = 0) -> None:
    """Let reads or writes of files whose path contains `part` fail, after `skip` of them went well."""
    original = {"read": os.preadv, "write": os.pwritev}[kind]
    left = [skip]

    def call(fd: int, buffers: Any, offset: int) -> int:
        if part in str(Path(f"/proc/self/fd/{fd}").readlink()):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(number, os.strerror(number))
        return int(original(fd, buffers, offset))

    owner: Any = {"read": direct_io.ReadFile, "write": direct_io.WriteFile}[kind]
    defaults = dict(owner.__init__.__kwdefaults__)
    defaults[{"read": "preadv", "write": "pwritev"}[kind]] = call
    monkeypatch.setattr(owner.__init__, "__kwdefaults__", defaults)


@pytest.mark.parametrize("shard", ["model-00001", "model-00003"])
def test_a_source_that_cannot_be_read(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str, undisturbed: dict[str, str]
) -> None:
    monkeypatch.setattr("k3.repack.jobs.BLOCK_BYTES", 16384)
    with monkeypatch.context() as patch:
        failing(patch, "read", shard, skip=1)
        message = refused(snapshot, tmp_path / "out", code=6)
    assert "cannot read: Input/output error" in message
    assert shard in message
    assert re.search(r"offset \d+", message)
    assert "smartctl" in message
    repacked(snapshot, tmp_path / "out")
    assert tree(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("lost", ["shard", "texts"])
def test_a_source_that_goes_away(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, undisturbed: dict[str, str]
) -> None:
    """A drive that is pulled out while it is read, or when only the small files are still to be written."""
    source, away = tmp_path / "snapshot", tmp_path / "away"
    shutil.copytree(snapshot, source)
    step = {"shard": "_status", "texts": "publish"}[lost]
    original = getattr(run, step)
    third = sorted(source.glob("*.safetensors"))[2]

    def unplug(*arguments: Any) -> Any:
        if (lost == "texts" or arguments[0] == third) and source.exists():
            source.rename(away)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run, step, unplug)
        result = repacked(source, tmp_path / "out", code=6 if lost == "shard" else 0)
    assert lost == "texts" or "snapshot" in result.stderr
    away.rename(source)
    repacked(source, tmp_path / "out")
    assert tree(tmp_path / "out") == undisturbed


@pytest.mark.parametrize(("part", "skip"), [("dense", 0), ("layer-00001", 0), ("layer-00002", 3)])
@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 6), (errno.ENOSPC, 7), (errno.EDQUOT, 7)])
def test_a_destination_that_cannot_be_written(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, str],
    part: str, skip: int, number: int, code: int,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        failing(patch, "write", part, number, skip)
        message = refused(snapshot, tmp_path / "out", code=code)
    assert f"cannot write: {os.strerror(number)}" in message
    assert part in message
    assert "offset" in message
    repacked(snapshot, tmp_path / "out")
    assert tree(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("skip", range(0, 24, 3))
def test_an_fsync_that_fails_is_never_overlooked(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip: int, undisturbed: dict[str, str]
) -> None:
    original, left = os.fsync, [skip]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise OSError(errno.EIO, "Input/output error")
        original(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        result = command(snapshot, tmp_path / "out")
    if left[0] >= 0:
        pytest.skip("a run has fewer calls")
    assert result.exit_code == 6, result.output
    assert "Input/output error" in result.stderr
    assert "Traceback" not in result.output
    repacked(snapshot, tmp_path / "out")
    assert tree(tmp_path / "out") == undisturbed


def test_bytes_that_cannot_be_read_back_are_made_again(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run, "finish_data_files", interrupt)
        assert command(snapshot, tmp_path / "out").exit_code == 130
    with monkeypatch.context() as patch:
        failing(patch, "read", "layer-00001", skip=2)
        result = repacked(snapshot, tmp_path / "out")
    assert "did not match their digests and are made again" in result.stderr
    assert tree(tmp_path / "out") == undisturbed


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
