"""Holds up the repack of every form that a snapshot can have: orders, shards, names, dtypes, odd values."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import (
    SMALL,
    WIDE,
    Tensor,
    prove,
    rearrange,
    repacked,
    shard_tensors,
    source_tensors,
    tree,
    vision_names,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(SMALL, tmp_path_factory.mktemp("small") / "snapshot")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(WIDE, tmp_path_factory.mktemp("wide") / "snapshot")


@pytest.mark.parametrize(
    ("order", "shards"), [("id", 3), ("shuffled", 1), ("scattered", 1), ("scattered", 3), ("lexicographic", 1)]
)
def test_every_order_of_experts(tmp_path: Path, order: Any, shards: int) -> None:
    model = dataclasses.replace(WIDE, expert_order=order, shards_per_layer=shards, experts=11)
    snapshot = write_snapshot(model, tmp_path / "snapshot")
    prove(snapshot, tmp_path / "out", "--shares", "1,1", drives=[tmp_path / "out", tmp_path / "a"])
    model = dataclasses.replace(model, expert_order="id", shards_per_layer=1)
    write_snapshot(model, tmp_path / "plain")
    repacked(tmp_path / "plain", tmp_path / "other", "--dirs", f"{tmp_path}/other,{tmp_path}/b", "--shares", "1,1")
    same = ("manifest.json", "root.json", "catalog.mdb")
    assert tree(tmp_path / "out", tmp_path / "a", skip=same) == tree(tmp_path / "other", tmp_path / "b", skip=same)


def test_an_expert_split_over_two_shards(wide: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(wide, snapshot)
    tensors = list(source_tensors(snapshot).values())
    cut = next(
        i for i, t in enumerate(tensors) if ".layers.1." in t.name and ".experts.2.w2.weight_scale" in t.name
    )
    rearrange(snapshot, {"b.safetensors": tensors[:cut], "a.safetensors": tensors[cut:]})
    prove(snapshot, tmp_path / "out")
    prove(snapshot, tmp_path / "in-place", "--in-place")


@pytest.mark.parametrize("smaller", [1, 2])
def test_layers_with_different_experts(wide: Path, tmp_path: Path, smaller: int) -> None:
    """One layer's experts have fewer parts: buffers that held the others' bytes are used again for them."""
    snapshot = tmp_path / "snapshot"
    shutil.copytree(wide, snapshot)
    shards = {path.name: shard_tensors(path) for path in sorted(snapshot.glob("*.safetensors"))}
    for name, tensors in shards.items():
        shards[name] = [
            t
            for t in tensors
            if not (f"layers.{smaller}." in t.name and ".experts." in t.name and ".w3." in t.name)
        ]
    rearrange(snapshot, shards)
    for number, options in enumerate(((), ("--in-place",))):
        found = prove(snapshot, tmp_path / f"out{number}", *options)
        assert found.manifest["geometry"]["expert_payload_bytes"] == 3 * (128 * 80 + 128 * 5)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_in_any_shards(wide: Path, tmp_path: Path, seed: int) -> None:
    """Tensors thrown into shards at random, headers of any length, so that nothing is aligned to anything."""
    rng = random.Random(seed)
    snapshot = tmp_path / "snapshot"
    shutil.copytree(wide, snapshot)
    tensors = list(source_tensors(snapshot).values())
    rng.shuffle(tensors)
    shards: dict[str, list[Tensor]] = {f"x{rng.random()}.safetensors": [] for _ in range(rng.randint(1, 5))}
    for tensor in tensors:
        shards[rng.choice(list(shards))].append(tensor)
    rearrange(snapshot, shards, pad=rng.choice([1, 2, 7, 8]))
    drives = [tmp_path / name for name in rng.sample(["out", "a", "b"], rng.randint(1, 3))]
    shares = ",".join(str(rng.randint(1, 9)) for _ in drives)
    prove(snapshot, tmp_path / "out", "--shares", shares, "--bits", rng.choice([4, 8, 16, 32]), drives=drives)
    prove(snapshot, tmp_path / "in-place", "--in-place")


@pytest.mark.parametrize(
    "change",
    [
        {"shard_names": "odd"}, {"flat_config": True}, {"experts_per_token_key": "num_experts_per_tok"},
        {"flat_config": True, "experts_per_token_key": "num_experts_per_tok"}, {"a_log_padded": False},
        {"a_log_padded": True}, {"vision": False}, {"prefix": ""}, {"shards_per_layer": 4}, {"dense_layers": 0},
        {"dense_layers": 3}, {"experts": 1, "experts_per_token": 1},
    ],
    ids=str,
)  # fmt: skip
def test_every_form_of_a_snapshot(tmp_path: Path, change: dict[str, Any]) -> None:
    snapshot = write_snapshot(dataclasses.replace(SMALL, **change), tmp_path / "snapshot")
    prove(snapshot, tmp_path / "out")


def test_a_snapshot_of_one_file_without_an_index(small: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(small, snapshot)
    rearrange(snapshot, {"model.safetensors": list(source_tensors(small).values())})
    (snapshot / "model.safetensors.index.json").unlink()
    prove(snapshot, tmp_path / "out")
    prove(snapshot, tmp_path / "in-place", "--in-place")


def test_a_snapshot_over_several_directories(tmp_path: Path) -> None:
    snapshot = write_snapshot(SMALL, tmp_path / "s", more_directories=[tmp_path / "t"])
    prove(snapshot, tmp_path / "out", more=[tmp_path / "t"])


def test_a_hugging_face_cache(tmp_path: Path) -> None:
    snapshot = write_snapshot(dataclasses.replace(SMALL, layout="hf_cache"), tmp_path / "hub")
    found = prove(snapshot, tmp_path / "out")
    assert found.manifest["model"]["revision"] == snapshot.name
    blobs = {path.name for path in (tmp_path / "hub" / "models--synthetic--k3" / "blobs").iterdir()}
    assert {shard["sha256"] for shard in found.manifest["source"]["shards"]} <= blobs
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*")), "files are copied, not linked"
    repacked(tmp_path / "hub" / "models--synthetic--k3", tmp_path / "other")
    assert tree(tmp_path / "out") == tree(tmp_path / "other")


def edited(snapshot: Path, target: Path, *, add: Sequence[Tensor] = (), change: dict[str, Tensor] | None = None) -> Path:  # fmt: skip  # noqa: E501
    """Return a copy of a snapshot with tensors more or replaced, in its second shard."""
    shutil.copytree(snapshot, target)
    shards = {path.name: shard_tensors(path) for path in sorted(target.glob("*.safetensors"))}
    name = sorted(shards)[1]
    for shard, tensors in shards.items():
        shards[shard] = [(change or {}).get(tensor.name, tensor) for tensor in tensors]
    shards[name] = [*shards[name], *add]
    rearrange(target, shards)
    return target


def test_vision_is_left_out_and_listed(small: Path, tmp_path: Path) -> None:
    names = vision_names(small)
    assert names
    result = repacked(small, tmp_path / "out")
    assert f"skipped (vision): {len(names)} tensors" in result.output
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["skipped"] == sorted(names)


def test_unknown_tensors_pass_through_and_are_listed(small: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    add = [
        Tensor("language_model.model.layers.1.self_attn.new_bias", "F32", (7,), rng.bytes(28)),
        Tensor("language_model.model.layers.0.strange", "U8", (3, 5), rng.bytes(15)),
        Tensor("language_model.model.layers.1.empty", "F32", (0,), b""),
        Tensor("language_model.model.extra.漢", "I64", (), rng.bytes(8)),
        Tensor("zz", "F16", (2, 0, 4), b""),
        Tensor("aa", "F16", (0,), b""),
    ]
    snapshot = edited(small, tmp_path / "snapshot", add=add)
    names = [tensor.name for tensor in add]
    found = prove(snapshot, tmp_path / "out", unknown=names)
    assert all(found.dense[name] == "raw" for name in names)
    layer = [name for name in found.order if ".layers.1." in name]
    assert set(layer[-2:]) == {names[0], names[2]}, "unknown ones come at the end of their layer"
    prove(snapshot, tmp_path / "in-place", "--in-place", unknown=names)


def test_an_empty_tensor_at_the_end_of_a_shard(small: Path, tmp_path: Path) -> None:
    snapshot = edited(small, tmp_path / "snapshot", add=[Tensor("tail", "BF16", (0, 5), b"")])
    found = prove(snapshot, tmp_path / "out", unknown=["tail"])
    assert found.dense["tail"] == "raw"


def test_a_snapshot_without_dense_tensors(wide: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(wide, snapshot)
    experts = [tensor for tensor in source_tensors(snapshot).values() if ".experts." in tensor.name]
    rearrange(snapshot, {"only.safetensors": experts})
    config = json.loads((snapshot / "config.json").read_text())
    del config["text_config"]["num_hidden_layers"]
    (snapshot / "config.json").write_text(json.dumps(config))
    result = repacked(snapshot, tmp_path / "out", code=3)
    assert "num_hidden_layers is missing" in result.stderr
    shutil.copy(wide / "config.json", snapshot)
    result = repacked(snapshot, tmp_path / "out", code=3)
    assert "the layer has no tensors" in result.stderr
    assert not (tmp_path / "out").exists()


def test_scales_and_odd_numbers_keep_their_bytes(wide: Path, tmp_path: Path) -> None:
    tensors = source_tensors(wide)
    rng = np.random.default_rng(2)
    change = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            change[name] = dataclasses.replace(
                tensor, data=rng.choice(np.array([0, 110, 254, 255], np.uint8), len(tensor.data)).tobytes()
            )
        elif name.endswith("weight_packed") or (tensor.dtype == "BF16" and len(tensor.shape) == 1):
            change[name] = dataclasses.replace(tensor, data=rng.bytes(len(tensor.data)))
    snapshot = edited(wide, tmp_path / "snapshot", change=change)
    prove(snapshot, tmp_path / "out")


def test_extreme_weights_are_quantized_as_defined(small: Path, tmp_path: Path) -> None:
    """Zeros, denormals, the largest numbers, one outlier in a row: all finite bit patterns."""
    change = {}
    rng = np.random.default_rng(3)
    for name, tensor in source_tensors(small).items():
        if name.endswith("_proj.weight") and len(tensor.shape) == 2 and tensor.dtype == "BF16":
            bits = rng.integers(0, 1 << 16, tensor.shape, dtype=np.uint16)
            bits[(bits & 0x7F80) == 0x7F80] = 0x7F7F
            bits[0] = 0
            bits[1 % len(bits)] &= 0x807F
            change[name] = dataclasses.replace(tensor, data=bits.tobytes())
    assert change
    snapshot = edited(small, tmp_path / "snapshot", change=change)
    for width in (8, 4):
        prove(snapshot, tmp_path / f"out{width}", "--bits", width, "--mla-bits", width)


def test_float32_matrices_are_quantized_too(small: Path, tmp_path: Path) -> None:
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    shape = source_tensors(small)[name].shape
    data = np.random.default_rng(4).standard_normal(shape).astype(np.float32).tobytes()
    snapshot = edited(small, tmp_path / "snapshot", change={name: Tensor(name, "F32", shape, data)})
    for bits, encoding in ((8, "int8"), (4, "int4"), (16, "raw"), (32, "raw")):
        found = prove(snapshot, tmp_path / f"out{bits}", "--bits", bits)
        assert found.dense[name] == encoding


def test_wide_rows_and_odd_columns(tmp_path: Path) -> None:
    model = dataclasses.replace(SMALL, hidden=67, dense_inter=131, vocab=521, vision=False)
    snapshot = write_snapshot(model, tmp_path / "snapshot")
    prove(snapshot, tmp_path / "out", "--bits", "4", "--head-bits", "4", "--mla-bits", "4")


@pytest.mark.parametrize(("value", "shown"), [(0x7F80, "inf"), (0xFF80, "-inf"), (0x7FC0, "nan"), (0xFFFF, "nan")])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_is_not_finite_is_refused_by_place(
    small: Path, tmp_path: Path, value: int, shown: str, bits: int
) -> None:
    name = "language_model.model.layers.1.self_attn.o_proj.weight"
    tensor = source_tensors(small)[name]
    weights = np.frombuffer(tensor.data, np.uint16).reshape(tensor.shape).copy()
    row, column = tensor.shape[0] - 3, 5
    weights[row, column] = value
    change = {name: dataclasses.replace(tensor, data=weights.tobytes())}
    snapshot = edited(small, tmp_path / "snapshot", change=change)
    result = repacked(snapshot, tmp_path / "out", "--bits", bits, "--json", code=3)
    error = json.loads(result.stderr.splitlines()[-1])
    assert error["error"] == "QuantizeError"
    assert error["tensor"] == name
    assert error["problem"] == f"the weight in row {row}, column {column} is {shown}: it has no quantized form"
    path = Path(error["path"])
    assert path.parent == snapshot
    assert path.read_bytes()[error["offset"] : error["offset"] + 2] == value.to_bytes(2, "little")
    prove(snapshot, tmp_path / "kept", "--bits", "16", "--mla-bits", "16")


def test_small_files_come_along_and_nothing_else(small: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(small, snapshot)
    (snapshot / "modeling_kimi_k3.py").write_text("# code")
    (snapshot / "LICENSE").write_text("text")
    (snapshot / "empty.txt").write_text("")
    (snapshot / "folder").mkdir()
    (snapshot / "folder" / "x.json").write_text("{}")
    (snapshot / ".gitattributes").write_text("x")
    (snapshot / "pytorch_model.bin").write_text("x")
    (snapshot / "unfinished.partial").write_text("x")
    repacked(snapshot, tmp_path / "out", "--verify-full")
    texts = [entry["path"] for entry in json.loads((tmp_path / "out" / "manifest.json").read_text())["text_files"]]
    assert texts == [
        "LICENSE", "config.json", "empty.txt", "generation_config.json", "modeling_kimi_k3.py", "tiktoken.model",
        "tokenizer_config.json",
    ]  # fmt: skip


def test_a_dangling_small_file_is_named(small: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(small, snapshot)
    (snapshot / "tiktoken.model").unlink()
    (snapshot / "tiktoken.model").symlink_to("../../blobs/gone")
    result = repacked(snapshot, tmp_path / "out", code=3)
    assert "dangling link" in result.output
    assert "tiktoken.model" in result.output
    assert not (tmp_path / "out").exists()
