"""Holds up that what a run would ask is asked before a byte is written, and that float16 goes all the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.engines import VECTORS as ALL_VECTORS
from tests.support.repacked import SMALL, changed, repacked, source_tensors

VECTORS = ALL_VECTORS / "tiny_s0"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(SMALL, tmp_path_factory.mktemp("small") / "snapshot")


def halves(snapshot: Path, target: Path) -> Path:
    """Return the same snapshot with every BF16 tensor of the text model in F16."""
    change: dict[str, object] = {}
    for name, tensor in source_tensors(snapshot).items():
        if tensor.dtype == "BF16" and name.startswith("language_model."):
            wide = (np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            change[name] = {"dtype": "F16", "data": wide.astype(np.float16).tobytes()}
    assert len(change) > 40
    return changed(snapshot, target, change)


@pytest.mark.parametrize("bits", ["4", "8", "16", "32"])
def test_float16_is_taken_at_every_width(small: Path, tmp_path: Path, bits: str) -> None:
    snapshot = halves(small, tmp_path / "snapshot")
    options = ["--bits", bits, "--mla-bits", bits, "--head-bits", bits]
    result = repacked(snapshot, tmp_path / "out", *options, "--verify-full")
    assert "EQUAL" in result.output


def test_scales_may_be_called_by_their_newer_name(small: Path, tmp_path: Path) -> None:
    change: dict[str, object] = {
        name: {"dtype": "F8_E8M0"} for name in source_tensors(small) if name.endswith("weight_scale")
    }
    snapshot = changed(small, tmp_path / "snapshot", change)
    result = repacked(snapshot, tmp_path / "out", "--verify-full")
    assert "EQUAL" in result.output
    files = sorted((tmp_path / "out" / "experts").iterdir())
    assert files
    assert all(b'"F8_E8M0"' in path.read_bytes() for path in files)


def test_odd_experts_are_named_as_published(small: Path, tmp_path: Path) -> None:
    names = [name for name in source_tensors(small) if ".experts.2." in name]
    layer = min(name.split(".layers.")[1].split(".")[0] for name in names)
    scale = next(name for name in names if f".layers.{layer}." in name and name.endswith("w1.weight_scale"))
    packed = next(name for name in names if f".layers.{layer}." in name and name.endswith("w3.weight_packed"))
    tensors = source_tensors(small)
    change: dict[str, object] = {
        scale: {"data": b"\xff" + tensors[scale].data[1:]},
        packed: {"data": bytes(len(tensors[packed].data))},
    }
    snapshot = changed(small, tmp_path / "snapshot", change)
    for more in ([], ["--in-place"]):
        result = repacked(snapshot, tmp_path / f"out{len(more)}", *more)
        assert f"layer {layer} expert 2 (w1.weight_scale has the byte 255" in result.stderr
        assert "w3.weight_packed is all zeros" in result.stderr
        assert "all zeros" not in repacked(small, tmp_path / f"sound{len(more)}", *more).stderr


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_a_model_without_a_vocabulary_is_noted(tmp_path: Path, name: str) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(VECTORS, snapshot)
    (snapshot / name).unlink()
    said = f"there is no {name}: k3-run will take token ids only, no text"
    assert said in repacked(snapshot, tmp_path / "plan", "--plan").output
    assert said in repacked(snapshot, tmp_path / "out").stderr


def test_what_only_this_engine_cannot_run_is_noted(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(VECTORS, snapshot)
    config = json.loads((snapshot / "config.json").read_text())
    config["text_config"]["hidden_act"] = "silu"
    (snapshot / "config.json").write_text(json.dumps(config))
    result = repacked(snapshot, tmp_path / "out", "--layers", "0-1")
    assert "k3-run cannot run this model: config key hidden_act is 'silu'" in result.stderr


def test_some_layers_are_a_model_of_those_layers(tmp_path: Path) -> None:
    result = repacked(VECTORS, tmp_path / "out", "--layers", "1,3")
    assert "note: k3-run" not in result.stderr
