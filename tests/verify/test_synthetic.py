"""Holds up the snapshot generator: what it writes is the published form, byte-deterministic, and sane to run."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from k3.verify.synthetic.__main__ import main
from k3.verify.synthetic.snapshot_writer import (
    Census,
    ShardPlan,
    SyntheticModel,
    TensorValues,
    census,
    shard_plans,
    write_snapshot,
    write_sparse_snapshot,
)
from k3.verify.synthetic.synthetic_tokenizer import rank_bytes
from k3.verify.synthetic.values import STRETCH

VECTORS = Path(__file__).parent.parent / "vectors"
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model")


def header_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def test_the_tiny_snapshot_has_the_golden_snapshots_form_exactly(tmp_path: Path) -> None:
    snapshot = write_snapshot(SyntheticModel.tiny(), tmp_path / "m")
    golden = VECTORS / "tiny_s0"
    assert sorted(p.name for p in snapshot.iterdir()) == sorted(p.name for p in golden.iterdir())
    for path in golden.iterdir():
        written = snapshot / path.name
        assert written.stat().st_size == path.stat().st_size
        if path.suffix == ".safetensors":
            assert header_bytes(written) == header_bytes(path)
        else:
            assert written.read_bytes() == path.read_bytes()


def test_every_tensor_opens_with_the_safetensors_package(tmp_path: Path) -> None:
    snapshot = write_snapshot(SyntheticModel.tiny(seed=3), tmp_path)
    index = json.loads((snapshot / "model.safetensors.index.json").read_text())
    seen = {}
    for shard in sorted(snapshot.glob("*.safetensors")):
        with safe_open(shard, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                assert index["weight_map"][name] == shard.name
                seen[name] = (part.get_dtype(), tuple(part.get_shape()))
                if part.get_dtype() != "BF16":  # NumPy has no bfloat16
                    assert np.isfinite(file.get_tensor(name)).all()
    planned = {t.name: (t.dtype, t.shape) for plan in shard_plans(SyntheticModel.tiny()) for t in plan.tensors}
    assert seen == planned
    assert seen.keys() == index["weight_map"].keys()


def test_a_snapshot_is_a_function_of_its_model(tmp_path: Path) -> None:
    first = files_of(write_snapshot(SyntheticModel.tiny(), tmp_path / "a"))
    assert files_of(write_snapshot(SyntheticModel.tiny(), tmp_path / "b")) == first
    other = files_of(write_snapshot(SyntheticModel.tiny(seed=1), tmp_path / "c"))
    assert {name for name in first if first[name] != other[name]} == {n for n in first if "-of-" in n}


def values_by_name(model: SyntheticModel) -> dict[str, bytes]:
    values = TensorValues(model.seed)
    return {
        t.name: b"".join(bytes(s.data.cast("B")) for s in values.stretches(t))
        for plan in shard_plans(model)
        for t in plan.tensors
    }


def test_a_tensor_depends_on_seed_and_name_alone() -> None:
    one = values_by_name(SyntheticModel.tiny())
    other = values_by_name(SyntheticModel.tiny(layers=6, experts=20, expert_order="scattered", vision=False))
    shared = [name for name in one if name in other and len(one[name]) == len(other[name])]
    attention_of_last = {n for n in shared if ".layers.4." in n}  # full attention only where it is the last
    assert len(shared) > 300
    assert attention_of_last
    assert all(one[name] == other[name] for name in shared)


def test_no_two_experts_share_bytes() -> None:
    experts = [
        data for name, data in values_by_name(SyntheticModel.tiny(experts=64)).items() if "experts." in name
    ]
    assert len(set(experts)) == len(experts)


def test_long_tensors_do_not_repeat() -> None:
    model = SyntheticModel.tiny(vocab=9000, hidden=256)
    (head,) = [t for plan in shard_plans(model) for t in plan.tensors if "lm_head" in t.name]
    stretches = [s.copy() for s in TensorValues(0).stretches(head)]
    assert len(stretches) > 2
    assert all(len(s) == STRETCH for s in stretches[:-1])
    assert sum(map(len, stretches)) == 9000 * 256
    assert (stretches[0] == stretches[1]).mean() < 0.05


def expert_names(plan: ShardPlan) -> list[str]:
    return [t.name.split(".experts.")[1] for t in plan.tensors if ".experts." in t.name]


def runs(items: list[str]) -> list[str]:
    return [item for i, item in enumerate(items) if i == 0 or items[i - 1] != item]


def test_expert_orders() -> None:
    def ids(order: str) -> list[str]:
        plans = list(shard_plans(SyntheticModel.tiny(expert_order=order)))
        return runs([name.split(".")[0] for name in expert_names(plans[2])])

    numbers = [str(n) for n in range(16)]
    assert ids("lexicographic") == sorted(numbers)
    assert ids("id") == numbers
    assert sorted(ids("shuffled")) == sorted(numbers)
    assert ids("shuffled") not in (sorted(numbers), numbers)
    assert len(ids("scattered")) > 60


def test_the_full_models_census_is_the_published_one() -> None:
    counts = census(SyntheticModel.k3())
    assert counts == {
        "routed": Census(494_592, 1_446_456_066_048, 82_432 * 17_547_264),
        "resident": Census(2_460, 56_743_648_000, 113_509_540_864),
        "vision": Census(168, 447_358_976, 894_717_952),
    }
    assert sum(c.nbytes for c in counts.values()) == 1_560_860_324_864


def test_the_full_model_fits_as_holes(tmp_path: Path) -> None:
    snapshot = write_sparse_snapshot(SyntheticModel.k3(), tmp_path)
    sizes = {path.name: path.stat().st_size for path in snapshot.iterdir()}
    assert sizes["config.json"] == 7_006
    assert sizes["generation_config.json"] == 53
    assert sizes["tokenizer_config.json"] == 3_478
    assert sizes["model.safetensors.index.json"] == 59_764_096
    assert sizes["model-00001-of-000096.safetensors"] == 2_341_216_112
    assert sizes["model-00095-of-000096.safetensors"] == 92_289_328
    assert sizes["model-00096-of-000096.safetensors"] == 802_448_352
    assert len([name for name in sizes if name.endswith("-of-000096.safetensors")]) == 96
    assert sum(path.stat().st_blocks * 512 for path in snapshot.iterdir()) < 200_000_000

    header = header_bytes(snapshot / "model-00005-of-000096.safetensors")
    first = min(
        len(header) + entry["data_offsets"][0]
        for name, entry in json.loads(header[8:]).items()
        if ".experts." in name
    )
    assert first == 1_268_562_960  # as published for layer 4


def test_hub_cache_layout(tmp_path: Path) -> None:
    plain = files_of(write_snapshot(SyntheticModel.tiny(), tmp_path / "plain"))
    snapshot = write_snapshot(SyntheticModel.tiny(layout="hf_cache"), tmp_path / "hub")
    repository = snapshot.parent.parent
    assert repository.name == "models--synthetic--k3"
    assert (repository / "refs" / "main").read_text() == snapshot.name
    assert files_of(snapshot) == plain
    for link in snapshot.iterdir():
        target = link.readlink()
        assert target.parts[:3] == ("..", "..", "blobs")
        assert len(target.name) == (64 if link.suffix in (".safetensors", ".model") else 40)
        if link.suffix == ".safetensors":
            assert target.name == hashlib.sha256(link.read_bytes()).hexdigest()
    assert len(list((repository / "blobs").iterdir())) == len(plain)


def test_shards_go_round_several_directories(tmp_path: Path) -> None:
    whole = files_of(write_snapshot(SyntheticModel.tiny(), tmp_path / "whole"))
    places = [tmp_path / name for name in "abc"]
    assert write_snapshot(SyntheticModel.tiny(), places[0], more_directories=places[1:]) == places[0]
    parts = [files_of(place) for place in places]
    assert [len([n for n in part if "-of-" in n]) for part in parts] == [3, 3, 2]
    assert all("config.json" not in part for part in parts[1:])
    assert parts[0] | parts[1] | parts[2] == whole


def test_several_oddly_named_shards_per_layer_hold_the_same_tensors() -> None:
    model = SyntheticModel.tiny(shards_per_layer=3, shard_names="odd")
    plans = list(shard_plans(model))
    assert len(plans) == 18
    assert [plan.name for plan in plans] != sorted(plan.name for plan in plans)
    assert len({plan.name for plan in plans}) == 18
    whole = [t for plan in shard_plans(SyntheticModel.tiny()) for t in plan.tensors]
    assert [t for plan in plans for t in plan.tensors] == whole


def test_config_variants(tmp_path: Path) -> None:
    def read(**changes: Any) -> Any:
        path = write_sparse_snapshot(SyntheticModel.tiny(**changes), tmp_path / repr(changes))
        return json.loads((path / "config.json").read_text())

    nested = read()
    assert read(flat_config=True) == nested["text_config"]
    short = read(experts_per_token_key="num_experts_per_tok")["text_config"]
    assert "num_experts_per_token" not in short
    assert short["num_experts_per_tok"] == 4
    assert nested["text_config"]["linear_attn_config"]["full_attn_layers"] == [4, 5]


def test_a_log_padding() -> None:
    def shape(padded: bool) -> tuple[int, ...]:
        model = SyntheticModel.tiny(a_log_padded=padded)
        (tensor,) = [t for t in next(shard_plans(model)).tensors if t.name.endswith("A_log")]
        return tensor.shape

    assert shape(True) == (128,)
    assert shape(False) == (4,)


def test_weights_have_the_spread_that_keeps_activations_near_one() -> None:
    model = SyntheticModel.real_slice(layers=2, experts=2, vocab=512)
    values = TensorValues(0)
    for tensor in list(shard_plans(model))[1].tensors:
        data = next(values.stretches(tensor))
        if tensor.name.endswith("weight_scale"):
            assert 112 <= data.min() < data.max() <= 122
        elif tensor.name.endswith("weight_packed"):
            magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[data & 7]
            assert 2.0 < np.sqrt(np.mean(np.square(magnitudes))) < 3.0
            assert 0.49 < (data >> 7).mean() < 0.51
        elif tensor.dtype == "BF16" and tensor.shape[0] > 1 and len(tensor.shape) == 2:
            wide = (data.astype(np.uint32) << 16).view(np.float32)
            assert 0.9 < np.sqrt(np.mean(np.square(wide)) * tensor.shape[1]) < 1.6, tensor.name


@pytest.mark.parametrize("vocab", [512, 8192, 40_000])
def test_every_rank_can_be_reached_by_merging(vocab: int) -> None:
    ranks = list(rank_bytes(vocab - 256))
    assert len(set(ranks)) == len(ranks) == vocab - 256
    table = {token: rank for rank, token in enumerate(ranks)}
    assert all(
        any(token[:cut] in table and token[cut:] in table for cut in range(1, len(token))) for token in ranks[256:]
    )
    # With the token's own rank taken away, merging its bytes must end in two parts that the rank would join.
    step = max(1, len(ranks) // (200 if vocab < 40_000 else 40))  # each makes a vocabulary of its own
    for rank in range(256, len(ranks), step):
        lower = dict(list(table.items())[:rank])
        pieces = tiktoken.Encoding("t", pat_str=r"(?s:.+)", mergeable_ranks=lower, special_tokens={})
        assert len(pieces.encode_ordinary(ranks[rank].decode())) == 2


def test_the_rank_file_loads_and_encodes(tmp_path: Path) -> None:
    snapshot = write_sparse_snapshot(SyntheticModel.tiny(vocab=8192), tmp_path)
    lines = (snapshot / "tiktoken.model").read_bytes().splitlines()
    table = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    assert sorted(table.values()) == list(range(8192 - 256))
    encoding = tiktoken.Encoding("t", pat_str=r"\s?\S+|\s+", mergeable_ranks=table, special_tokens={})
    text = "banana sale, ünïcode 漢字"
    assert encoding.decode(encoding.encode_ordinary(text)) == text
    assert len(encoding.encode_ordinary("banana")) == 2


def test_a_snapshot_is_never_overwritten(tmp_path: Path) -> None:
    write_snapshot(SyntheticModel.tiny(), tmp_path)
    with pytest.raises(FileExistsError, match="already holds"):
        write_snapshot(SyntheticModel.tiny(), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"latent": 48},
        {"moe_inter": 33},
        {"experts": 3},
        {"vocab": 511},
        {"expert_order": "random"},
        {"layout": "zip"},
    ],
)
def test_impossible_models_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        SyntheticModel.tiny(**changes)


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(1, 6),
    experts=st.integers(4, 12),
    pieces=st.integers(1, 4),
    order=st.sampled_from(["lexicographic", "id", "shuffled", "scattered"]),
    vision=st.booleans(),
)
def test_shards_hold_every_tensor_once_and_widest_first(
    layers: int, experts: int, pieces: int, order: str, vision: bool
) -> None:
    model = SyntheticModel.tiny(
        layers=layers, experts=experts, shards_per_layer=pieces, expert_order=order, vision=vision
    )
    plans = list(shard_plans(model))
    names = [t.name for plan in plans for t in plan.tensors]
    assert len(set(names)) == len(names)
    for plan in plans:
        widths = [{"F32": 4, "BF16": 2, "U8": 1}[t.dtype] for t in plan.tensors]
        assert widths == sorted(widths, reverse=True)
        header = plan.header()
        assert len(header) % 8 == 0
        table = json.loads(header[8:])
        assert max(entry["data_offsets"][1] for entry in table.values()) == plan.data_bytes


def test_the_command_writes_what_it_says(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main,
        [str(tmp_path / "m"), "--experts", "8", "--layers", "3", "--no-vision", "--sparse", "--json"],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["routed"]["tensors"] == 2 * 8 * 6
    assert report["vision"]["tensors"] == 0
    refused = CliRunner().invoke(main, [str(tmp_path / "n"), "--experts", "2"])
    assert refused.exit_code == 2
    assert "only 2 experts" in refused.output
