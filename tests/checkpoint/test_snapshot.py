"""Holds up snapshots: what lies on disk is what is handed out, byte for byte, whatever the order on disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3 import kernels
from k3.base.errors import DriveError, ExpertError, QuantizeError, ShardError, SourceError
from k3.checkpoint import tensor_reader
from k3.checkpoint.snapshot import Snapshot
from k3.model.keys import Encoding, is_vision, parse_expert_name
from k3.model.tensor_recipe import Recipe
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot, write_sparse_snapshot
from tests.attacks.builders import MODEL, SHARD, edit_json, reshard, shard_name, tensors_of, write_tensors
from tests.support.safetensors_package import deserialize

NVFP4_PARTS = ("w1.input_scale", "w1.weight", "w1.weight_scale", "w1.weight_scale_2", "w2.weight")


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write_snapshot(MODEL, tmp_path / "snapshot")


def everything(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """All tensors of a directory as the safetensors package sees them."""
    found = {}
    for path in directory.glob("*.safetensors"):
        for name, info in deserialize(path.read_bytes()):
            found[name] = (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
    return found


def payload(snapshot: Snapshot, layer: int, expert: int) -> bytes:
    parts = []
    for extent in snapshot.expert_extents(layer, expert):
        assert extent.digest is None
        assert extent.stored_bytes == extent.payload_bytes
        parts.append(extent.path.read_bytes()[extent.offset : extent.end])
    return b"".join(parts)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expert_order": "id"},
        {"expert_order": "shuffled"},
        {"expert_order": "scattered"},
        {"shards_per_layer": 2},
        {"shards_per_layer": 3, "expert_order": "scattered", "shard_names": "odd"},
        {"prefix": "", "flat_config": True, "experts_per_token_key": "num_experts_per_tok"},
        {"vision": True, "a_log_padded": False},
        {"layers": 6, "experts": 11, "dense_layers": 2},
    ],
    ids=str,
)
def test_every_byte_is_found_where_the_snapshot_says(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = SyntheticModel(**{**{name: getattr(MODEL, name) for name in MODEL.__slots__}, **changes})
    directory = write_snapshot(model, tmp_path / "s")
    truth = everything(directory)
    snapshot = Snapshot.open([directory])
    assert snapshot.warnings == ()
    assert snapshot.unknown == ()

    assert len(snapshot.tensors) == len(truth)
    assert set(snapshot.tensors) == set(truth)
    for name, tensor in snapshot.tensors.items():
        assert (tensor.name, tensor.dtype, tensor.shape) == (name, *truth[name][:2])
        raw = snapshot.shards[tensor.shard].path.read_bytes()
        assert raw[tensor.offset : tensor.end] == truth[name][2]
    by_shard = [snapshot.shard_tensors(number) for number in range(len(snapshot.shards))]
    assert sorted(t.name for tensors in by_shard for t in tensors) == sorted(truth)
    for shard, tensors in zip(snapshot.shards, by_shard, strict=True):
        assert tensors[0].offset == shard.header_bytes
        assert [t.end for t in tensors] == [*(t.offset for t in tensors[1:]), shard.size_bytes]

    experts = {name for name in truth if parse_expert_name(name)}
    vision = {name for name in truth if is_vision(name)}
    assert set(snapshot.vision) == vision
    assert set(snapshot.tensor_names()) == truth.keys() - experts - vision
    for name in snapshot.tensor_names():
        assert snapshot.read_tensor(name).data.tobytes() == truth[name][2]

    assert list(snapshot.expert_layers()) == list(range(model.dense_layers, model.layers))
    for layer in snapshot.expert_layers():
        layout = snapshot.expert_layout(layer)
        assert [part.name for part in layout.parts] == sorted(part.name for part in layout.parts)
        assert snapshot.expert_count(layer) == model.experts
        for expert in range(model.experts):
            expected = b"".join(truth[f"{layout.prefix}.{expert}.{part.name}"][2] for part in layout.parts)
            assert payload(snapshot, layer, expert) == expected
            assert len(expected) == layout.payload_bytes
            if model.expert_order != "scattered" and model.shards_per_layer == 1:
                assert len(snapshot.expert_extents(layer, expert)) == 1


def test_names_that_are_not_there_are_not_made_up(sound: Path) -> None:
    snapshot = Snapshot.open([sound])
    prefix = snapshot.expert_layout(1).prefix
    assert f"{prefix}.3.w1.weight_packed" in snapshot.tensors
    for name in (
        "",
        "lm_head.weight",
        f"{prefix}.4.w1.weight_packed",
        f"{prefix}.03.w1.weight_packed",
        f"{prefix}.3.w4",
    ):
        assert name not in snapshot.tensors
    for name in ("lm_head.weight", f"{prefix}.3.w1.weight_packed"):
        with pytest.raises(KeyError):
            snapshot.read_tensor(name)
    for expert in (-1, 4, 10**6):
        with pytest.raises(ExpertError, match="there is no such expert; the layer has 4"):
            snapshot.expert_extents(1, expert)
    with pytest.raises(KeyError):
        snapshot.expert_extents(0, 0)


@pytest.mark.parametrize("rows_bytes", [1, 100, 1 << 30])
def test_tensors_are_stored_by_the_recipe_with_the_bytes_of_the_kernels(
    sound: Path, rows_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "ROWS_BYTES", rows_bytes)
    recipe = Recipe(bits=8, mla_bits=4, head_bits=32)
    raw, stored = Snapshot.open([sound]), Snapshot.open([sound], recipe=recipe)
    seen = set()
    for name in raw.tensor_names():
        before, after = raw.read_tensor(name), stored.read_tensor(name)
        assert before.encoding is Encoding.RAW
        assert after.encoding is stored.encoding(name)
        assert (after.dtype, after.shape) == (before.dtype, before.shape)
        seen.add(after.encoding)
        if after.encoding is Encoding.RAW:
            expected, scales = before.data, None
        elif after.encoding is Encoding.F32:
            expected, scales = kernels.widen_bf16(before.data), None
        elif after.encoding is Encoding.INT8:
            expected, scales = kernels.quantize_int8(before.data)
        else:
            expected, scales = kernels.quantize_int4(before.data)
        np.testing.assert_array_equal(after.data, expected, strict=True)
        if scales is None:
            assert after.scales is None
        else:
            np.testing.assert_array_equal(after.scales, scales, strict=True)
    assert seen == set(Encoding)
    prefix = "language_model.model.layers."
    assert stored.encoding(f"{prefix}2.self_attn.o_proj.weight") is Encoding.INT4
    assert stored.encoding(f"{prefix}1.self_attn.o_proj.weight") is Encoding.INT8


def test_a_weight_that_is_not_finite_is_found_where_it_lies(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "ROWS_BYTES", 100)  # not in the first read
    name = "language_model.model.layers.1.self_attn.q_proj.weight"
    tensor = Snapshot.open([sound]).tensors[name]
    with (sound / SHARD).open("r+b") as file:
        file.seek(tensor.offset + 2 * (17 * 32 + 5))
        file.write(b"\x80\x7f")
    with pytest.raises(QuantizeError, match="row 17, column 5 is inf") as caught:
        Snapshot.open([sound], recipe=Recipe()).read_tensor(name)
    assert caught.value.offset == tensor.offset + 2 * (17 * 32 + 5)
    assert caught.value.tensor == name


def test_experts_of_other_parts_are_taken_as_they_are(sound: Path) -> None:
    prefix = "language_model.model.layers.1.block_sparse_moe.experts."

    def other_parts(tensors: list[Any]) -> None:
        tensors[:] = [tensor for tensor in tensors if not tensor[0].startswith(prefix)]
        for expert in (2, 0, 3, 1):
            for size, part in enumerate(NVFP4_PARTS):
                data = bytes([expert, size]) * (size + 1)
                tensors.append((f"{prefix}{expert}.{part}", "F8_E4M3", [size + 1, 2], data))

    reshard(sound, other_parts)
    snapshot = Snapshot.open([sound])
    assert [part.name for part in snapshot.expert_layout(1).parts] == list(NVFP4_PARTS)
    assert [part.name for part in snapshot.expert_layout(2).parts] != list(NVFP4_PARTS)
    expected = b"".join(bytes([3, size]) * (size + 1) for size in range(5))
    assert payload(snapshot, 1, 3) == expected
    assert len(snapshot.expert_extents(1, 3)) == 1


def test_unknown_tensors_are_listed_and_kept_as_they_are(sound: Path) -> None:
    extra = ("language_model.model.layers.1.self_attn.z_proj.weight", "BF16", [2, 2], bytes(range(8)))
    odd = ("language_model.model.layers.1.mlp.up_proj.weight", "I16", [2, 2], bytes(range(8)))
    reshard(sound, lambda tensors: tensors.extend([extra, odd]))
    snapshot = Snapshot.open([sound], recipe=Recipe())
    assert snapshot.unknown == (extra[0],)
    for name, *_, data in (extra, odd):
        assert snapshot.encoding(name) is Encoding.RAW
        assert snapshot.read_tensor(name).data.tobytes() == data
    assert any(f"{odd[0]} is I16 (2, 2) and is kept as it is" in warning for warning in snapshot.warnings)


def test_one_shard_needs_no_index(sound: Path, tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    shutil.copy(sound / "config.json", single)
    tensors = [tensor for path in sorted(sound.glob("*.safetensors")) for tensor in tensors_of(path)]
    write_tensors(single / "model.safetensors", tensors)
    snapshot = Snapshot.open([single])
    assert snapshot.warnings == ()
    assert set(snapshot.tensors) == set(everything(sound))
    assert payload(snapshot, 1, 2) == payload(Snapshot.open([sound]), 1, 2)


def test_layers_can_be_chosen_and_then_other_shards_need_not_be_there(sound: Path) -> None:
    whole = Snapshot.open([sound])
    (sound / SHARD).unlink()
    with pytest.raises(ShardError):
        Snapshot.open([sound])
    chosen = Snapshot.open([sound], layers=[0, 2])
    assert list(chosen.expert_layers()) == [2]
    assert set(chosen.tensors) == {name for name in whole.tensors if ".layers.1." not in name}
    assert chosen.warnings == ()
    assert payload(chosen, 2, 3) == payload(whole, 2, 3)
    assert chosen.identity != whole.identity
    with pytest.raises(SourceError, match="no such layer to choose") as caught:
        Snapshot.open([sound], layers=[0, 7])
    assert caught.value.layer == 7
    none = Snapshot.open([sound], layers=[])
    assert all(".layers." not in name for name in none.tensors)


def test_layers_beyond_the_configuration_are_mentioned(sound: Path) -> None:
    edit_json(sound / "config.json", lambda config: config["text_config"].update(num_hidden_layers=2))
    (warning,) = Snapshot.open([sound]).warnings
    assert "layers [2] are beyond the 2 of" in warning


def test_the_identity_is_that_of_the_weights_not_of_the_place(sound: Path, tmp_path: Path) -> None:
    snapshot = Snapshot.open([sound])
    assert snapshot.identity.weights.startswith("snapshot:")
    shutil.copytree(sound, tmp_path / "copy")
    assert Snapshot.open([tmp_path / "copy"]).identity == snapshot.identity
    assert Snapshot.open([sound], recipe=Recipe()).identity != snapshot.identity
    assert (
        Snapshot.open([sound], recipe=Recipe(bits=4)).identity != Snapshot.open([sound], recipe=Recipe()).identity
    )
    edit_json(tmp_path / "copy" / "config.json", lambda config: config.update(note=1))
    assert Snapshot.open([tmp_path / "copy"]).identity != snapshot.identity
    other = write_snapshot(
        SyntheticModel(**{**{n: getattr(MODEL, n) for n in MODEL.__slots__}, "seed": 1}), tmp_path / "o"
    )
    assert Snapshot.open([other]).identity != snapshot.identity


def test_small_files_are_found_and_a_dangling_one_is_not_taken_for_none(sound: Path) -> None:
    snapshot = Snapshot.open([sound])
    assert snapshot.text_file("tiktoken.model") == sound / "tiktoken.model"
    assert snapshot.text_file("chat_template.jinja") is None
    (sound / "chat_template.jinja").symlink_to("gone")
    with pytest.raises(SourceError, match="dangling link: its target gone"):
        snapshot.text_file("chat_template.jinja")


def test_each_shard_is_opened_once_and_nothing_stays_open(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = os.open

    def counting(path: Any, *rest: Any, **named: Any) -> int:
        opened.append(Path(path).name)
        return real(path, *rest, **named)

    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(os, "open", counting)
    Snapshot.open([sound])
    shards = [name for name in opened if name.endswith(".safetensors")]
    assert sorted(shards) == [shard_name(number) for number in (1, 2, 3, 4)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("code", "phrase"), [(errno.EACCES, "permissions"), (errno.EIO, "smartctl"), (errno.EMFILE, "ulimit -n")]
)
def test_what_the_system_refuses_names_the_file(
    sound: Path, code: int, phrase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, *rest: Any, **named: Any) -> int:
        if Path(path).name == SHARD:
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(DriveError) as caught:
        Snapshot.open([sound])
    assert caught.value.path == str(sound / SHARD)
    assert os.strerror(code) in caught.value.problem
    assert phrase in (caught.value.advice or "")


def test_a_failing_read_names_file_and_offset(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot.open([sound])
    tensor = snapshot.tensors["language_model.lm_head.weight"]

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(DriveError) as caught:
        snapshot.read_tensor(tensor.name)
    assert caught.value.path == str(sound / shard_name(4))
    assert caught.value.offset == tensor.offset


def test_short_reads_are_continued_and_an_early_end_is_never_zeros(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    expected = {name: data for name, (_, _, data) in everything(sound).items()}

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        return real(descriptor, [memoryview(buffers[0])[:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    snapshot = Snapshot.open([sound])
    name = "language_model.model.norm.weight"
    assert snapshot.read_tensor(name).data.tobytes() == expected[name]
    tensor = snapshot.tensors[name]
    os.truncate(sound / shard_name(4), tensor.end - 1)
    with pytest.raises(ShardError, match="ends 1 bytes too early") as caught:
        snapshot.read_tensor(name)
    assert caught.value.offset == tensor.end - 1


MEASURE = """
import json, resource, sys
from pathlib import Path
from k3.checkpoint.snapshot import Snapshot
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
snapshot = Snapshot.open([Path(sys.argv[1])])
held_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([len(snapshot.tensors), len(snapshot.expert_layers()), held_bytes, peak_bytes]))
"""


@pytest.mark.campaign
def test_the_whole_of_k3_opens_in_little_memory_and_few_descriptors(tmp_path: Path) -> None:
    directory = write_sparse_snapshot(SyntheticModel.k3(), tmp_path / "k3")
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(directory)], capture_output=True, text=True, check=True
    )
    tensors, layers, held_bytes, peak_bytes = json.loads(result.stdout)
    assert (tensors, layers) == (497_220, 92)
    assert held_bytes < 450e6
    assert peak_bytes < 700e6
