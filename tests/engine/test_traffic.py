"""Holds up the accounting behind "of memory": each kind of byte counted by hand for a tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from k3.engine.forward.state import KdaState, MlaState
from k3.engine.report.bytes_per_pass import Traffic, chunk_sizes, parameter_count
from k3.engine.run.session import Session
from k3.model.architecture import ModelConfig
from tests.support.engines import golden, loaded, snapshot


def traffic(layers: str | None = None) -> Traffic:
    config = ModelConfig.from_raw(snapshot().config, Path("config.json"))
    return Traffic(config if layers is None else config.truncated(layers), 1_000_000, 100, 10_000)


def test_a_token_reads_weights_its_row_its_experts_states_and_caches() -> None:
    model = traffic()
    kda, mla = 3, 2  # layers of the golden model
    assert (len(model.config.kda_layers), len(model.config.layers)) == (kda, kda + mla)
    with loaded(snapshot()) as engine:
        state = Session(engine, 7 + 1, 1).state
    states = [layer for layer in state.layers.values() if isinstance(layer, KdaState)]
    caches = [layer for layer in state.layers.values() if isinstance(layer, MlaState)]
    held = sum(layer.memory.nbytes + layer.windows.nbytes for layer in states)
    rows = sum(layer.latent[:8].nbytes + layer.rope[:8].nbytes for layer in caches)
    assert model.pass_bytes(1, 7, 16) == 1_000_000 + 100 + 160_000 + 2 * held + rows


def test_a_chunk_reads_everything_once() -> None:
    model = traffic()
    alone, together = model.run_bytes([1] * 8, 0, 40), model.run_bytes([8], 0, 40)
    assert together < alone / 4
    assert together == model.pass_bytes(8, 0, 40)
    assert model.run_bytes([3, 5], 2, 0) == model.pass_bytes(3, 2, 0) + model.pass_bytes(5, 5, 0)


def test_layers_without_a_kind_of_attention_have_none_of_its_bytes() -> None:
    model = traffic("1")  # KDA alone
    assert model.pass_bytes(1, 0, 0) == model.pass_bytes(1, 1000, 0)


@pytest.mark.parametrize(("tokens", "chunk", "wanted"), [(5, 2, [2, 2, 1]), (4, 4, [4]), (1, 64, [1]), (0, 3, [])])
def test_chunks(tokens: int, chunk: int, wanted: list[int]) -> None:
    assert chunk_sizes(tokens, chunk) == wanted


def test_parameters_are_what_is_stored() -> None:
    source = snapshot()
    config = ModelConfig.from_raw(source.config, Path("config.json"))
    dense = sum(int(np.prod(source.tensors[name].shape)) for name in source.tensor_names())
    padding = sum(
        source.tensors[name].shape[0] - config.kda.heads
        for name in source.tensor_names()
        if name.endswith("A_log")
    )
    experts = sum(
        source.expert_count(layer) * 2 * part.nbytes
        for layer in source.expert_layers()
        for part in source.expert_layout(layer).parts
        if part.name.endswith("weight_packed")
    )
    assert parameter_count(config) == dense - padding + experts


def test_the_embeddings_are_told_apart() -> None:
    with loaded(snapshot("tiny_s1", 8)) as model:
        rows = model.config.vocab
        assert model.embedding_bytes % rows == 0
        assert 0 < model.embedding_bytes < model.resident_bytes
    assert golden("tiny_s1")["logits"].shape[1] == rows
