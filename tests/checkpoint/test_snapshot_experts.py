"""Holds up that experts are complete, alike and told apart, and that only what lies together is read together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base.errors import ExpertError, IndexFileError
from k3.checkpoint.expert_census import ExpertCensus
from k3.checkpoint.expert_table import ExpertTable
from k3.checkpoint.safetensors_header import HeaderTensor
from k3.checkpoint.shard import Shard
from k3.checkpoint.snapshot import Snapshot
from k3.checkpoint.snapshot_checks import check_expert_layers
from k3.model.keys import ExpertLayout, ExpertPart, parse_expert_name
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.attacks.builders import (
    EXPERTS_1,
    MODEL,
    NORM_1,
    SHARD,
    drop,
    edit_map,
    reshard,
    shard_name,
    tensors_of,
    write_tensors,
)

SHARDS = [Shard(name, Path(name), 1000, 0, None) for name in ("a", "b")]


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write_snapshot(MODEL, tmp_path / "snapshot")


PIECES = [
    "m.layers.1.x",
    "m.layers.2.x",
    "layers.02",
    "experts.0",
    "experts.1",
    "experts.٣",
    "experts",
    "shared_experts",
    "w",
]


@settings(max_examples=300)
@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=2, max_size=6).map(".".join), max_size=5, unique=True))
def test_what_is_an_expert_is_decided_as_for_names_everywhere_else(names: list[str]) -> None:
    for first in names:
        census = ExpertCensus(SHARDS)
        for name in (first, *names):
            parsed = parse_expert_name(name)
            try:
                taken = census.add(HeaderTensor(name, "U8", (1,), 0, 1), 0)
            except ExpertError as error:
                refused = error.layer
                assert parsed is not None
                assert parsed.key.layer == refused
                continue
            assert taken == (parsed is not None)
            if parsed is not None:
                rows = census._layers[parsed.key.layer]
                assert rows.prefix == parsed.prefix
                assert rows.experts[-1] == parsed.key.expert
                assert list(rows.kinds)[rows.kind[-1]][0] == parsed.part


def test_runs_join_only_what_follows_in_the_same_file() -> None:
    parts = tuple(ExpertPart(name, "U8", (10,), 10 * place, 10) for place, name in enumerate("pqrs"))
    table = ExpertTable(
        5,
        ExpertLayout("experts", parts),
        np.array([[0, 0, 1, 1]], np.int32),
        np.array([[100, 110, 120, 140]], np.int64),
    )
    runs = [(extent.path.name, extent.offset, extent.payload_bytes) for extent in table.extents(0, SHARDS)]
    assert runs == [("a", 100, 20), ("b", 120, 10), ("b", 140, 10)]


def test_when_votes_are_equal_a_tensor_is_missing_and_not_invented(sound: Path) -> None:
    def break_half(tensors: list[Any]) -> None:
        for expert in (0, 3):
            drop(tensors, f"{EXPERTS_1}{expert}.w3.weight_scale")

    reshard(sound, break_half)
    with pytest.raises(ExpertError, match=r"5 of 6 tensors; w3\.weight_scale is missing") as caught:
        Snapshot.open([sound])
    assert (caught.value.layer, caught.value.expert) == (1, 0)


def test_the_majority_decides_what_is_usual(sound: Path) -> None:
    def break_most(tensors: list[Any]) -> None:
        for expert in (0, 1, 3):
            drop(tensors, f"{EXPERTS_1}{expert}.w3.weight_scale")

    reshard(sound, break_most)
    with pytest.raises(ExpertError, match=r"that the others do not have, w3\.weight_scale") as caught:
        Snapshot.open([sound])
    assert caught.value.expert == 2


def test_layers_that_are_dense_by_frequency_need_no_experts() -> None:
    config = {"num_experts": 4, "first_k_dense_replace": 1, "moe_layer_freq": 2}
    check_expert_layers(range(6), [2, 4], config, Path("config.json"))
    with pytest.raises(ExpertError, match="none of its 4 experts") as caught:
        check_expert_layers(range(6), [2], config, Path("config.json"))
    assert caught.value.layer == 4


def test_a_stray_tensor_of_a_layer_that_was_not_chosen_is_refused_too(sound: Path) -> None:
    # Layer 1 is not wanted, so the shard that the index gives for its norm is not even opened.
    path = sound / shard_name(3)
    write_tensors(path, [*tensors_of(path), (NORM_1, "BF16", [32], bytes(64))])
    (sound / SHARD).unlink()
    with pytest.raises(IndexFileError, match="stale") as caught:
        Snapshot.open([sound], layers=[0, 2])
    assert caught.value.tensor == NORM_1
    edit_map(sound, lambda weight_map: weight_map.update({NORM_1: shard_name(3)}))
    assert NORM_1 not in Snapshot.open([sound], layers=[0, 2]).tensors
