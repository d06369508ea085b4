"""Holds up the repack from end to end: whatever the options and the snapshot's form, it is the source."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import (
    SMALL,
    WIDE,
    prove,
    repacked,
    tree,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(SMALL, tmp_path_factory.mktemp("small") / "snapshot")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(WIDE, tmp_path_factory.mktemp("wide") / "snapshot")


# --- options


@pytest.mark.parametrize(
    ("bits", "mla", "head"),
    [(8, 8, 8), (4, 4, 4), (16, 16, 16), (32, 32, 32), (4, 8, 16), (8, 4, 32), (16, 32, 4), (32, 16, 8)],
)
def test_every_width_of_matrices(small: Path, tmp_path: Path, bits: int, mla: int, head: int) -> None:
    found = prove(small, tmp_path / "out", "--bits", bits, "--mla-bits", mla, "--head-bits", head)
    names = {4: "int4", 8: "int8", 16: "raw", 32: "f32"}
    prefix = "language_model."
    assert found.dense[f"{prefix}lm_head.weight"] == names[head]
    assert found.dense[f"{prefix}model.layers.0.mlp.gate_proj.weight"] == names[bits]
    assert found.dense[f"{prefix}model.layers.2.self_attn.kv_b_proj.weight"] == names[mla]
    assert found.dense[f"{prefix}model.layers.2.self_attn.o_proj.weight"] == names[mla]
    assert found.dense[f"{prefix}model.layers.1.self_attn.o_proj.weight"] == names[bits]
    assert found.dense[f"{prefix}model.embed_tokens.weight"] == "raw"
    assert found.manifest["quantization"] == {"bits": bits, "mla_bits": mla, "head_bits": head}
    assert found.order[0] == f"{prefix}model.embed_tokens.weight"
    assert found.order[-1] == f"{prefix}lm_head.weight"


def test_the_published_form(tiny_snapshot: Path, tmp_path: Path) -> None:
    found = prove(tiny_snapshot, tmp_path / "out")
    assert found.experts == 64
    assert found.manifest["geometry"] == {
        "layers": [[0, 4]], "expert_layers": 4, "experts": 16, "expert_payload_bytes": 9792, "page_bytes": 4096,
    }  # fmt: skip
    assert found.manifest["model"]["architecture"] == "KimiK3ForConditionalGeneration"
    assert found.manifest["model"]["revision"] is None


def test_the_golden_snapshot(tmp_path: Path) -> None:
    prove(Path(__file__).parents[1] / "vectors" / "tiny_s0", tmp_path / "out")


@pytest.mark.parametrize(
    ("roots", "shares"),
    [("home,a", "1,1"), ("a,home", "3,1"), ("a,b", "1,2"), ("home,a,b", "7,3,1"), ("a", "5"), ("home", "2"),
     ("a,b,home", "1,1,1000000"), ("a,b,c,d", "1,1,1,1")],
)  # fmt: skip
def test_every_arrangement_of_drives(wide: Path, tmp_path: Path, roots: str, shares: str) -> None:
    home = tmp_path / "home"
    drives = [home if name == "home" else tmp_path / name for name in roots.split(",")]
    found = prove(wide, home, "--shares", shares, drives=drives)
    given = dict(zip(roots.split(","), map(int, shares.split(",")), strict=True))
    entries = found.manifest["roots"]
    assert [root["share"] for root in entries] == [given.pop("home", 0), *given.values()]
    assert [root["path"] for root in entries] == [".", *(f"../{name}" for name in given)]
    for root, drive in zip(entries[1:], [d for d in drives if d != home], strict=True):
        document = json.loads((drive / "root.json").read_text())
        assert document == {
            "format": "k3-container-root", "version": 1, "container": found.manifest["container"],
            "root": root["uuid"], "number": entries.index(root),
        }  # fmt: skip
    if "1000000" in shares:
        assert not list((tmp_path / "a").rglob("*.safetensors")), "a share below a page holds nothing"


def test_measured_shares_follow_the_drives(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"a": 3.0e9, "b": 1.0e9}
    monkeypatch.setattr("k3.repack.run.drive_rate", lambda directory: rates[directory.name])
    found = prove(wide, tmp_path / "home", drives=[tmp_path / "a", tmp_path / "b"])
    assert [root["share"] for root in found.manifest["roots"]] == [0, 75, 25]
    assert [root["probe_mb_per_s"] for root in found.manifest["roots"]] == [None, 3000, 1000]


def test_drives_are_measured_and_nothing_is_left_of_it(wide: Path, tmp_path: Path) -> None:
    found = prove(wide, tmp_path / "home", drives=[tmp_path / "a", tmp_path / "b"])
    assert all(root["probe_mb_per_s"] > 0 for root in found.manifest["roots"][1:])


@pytest.mark.parametrize("order", ["lexicographic", "scattered"])
def test_in_place_writes_the_dense_blob_only(tmp_path: Path, order: Any) -> None:
    snapshot = write_snapshot(dataclasses.replace(WIDE, expert_order=order), tmp_path / "snapshot")
    found = prove(snapshot, tmp_path / "out", "--in-place")
    assert [root["kind"] for root in found.manifest["roots"]] == ["home", "source"]
    assert not (tmp_path / "out" / "experts").exists()
    assert [file["kind"] for file in found.manifest["files"]].count("source") == 4


def test_in_place_over_several_directories(tmp_path: Path) -> None:
    snapshot = write_snapshot(SMALL, tmp_path / "s", more_directories=[tmp_path / "t", tmp_path / "u"])
    found = prove(snapshot, tmp_path / "out", "--in-place", more=[tmp_path / "t", tmp_path / "u"])
    assert [root["path"] for root in found.manifest["roots"]] == [".", "../s", "../t", "../u"]


@pytest.mark.parametrize(("option", "layers"), [("0", {0}), ("1", {1}), ("0-1", {0, 1}), ("0,2", {0, 2})])
def test_some_layers_only(small: Path, tmp_path: Path, option: str, layers: set[int]) -> None:
    found = prove(small, tmp_path / "out", "--layers", option, layers=layers)
    ranges = found.manifest["geometry"]["layers"]
    assert {n for first, last in ranges for n in range(first, last + 1)} == layers
    assert found.experts == 4 * len(layers - {0})


def test_without_o_direct(small: Path, tmp_path: Path) -> None:
    prove(small, tmp_path / "out", "--no-direct")
    repacked(small, tmp_path / "other", "--direct")
    assert tree(tmp_path / "out") == tree(tmp_path / "other")


def test_a_limited_rate_is_kept(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paid: list[int] = []
    monkeypatch.setattr("k3.repack.throttle.Throttle.pay", lambda self, nbytes: paid.append(nbytes))
    prove(small, tmp_path / "out", "--bwlimit", "1M")
    total = sum(path.stat().st_size for path in small.glob("*.safetensors"))
    assert sum(paid) >= total


# --- equal input, equal container


def test_equal_input_gives_an_equal_container_anywhere(small: Path, tmp_path: Path) -> None:
    trees = []
    for place in ("one", "two/deeper"):
        shutil.copytree(small, tmp_path / place / "snapshot")
        base = tmp_path / place
        repacked(
            base / "snapshot", base / "home", "--dirs", f"{base}/a,{base}/home,{base}/b", "--shares", "3,2,1",
            "--bits", "4",
        )  # fmt: skip
        trees.append(tree(base / "home", base / "a", base / "b"))
    assert trees[0] == trees[1]


@pytest.mark.parametrize(
    "options",
    [("--bits", "4"), ("--head-bits", "16"), ("--layers", "0-1"), ("--in-place",)],
    ids=lambda options: options[0],
)
def test_other_choices_give_another_identity(small: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    identities = set()
    for number, arguments in enumerate(((), options)):
        repacked(small, tmp_path / str(number), *arguments)
        identities.add(json.loads((tmp_path / str(number) / "manifest.json").read_text())["container"])
    assert len(identities) == 2


def test_memory_and_threads_do_not_show_in_the_bytes(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repacked(wide, tmp_path / "a")
    monkeypatch.setattr("k3.repack.jobs.BLOCK_BYTES", 4096)
    monkeypatch.setattr("k3.repack.assemble.OUTPUT_BYTES", 4096)
    monkeypatch.setattr("k3.repack.dense.GATHER_BYTES", 100)
    monkeypatch.setattr("k3.repack.write.COMMIT_BYTES", 1)
    monkeypatch.setattr("k3.repack.write.OPEN_FILES_MAX", 1)
    repacked(wide, tmp_path / "b", "--verify-full")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_a_watcher_sees_every_byte_go_by(small: Path, tmp_path: Path) -> None:
    class Counter(Watcher):
        def __init__(self) -> None:
            self.phases: list[tuple[str, int]] = []
            self.done = 0
            self.items: list[str] = []

        def phase(self, what: str, total_bytes: int) -> None:
            self.phases.append((what, total_bytes))

        def item(self, name: str) -> None:
            self.items.append(name)

        def advance(self, nbytes: int) -> None:
            self.done += nbytes

    counter = Counter()
    result = repack(RepackRequest(sources=(small,), home=tmp_path / "out"), counter)
    shards = sorted(path.name for path in small.glob("*.safetensors"))
    total = sum((small / name).stat().st_size for name in shards)
    assert counter.phases == [("repacking", total)]
    assert counter.done == result.read_bytes == total
    assert counter.items == shards
    assert not result.already_complete
    assert result.recheck is None
    written = sum(file.bytes - file.header_bytes for file in result.manifest.files)
    assert result.written_bytes == written


def test_files_that_are_left_behind_are_told_of(tiny_snapshot: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_snapshot, source)
    (source / "manifest.json").write_text("{}")
    (source / "NOTES.md").write_text("kept")
    notes: list[str] = []

    class Listening(Watcher):
        def note(self, text: str) -> None:
            notes.append(text)

    repack(RepackRequest(sources=(source,), home=tmp_path / "out"), Listening())
    assert [note for note in notes if note.startswith("manifest.json")]
    assert (tmp_path / "out" / "NOTES.md").read_text() == "kept"
