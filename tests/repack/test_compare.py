"""Holds up --verify-full: no byte of a finished container can change unseen, and the difference is named."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.containers import flip
from tests.support.repacked import SMALL, WIDE, command, repacked, tree


@dataclass
class Made:
    """A finished container and the command that made it."""

    source: Path
    home: Path
    drives: tuple[Path, ...]
    arguments: list[object]

    def verify(self) -> Result:
        return command(*self.arguments, "--verify-full", "--json")

    def summary(self, code: int) -> dict[str, Any]:
        result = self.verify()
        assert result.exit_code == code, result.output
        message: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        assert message["type"] == "summary"
        return message

    def differences(self) -> list[dict[str, Any]]:
        """Return what a verification finds; it must end with exit code 1."""
        found = self.summary(1)
        assert found["verdict"] == "different"
        assert found["differences"] == len(found["first_differences"]) > 0
        differences: list[dict[str, Any]] = found["first_differences"]
        return differences


def make(place: Path, source: Path, form: str) -> Made:
    home = place / "home"
    arguments: list[object] = [source, home]
    drives: tuple[Path, ...] = ()
    if form == "two roots":
        drives = (place / "drive",)
        arguments += ["--dirs", f"{home},{place / 'drive'}", "--shares", "1,2"]
    elif form == "in place":
        arguments += ["--in-place"]
    repacked(*arguments)
    return Made(source, home, drives, arguments)


@pytest.fixture(params=["one root", "two roots", "in place"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    source = write_snapshot(WIDE, tmp_path / "snapshot")
    return make(tmp_path, source, request.param)


def only(differences: list[dict[str, Any]]) -> dict[str, Any]:
    assert len(differences) == 1, differences
    return differences[0]


def test_a_finished_container_is_equal(made: Made) -> None:
    before = tree(made.home, *made.drives)
    summary = made.summary(0)
    assert (summary["verdict"], summary["experts"], summary["differences"]) == ("equal", 12, 0)
    assert summary["tensors"] == len(Container.open(made.home).tensor_names())
    assert tree(made.home, *made.drives) == before
    text = command(*made.arguments, "--verify-full").stdout
    assert re.search(r"verified: EQUAL: compared ([\d,]+) of \1 bytes of 12 experts", text)


def test_a_byte_of_an_expert_is_named(made: Made) -> None:
    container = Container.open(made.home)
    key = ExpertKey(2, 3)
    extents = container.expert_extents(key.layer, key.expert)
    parts = container.expert_layout(key.layer).parts
    container.close()
    inside = 0
    for extent in extents:
        for step in (0, extent.payload_bytes // 2, extent.payload_bytes - 1):
            flip(extent.path, extent.offset + step)
            found = made.differences()
            if "--in-place" in made.arguments:  # the shard is the source, too: its own digest is another one
                assert "the manifest has" in found.pop()["problem"]
            difference = only(found)
            assert (difference["layer"], difference["expert"]) == (2, 3)
            assert difference["path"] == str(extent.path)
            if "--in-place" not in made.arguments:
                assert difference["problem"] == "byte differs from the source"
                assert difference["offset"] == extent.offset + step
                position = inside + step
                name = next(p.name for p in parts if p.offset <= position < p.offset + p.nbytes)
                assert difference["tensor"].endswith(f"layers.2.block_sparse_moe.experts.3.{name}")
            flip(extent.path, extent.offset + step)
        inside += extent.payload_bytes
    made.summary(0)


@pytest.mark.parametrize("made", ["one root", "two roots"], indirect=True)
def test_a_byte_of_padding_is_named(made: Made) -> None:
    container = Container.open(made.home)
    extent = container.expert_extents(1, 5)[-1]
    assert extent.stored_bytes > extent.payload_bytes
    container.close()
    flip(extent.path, extent.end - 1)
    difference = only(made.differences())
    assert (difference["layer"], difference["expert"]) == (1, 5)
    assert difference["offset"] == extent.end - 1
    assert "padding" in difference["tensor"]


def test_a_byte_of_the_dense_blob_is_named(made: Made) -> None:
    container = Container.open(made.home)
    name = "language_model.model.layers.1.self_attn.o_proj.weight"
    quantized, raw = container.tensor(name), container.tensor("language_model.model.norm.weight")
    container.close()
    assert quantized.scales is not None
    blob = made.home / "dense.safetensors"
    for extent, tensor in (
        (quantized.weights, name), (quantized.scales, name), (raw.weights, "language_model.model.norm.weight"),
    ):  # fmt: skip
        for offset in (
            extent.offset,
            extent.offset + extent.payload_bytes - 1,
            extent.offset + extent.stored_bytes - 1,
        ):
            flip(blob, offset)
            difference = only(made.differences())
            assert difference["tensor"] == tensor
            assert (difference["path"], difference["offset"]) == (str(blob), offset)
            flip(blob, offset)


def test_a_byte_of_a_header_is_named(made: Made) -> None:
    places = (0, 9, 500, 4095)
    for number, path in enumerate(sorted(made.home.rglob("*.safetensors"))):
        for offset in (places[number % 4], places[(number + 1) % 4]):
            flip(path, offset)
            difference = only(made.differences())
            assert (difference["path"], difference["offset"]) == (str(path), offset)
            flip(path, offset)


def test_a_byte_of_a_text_file_is_named(made: Made) -> None:
    for entry in json.loads((made.home / "manifest.json").read_text())["text_files"]:
        path = made.home / entry["path"]
        flip(path, entry["bytes"] // 2)
        difference = only(made.differences())
        assert difference["path"] == str(path)
        assert difference["problem"] == "file differs from the source's"
        flip(path, entry["bytes"] // 2)
    path.unlink()
    assert "cannot be compared" in only(made.differences())["problem"]


def test_a_byte_of_a_root_file_is_found(tmp_path: Path) -> None:
    made = make(tmp_path, write_snapshot(WIDE, tmp_path / "snapshot"), "two roots")
    path = tmp_path / "drive" / "root.json"
    for offset in range(path.stat().st_size):
        flip(path, offset, mask=0x01)
        result = made.verify()
        assert result.exit_code == 1, (offset, result.output)
        assert str(path) in result.output
        assert "Traceback" not in result.output
        flip(path, offset, mask=0x01)
    path.unlink()
    assert made.verify().exit_code == 4


@pytest.mark.parametrize("name", ["manifest.json", "catalog.mdb"])
def test_a_byte_of_manifest_or_catalog_is_found(made: Made, name: str) -> None:
    path = made.home / name
    size = path.stat().st_size
    for offset in range(0, size, size // 7):
        flip(path, offset)
        result = made.verify()
        assert result.exit_code in (1, 5), result.output
        assert name in result.stderr
        flip(path, offset)


@pytest.mark.parametrize("damage", ["truncated", "longer", "missing"])
def test_a_data_file_of_another_size_is_found(made: Made, damage: str) -> None:
    for path in sorted(made.home.rglob("*.safetensors")):
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            os.truncate(path, len(data) + (1 if damage == "longer" else -1))
        result = made.verify()
        assert result.exit_code == 1, result.output
        assert str(path) in result.stderr
        path.write_bytes(data)
    made.summary(0)


def test_many_differences_are_counted_and_the_first_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip  # noqa: E501
    made = make(tmp_path, write_snapshot(WIDE, tmp_path / "snapshot"), "one root")
    container = Container.open(made.home)
    for layer in (1, 2):
        for expert in range(6):
            (extent,) = container.expert_extents(layer, expert)
            data = bytearray(extent.path.read_bytes())
            data[extent.offset : extent.offset + extent.payload_bytes] = bytes(extent.payload_bytes)
            extent.path.write_bytes(data)
    container.close()
    monkeypatch.setattr("k3.repack.compare.DIFFERENCES_MAX", 5)
    found = made.summary(1)
    assert found["differences"] == 12
    assert len(found["first_differences"]) == 5
    text = command(*made.arguments, "--verify-full")
    assert "verified: NOT EQUAL, 12 differences" in text.stdout
    assert text.stderr.count("different: ") == 5


def test_the_source_is_what_counts(made: Made, tmp_path: Path) -> None:
    """The container is whole, and the source has changed: that is a difference, too."""
    shard = sorted(made.source.glob("*.safetensors"))[1]
    size = shard.stat().st_size
    flip(shard, size - size // 3)
    assert made.differences()


def test_scattered_experts_are_compared_without_a_trace(tmp_path: Path) -> None:
    model = dataclasses.replace(WIDE, expert_order="scattered", experts=11, shards_per_layer=2)
    made = make(tmp_path, write_snapshot(model, tmp_path / "snapshot"), "one root")
    before = tree(made.home)
    assert made.summary(0)["experts"] == 22
    assert tree(made.home) == before
    path = made.home / "experts" / "layer-00002.safetensors"
    flip(path, path.stat().st_size - 20_000)
    assert only(made.differences())["layer"] == 2


def test_drives_that_moved_are_found_by_name(tmp_path: Path) -> None:
    made = make(tmp_path, write_snapshot(WIDE, tmp_path / "snapshot"), "two roots")
    shutil.move(tmp_path / "drive", tmp_path / "moved")
    assert made.verify().exit_code == 4
    made.arguments[3] = f"{made.home},{tmp_path / 'moved'}"
    assert made.summary(0)["verdict"] == "equal"


def test_hugging_face_caches_are_compared_too(tmp_path: Path) -> None:
    source = write_snapshot(dataclasses.replace(SMALL, layout="hf_cache"), tmp_path / "hub")
    made = make(tmp_path, source, "one root")
    assert made.summary(0)["verdict"] == "equal"
    flip(source.joinpath("config.json").resolve(), 10)
    assert "config.json" in made.verify().output


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1


def test_every_byte_of_every_file_is_compared(made: Made) -> None:
    """Not one byte more or less than the container's files hold."""
    files = {path for root in (made.home, *made.drives) for path in root.rglob("*") if path.is_file()}
    expected_bytes = sum(path.stat().st_size for path in files)
    container = Container.open(made.home)
    for layer in container.expert_layers():
        for expert in range(container.expert_count(layer)):
            extents = container.expert_extents(layer, expert)
            expected_bytes += sum(
                extent.stored_bytes for extent in extents if extent.path not in files
            )  # in place
    container.close()
    assert made.summary(0)["compared_bytes"] == expected_bytes
