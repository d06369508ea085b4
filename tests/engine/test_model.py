"""Holds up that the engine computes what the makers' own code computes: logits, layers, states, greedy ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from k3.engine.definition.model_options import ModelOptions
from k3.engine.forward.model import Model
from k3.engine.forward.state import KdaState, MlaState, State
from k3.engine.run.session import Session
from k3.engine.run.trace_observers import LastRouting
from k3.model.architecture import ModelConfig
from k3.store.lending.file_source import FileSource
from k3.verify.reference.forward import ReferenceModel
from tests.support.engines import GOLDEN_REL_L2, Array, all_logits, golden, loaded, loaded_model, rel_l2, snapshot

LAYER_REL_L2 = 2e-6
"""One layer from its golden input: there is little room to drift in."""


@pytest.fixture(scope="module", params=["tiny_s0", "tiny_s1"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Iterator[Model]:
    with loaded(snapshot(name)) as model:
        yield model


@pytest.fixture(scope="module")
def truth(name: str) -> dict[str, Array]:
    return golden(name)


def test_logits(model: Model, truth: dict[str, Array]) -> None:
    assert rel_l2(all_logits(model, truth["input_ids"], 64), truth["logits"]) <= GOLDEN_REL_L2


def test_logits_across_the_chunks_of_the_original() -> None:
    truth = golden("tiny_s1_long")
    with loaded(snapshot("tiny_s1")) as model:
        assert rel_l2(all_logits(model, truth["input_ids"], 48), truth["logits"]) <= GOLDEN_REL_L2


def test_greedy_ids(model: Model, truth: dict[str, Array]) -> None:
    wanted = truth["greedy_ids"].tolist()
    session = Session(model, len(truth["input_ids"]) + len(wanted), 7)
    row = session.prefill(truth["input_ids"].tolist())
    found = []
    for _ in wanted:
        found.append(int(np.argmax(row)))
        row = session.step(found[-1])
    assert found == wanted


def test_each_half_of_each_layer(model: Model, truth: dict[str, Array]) -> None:
    state = State(model.config, len(truth["input_ids"]))
    for layer in model.layers:
        attended = layer.attend(truth["attn_mix"][layer.index], state)
        assert rel_l2(attended, truth["attn_out"][layer.index]) <= LAYER_REL_L2
        transformed = layer.transform(truth["mlp_mix"][layer.index])
        assert rel_l2(transformed, truth["mlp_out"][layer.index]) <= LAYER_REL_L2


def test_embedding_and_mixtures(model: Model, truth: dict[str, Array]) -> None:
    stream = model.embed(truth["input_ids"].tolist())
    assert np.array_equal(stream, truth["attn_mix"][0])
    blocks: list[Array] = []
    for index, layer in enumerate(model.layers):
        assert rel_l2(layer.attention_mix(blocks, stream), truth["attn_mix"][index]) <= LAYER_REL_L2
        if layer.starts_block:
            blocks.append(truth["block_residual"][len(blocks)])
        attended = truth["attn_out"][index]
        middle = attended if layer.starts_block else stream + attended
        assert rel_l2(layer.mlp_mix(blocks, middle), truth["mlp_mix"][index]) <= LAYER_REL_L2
        stream = truth["layer_out"][index]
    assert rel_l2(model.logits(blocks, stream), truth["logits"]) <= LAYER_REL_L2


def test_routing(model: Model, truth: dict[str, Array]) -> None:
    for layer in model.layers[1:]:
        seen = LastRouting()
        layer.transform(truth["mlp_mix"][layer.index], seen.experts_requested)
        routing = seen.routing[layer.index]
        assert np.array_equal(routing.experts, truth[f"router_idx_l{layer.index}"])
        assert rel_l2(routing.weights, truth[f"router_w_l{layer.index}"]) <= 1e-6


def test_states_after_the_prompt(model: Model, truth: dict[str, Array]) -> None:
    tokens = len(truth["input_ids"])
    session = Session(model, tokens + 5, 10)
    session.prefill(truth["input_ids"].tolist())
    for index, state in session.state.layers.items():
        if isinstance(state, KdaState):
            assert rel_l2(state.memory, truth[f"kda_state_l{index}"]) <= GOLDEN_REL_L2
            for stream, window in zip("qkv", state.windows, strict=True):
                last_three = truth[f"kda_conv_{stream}_l{index}"][:, 1:]
                assert rel_l2(window.T, last_three) <= GOLDEN_REL_L2
        else:
            assert isinstance(state, MlaState)
            assert rel_l2(state.latent[:tokens], truth[f"mla_latent_l{index}"]) <= GOLDEN_REL_L2
            assert rel_l2(state.rope[:tokens], truth[f"mla_rope_l{index}"]) <= GOLDEN_REL_L2
            assert not state.latent[tokens:].any()


def test_the_latent_epsilon_is_the_published_one(truth: dict[str, Array], name: str) -> None:
    source = snapshot(name)
    config = ModelConfig.from_raw(source.config, Path("config.json")).with_mla_eps(1e-5)
    with contextlib.closing(FileSource(source)) as experts:
        changed = loaded_model(source, config, experts, ModelOptions(exact=True))
        distance = rel_l2(all_logits(changed, truth["input_ids"], 64), truth["logits"])
    assert 1e-3 < distance < 5e-2


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_agree_with_the_reference(bits: int) -> None:
    """Exact arithmetic on quantized weights: the same model, not the same bits. Random nets amplify."""
    source = snapshot("tiny_s1", bits)
    ids = golden("tiny_s1")["input_ids"]
    reference = ReferenceModel(source)
    wanted = reference.forward(ids.tolist(), reference.new_state())
    with loaded(source) as model:
        assert rel_l2(all_logits(model, ids, 64), wanted) <= GOLDEN_REL_L2


@pytest.mark.parametrize("layers", ["1", "3", "2-4"])
def test_truncated_models_are_the_reference_truncated(layers: str) -> None:
    """The first layers are those of the golden run; a range begins with an embedding as its stream."""
    truth = golden("tiny_s1")
    with loaded(snapshot("tiny_s1"), layers=layers) as model:
        stream = model.embed(truth["input_ids"].tolist())
        blocks: list[Array] = []
        state = State(model.config, len(stream))
        for layer in model.layers:
            stream = model.through(layer, blocks, stream, state)
        if model.config.layers.start == 0:
            assert rel_l2(stream, truth["layer_out"][model.config.layers.stop - 1]) <= GOLDEN_REL_L2
        assert np.array_equal(model.logits(blocks, stream), all_logits(model, truth["input_ids"], 5))
