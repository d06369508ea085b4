"""Holds up that failures which users of other programs met in silence are refused, or done right, here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3 import kernels
from k3.base.errors import (
    ConfigError,
    ExpertError,
    HeaderError,
    IndexFileError,
    K3Error,
    ShardError,
    SourceError,
)
from k3.checkpoint.safetensors_header import build_header
from k3.checkpoint.snapshot import Snapshot
from k3.model.model_config import text_config
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.attacks import ATTACKS
from tests.attacks.builders import (
    EXPERTS_1,
    INDEX,
    MODEL,
    NORM_1,
    SHARD,
    edit_header,
    edit_json,
    edit_map,
    fields_of,
    offset_of,
    reshard,
    shard_name,
    split,
)

BY_NAME = {attack.name: attack for attack in ATTACKS}


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write_snapshot(MODEL, tmp_path / "snapshot")


def refused(directory: Path, *attacks: str) -> list[K3Error]:
    """Carry out each attack on a copy of its own; the errors that opening them raises."""
    errors = []
    for name in attacks:
        path = BY_NAME[name].make(directory, directory.parent / name / "snapshot")
        with pytest.raises(BY_NAME[name].error) as caught:
            Snapshot.open([path])
        errors.append(caught.value)
    return errors


def with_changes(**changes: Any) -> SyntheticModel:
    return SyntheticModel(**{**{name: getattr(MODEL, name) for name in MODEL.__slots__}, **changes})


# --- headers and indexes ---


def test_a_shard_that_is_short_is_refused_with_the_bytes_it_lacks(sound: Path) -> None:
    path = sound / SHARD
    path.write_bytes(path.read_bytes()[:-1024])
    with pytest.raises(ShardError) as caught:
        Snapshot.open([sound])
    assert caught.value.problem.startswith("1024 bytes are missing")
    assert caught.value.path == str(path)
    assert "incomplete" in (caught.value.advice or "")


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_shard_named_by_the_index_and_not_there_is_refused(sound: Path, number: int) -> None:
    (sound / shard_name(number)).unlink()
    with pytest.raises(ShardError, match=INDEX) as caught:
        Snapshot.open([sound])
    assert caught.value.path == str(sound / shard_name(number))


def test_a_missing_shard_of_quantized_weights_is_refused_too(sound: Path) -> None:
    assert any("weight_packed" in name for name in fields_of(sound / shard_name(3)))
    (sound / shard_name(3)).unlink()
    with pytest.raises(ShardError, match="does not exist"):
        Snapshot.open([sound])


def test_a_stray_shard_with_other_weights_changes_nothing(sound: Path) -> None:
    before = Snapshot.open([sound]).read_tensor(NORM_1).data
    for name in ("model.safetensors", "0.safetensors", "zzz.safetensors"):
        header = build_header([(NORM_1, "BF16", (32,))])
        (sound / name).write_bytes(header + bytes(64))
    snapshot = Snapshot.open([sound])
    assert len(snapshot.warnings) == 3
    np.testing.assert_array_equal(snapshot.read_tensor(NORM_1).data, before)


def test_an_index_with_old_names_is_called_stale(sound: Path) -> None:
    (error,) = refused(sound, "index_with_old_names")
    assert "stale" in error.problem
    edit_map(sound, lambda m: [m.update({name: f"old-{shard}"}) for name, shard in list(m.items())])
    with pytest.raises(ShardError, match="does not exist"):  # the shards were renamed, not the tensors
        Snapshot.open([sound])


def test_a_tensor_in_two_shards_is_refused_naming_both(sound: Path) -> None:
    for error in refused(sound, "tensor_in_two_shards", "tensor_in_earlier_shard"):
        assert error.tensor == NORM_1
        assert SHARD in str(error)
        assert any(shard_name(number) in str(error) for number in (1, 3))


def test_shards_are_counted_by_the_index_not_by_what_lies_there(sound: Path) -> None:
    (sound / SHARD).rename(sound / "consolidated.safetensors")
    assert len(list(sound.glob("*.safetensors"))) == 4
    with pytest.raises(ShardError, match="does not exist"):
        Snapshot.open([sound])


def test_a_tensor_of_no_elements_is_legal_and_one_element_without_bytes_is_not(sound: Path) -> None:
    reshard(sound, lambda tensors: tensors.insert(1, ("extra", "F32", [0], b"")))
    snapshot = Snapshot.open([sound])
    assert snapshot.read_tensor("extra").data.shape == (0,)
    edit_header(sound, lambda fields: fields["extra"].update(shape=[1]))
    with pytest.raises(HeaderError, match="span 0 bytes, but F32 \\(1,\\) needs 4") as caught:
        Snapshot.open([sound])
    assert caught.value.tensor == "extra"


def test_a_header_with_its_metadata_outside_of_the_object_is_refused_clearly(sound: Path) -> None:
    (error,) = refused(sound, "metadata_outside")
    assert "not JSON" in error.problem
    assert error.offset == 8 + 2


def test_a_header_padded_with_nul_is_refused_with_the_reason(sound: Path) -> None:
    (error,) = refused(sound, "nul_padding")
    assert "NUL" in error.problem
    assert error.offset == 8 + len(split(sound / SHARD)[0])


@pytest.mark.parametrize(
    "attack", ["length_one_billion", "length_all_ones", "length_above_cap", "length_below_cap"]
)
def test_a_header_length_is_bounded_before_it_is_believed(sound: Path, attack: str) -> None:
    (error,) = refused(sound, attack)
    assert "100000000" in error.problem or "ends inside its header" in error.problem


def test_two_bytes_for_two_floats_are_called_an_incomplete_download(sound: Path) -> None:
    (error,) = refused(sound, "cut_small_tensor")
    assert "6 bytes are missing" in error.problem
    assert "download is incomplete" in (error.advice or "")
    assert error.tensor == "w"


@pytest.mark.parametrize(
    "attack", ["offsets_reversed", "beyond_the_end", "overlap", "offsets_negative", "same_bytes_twice"]
)
def test_offsets_are_checked(sound: Path, attack: str) -> None:
    (error,) = refused(sound, attack)
    assert error.tensor
    assert error.path is not None
    assert error.path.endswith(SHARD)


def test_a_dtype_of_unknown_size_is_refused_not_skipped(sound: Path) -> None:
    (error,) = refused(sound, "dtype_unknown")
    assert "F4" in error.problem


def test_bytes_that_do_not_fit_the_shape_are_refused(sound: Path) -> None:
    for error in refused(
        sound, "offsets_too_wide", "offsets_too_narrow", "shape_overflow", "shape_overflow_to_size"
    ):
        assert error.tensor == NORM_1


@pytest.mark.parametrize("attack", ["four_bytes", "length_all_ones", "array_header", "header_without_data"])
def test_the_smallest_broken_files_are_refused(sound: Path, attack: str) -> None:
    assert refused(sound, attack)


# --- experts and format ---


def test_experts_stored_out_of_order_are_found_by_their_numbers(sound: Path) -> None:
    def swap(tensors: list[Any]) -> None:
        experts = [tensor for tensor in tensors if tensor[0].startswith(EXPERTS_1)]
        rest = [tensor for tensor in tensors if not tensor[0].startswith(EXPERTS_1)]
        by_id = {number: [t for t in experts if t[0].startswith(f"{EXPERTS_1}{number}.")] for number in range(4)}
        tensors[:] = [*rest, *by_id[2], *by_id[0], *by_id[3], *by_id[1]]

    before = [payload(Snapshot.open([sound]), number) for number in range(4)]
    reshard(sound, swap)
    snapshot = Snapshot.open([sound])
    assert [payload(snapshot, number) for number in range(4)] == before
    offsets = [snapshot.expert_extents(1, number)[0].offset for number in range(4)]
    assert sorted(range(4), key=offsets.__getitem__) == [2, 0, 3, 1]


def test_the_tensors_of_an_expert_may_lie_apart(sound: Path) -> None:
    def interleave(tensors: list[Any]) -> None:
        tensors.sort(key=lambda tensor: (tensor[0].split(".")[-2:], tensor[0]))

    before = [payload(Snapshot.open([sound]), number) for number in range(4)]
    reshard(sound, interleave)
    snapshot = Snapshot.open([sound])
    assert [payload(snapshot, number) for number in range(4)] == before
    assert len(snapshot.expert_extents(1, 0)) == 6


def payload(snapshot: Snapshot, expert: int) -> bytes:
    runs = snapshot.expert_extents(1, expert)
    return b"".join(run.path.read_bytes()[run.offset : run.end] for run in runs)


@pytest.mark.parametrize("expert", [-1, 4, 896])
def test_an_expert_that_is_not_there_is_an_error_and_never_zeros(sound: Path, expert: int) -> None:
    with pytest.raises(ExpertError) as caught:
        Snapshot.open([sound]).expert_extents(1, expert)
    assert (caught.value.layer, caught.value.expert) == (1, expert)


def test_scale_bytes_at_the_limits_are_kept_and_read_as_the_format_says(sound: Path) -> None:
    name = f"{EXPERTS_1}0.w1.weight_scale"
    extremes = bytes([0, 110, 254, 255])
    with (sound / SHARD).open("r+b") as file:
        file.seek(offset_of(sound, name))
        file.write(extremes)
    snapshot = Snapshot.open([sound])
    part = snapshot.expert_layout(1).part("w1.weight_scale")
    assert payload(snapshot, 0)[part.offset : part.offset + 4] == extremes
    ones = np.full((3, 16), 0x22, np.uint8)
    values = kernels.dequantize_mxfp4(ones, np.array([[0], [110], [254]], np.uint8))
    np.testing.assert_array_equal(values[:, 0], np.float32(2.0) ** np.array([-127, -17, 127], np.float32))
    with pytest.raises(ValueError, match="255"):
        kernels.dequantize_mxfp4(ones[:1], np.array([[255]], np.uint8))


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("key", ["num_experts_per_token", "num_experts_per_tok"])
def test_both_spellings_are_read_nested_and_flat(tmp_path: Path, flat: bool, key: str) -> None:
    model = with_changes(flat_config=flat, experts_per_token_key=key)
    snapshot = Snapshot.open([write_snapshot(model, tmp_path / "s")])
    assert ("text_config" in snapshot.config) is not flat
    assert snapshot.text["num_experts_per_token"] == 2
    assert snapshot.text["hidden_size"] == 32


def test_two_spellings_with_two_values_are_refused() -> None:
    for raw in (
        {"num_experts_per_token": 16, "num_experts_per_tok": 8},
        {"text_config": {"num_experts_per_token": 16}, "num_experts_per_tok": 8},
    ):
        with pytest.raises(ConfigError, match="num_experts_per_token is 16 but num_experts_per_tok is 8"):
            text_config(raw, Path("config.json"))


@pytest.mark.parametrize("padded", [True, False])
def test_a_log_may_be_padded_but_only_with_zeros(tmp_path: Path, padded: bool) -> None:
    directory = write_snapshot(with_changes(a_log_padded=padded), tmp_path / "s")
    name = "language_model.model.layers.1.self_attn.A_log"
    assert Snapshot.open([directory]).read_tensor(name).shape == ((128,) if padded else (2,))
    if padded:
        with (directory / SHARD).open("r+b") as file:
            file.seek(offset_of(directory, name) + 4 * 127)
            file.write(b"\0\0\0\x80")  # minus zero is no padding either
        with pytest.raises(SourceError, match="padding behind the 2 heads is not zero") as caught:
            Snapshot.open([directory])
        assert caught.value.offset == offset_of(directory, name) + 4 * 127 + 3


def test_there_is_no_limit_of_512_experts(tmp_path: Path) -> None:
    snapshot = Snapshot.open([write_snapshot(with_changes(layers=2, experts=896), tmp_path / "s")])
    assert snapshot.expert_count(1) == 896
    assert len(payload(snapshot, 895)) == snapshot.expert_layout(1).payload_bytes


# --- shapes of a download ---


def test_a_link_with_a_wrong_base_is_named_with_its_target(sound: Path) -> None:
    blob = sound.parent / "blobs" / SHARD
    blob.parent.mkdir()
    shutil.move(sound / SHARD, blob)
    (sound / SHARD).symlink_to(f"blobs/{SHARD}")  # right from the folder above, wrong from the link's own
    with pytest.raises(ShardError) as caught:
        Snapshot.open([sound])
    assert caught.value.path == str(sound / SHARD)
    assert f"blobs/{SHARD}" in caught.value.problem


def test_a_link_is_used_under_its_own_name_even_if_it_leaves_the_directory(sound: Path, tmp_path: Path) -> None:
    blob = tmp_path / "elsewhere" / "blobs" / (64 * "b")
    blob.parent.mkdir(parents=True)
    shutil.move(sound / SHARD, blob)
    (sound / SHARD).symlink_to(blob)
    shard = Snapshot.open([sound]).shards[1]
    assert shard.name == shard.path.name == SHARD
    assert shard.path.parent == sound
    assert shard.blob_sha256 == 64 * "b"


def test_dangling_links_and_empty_files_are_told_apart(sound: Path) -> None:
    dangling, empty = refused(sound, "dangling_link", "empty_file")
    assert "dangling" in dangling.problem
    assert "empty" in empty.problem


def test_folders_are_not_compared(sound: Path) -> None:
    for name in ("figures", "original", "deep/er"):
        (sound / name).mkdir(parents=True)
        shutil.copy(sound / SHARD, sound / name)
    assert Snapshot.open([sound]).warnings == ()


def test_an_index_that_says_more_than_the_shards_is_refused_even_with_a_true_total(sound: Path) -> None:
    edit_json(sound / INDEX, lambda index: index["weight_map"].update(extra=SHARD))
    with pytest.raises(IndexFileError, match="stale"):
        Snapshot.open([sound])
