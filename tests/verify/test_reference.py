"""Holds up the NumPy reference model: Moonshot's own numbers come out, and would not if a detail were wrong."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.checkpoint.snapshot import Snapshot
from k3.verify.reference import attention, forward, mlp, reference_weights
from k3.verify.reference.arithmetic import causal_conv, dequantize_mxfp4, rms_norm
from k3.verify.reference.forward import (
    KdaState,
    MlaState,
    ReferenceModel,
    ReferenceState,
    Taps,
)
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot

VECTORS = Path(__file__).parent.parent / "vectors"
NAMES = ("tiny_s0", "tiny_s1")
RELATIVE_L2_MAX = 2e-5

Golden = dict[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One golden prompt through the reference model, all at once."""

    model: ReferenceModel
    golden: Golden
    ids: list[int]
    state: ReferenceState
    taps: Taps


@functools.cache
def run(name: str) -> Run:
    golden = load(name)
    model = ReferenceModel(Snapshot.open([VECTORS / name]))
    ids = [int(i) for i in golden["input_ids"]]
    state, taps = model.new_state(), Taps()
    model.forward(ids, state, taps)
    return Run(model, golden, ids, state, taps)


def load(name: str) -> Golden:
    with np.load(VECTORS / f"{name}.npz") as arrays:
        return dict(arrays)


def relative_l2(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    assert found.shape == wanted.shape
    wanted = wanted.astype(np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", range(5))
@pytest.mark.parametrize("quantity", ["attn_mix", "attn_out", "mlp_mix", "mlp_out", "layer_out"])
def test_every_layers_inputs_and_outputs(name: str, layer: int, quantity: str) -> None:
    r = run(name)
    assert relative_l2(r.taps[quantity, layer], r.golden[quantity][layer]) <= RELATIVE_L2_MAX


@pytest.mark.parametrize("name", NAMES)
def test_banked_streams_and_final_values(name: str) -> None:
    r = run(name)
    assert len(r.golden["block_residual"]) == 3
    for block, wanted in enumerate(r.golden["block_residual"]):
        assert relative_l2(r.taps["block_residual", block], wanted) <= RELATIVE_L2_MAX
    for quantity in ("final_mix", "final_norm", "logits"):
        assert relative_l2(r.taps[quantity], r.golden[quantity]) <= RELATIVE_L2_MAX


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layer", range(1, 5))
def test_routing_is_identical(name: str, layer: int) -> None:
    r = run(name)
    np.testing.assert_array_equal(r.taps["router_ids", layer], r.golden[f"router_idx_l{layer}"])
    wanted = r.golden[f"router_w_l{layer}"]
    assert relative_l2(r.taps["router_weights", layer], wanted) <= RELATIVE_L2_MAX


@pytest.mark.parametrize("name", NAMES)
def test_states_after_the_prompt(name: str) -> None:
    r = run(name)
    assert r.state.tokens == 24
    for layer, state in enumerate(r.state.layers):
        if layer < 3:
            assert isinstance(state, KdaState)
            assert relative_l2(state.memory, r.golden[f"kda_state_l{layer}"]) <= RELATIVE_L2_MAX
            for letter in "qkv":
                window = getattr(state, f"{letter}_window")
                wanted = r.golden[f"kda_conv_{letter}_l{layer}"][:, 1:]  # theirs holds one input more
                assert relative_l2(window, wanted) <= RELATIVE_L2_MAX
        else:
            assert isinstance(state, MlaState)
            assert relative_l2(state.latent, r.golden[f"mla_latent_l{layer}"]) <= RELATIVE_L2_MAX
            assert relative_l2(state.rope, r.golden[f"mla_rope_l{layer}"]) <= RELATIVE_L2_MAX


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuation_is_identical(name: str) -> None:
    r = run(name)
    state = r.model.new_state()
    logits = r.model.forward(r.ids, state)[-1]
    ids, margins = r.model.greedy(logits, state, len(r.golden["greedy_ids"]))
    assert ids == r.golden["greedy_ids"].tolist()
    np.testing.assert_allclose(margins, r.golden["greedy_margin"], atol=2e-4)


def test_a_prompt_of_more_than_two_kda_chunks() -> None:
    golden = load("tiny_s1_long")
    model = run("tiny_s1").model
    logits = model.forward(golden["input_ids"].tolist(), model.new_state())
    assert relative_l2(logits, golden["logits"]) <= RELATIVE_L2_MAX


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token_agrees(name: str) -> None:
    r = run(name)
    state, taps = r.model.new_state(), Taps()
    for token in r.ids:
        r.model.forward([token], state, taps)
    assert relative_l2(taps["logits"], r.golden["logits"]) <= RELATIVE_L2_MAX
    assert relative_l2(taps["logits"], r.taps["logits"]) <= 1e-5
    for layer in range(1, 5):
        np.testing.assert_array_equal(taps["router_ids", layer], r.taps["router_ids", layer])


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 23), max_size=6, unique=True))
def test_any_chunks_agree(cuts: list[int]) -> None:
    r = run("tiny_s0")
    state, taps = r.model.new_state(), Taps()
    edges = [0, *sorted(cuts), len(r.ids)]
    for start, end in itertools.pairwise(edges):
        r.model.forward(r.ids[start:end], state, taps)
    assert relative_l2(taps["logits"], r.taps["logits"]) <= 1e-5
    for one, other in zip(state.layers, r.state.layers, strict=True):
        for field in dataclasses.fields(one):
            assert relative_l2(getattr(one, field.name), getattr(other, field.name)) <= 1e-5


def test_one_layer_can_be_run_alone_from_golden_inputs() -> None:
    r = run("tiny_s1")
    for layer in range(5):
        empty = r.model.new_state().layers[layer]
        out, _ = r.model.attention(layer, r.golden["attn_mix"][layer], empty)
        assert relative_l2(out, r.golden["attn_out"][layer]) <= RELATIVE_L2_MAX
        out = r.model.mlp(layer, r.golden["mlp_mix"][layer])
        assert relative_l2(out, r.golden["mlp_out"][layer]) <= RELATIVE_L2_MAX


# --- what a wrong detail would do: each must be far enough from the golden logits to be seen ---


def logits_error(name: str, **changes: Any) -> float:
    golden = load(name)
    model = ReferenceModel(Snapshot.open([VECTORS / name]))
    model.config = dataclasses.replace(model.config, **changes)
    return relative_l2(model.forward(golden["input_ids"].tolist(), model.new_state()), golden["logits"])


@pytest.mark.parametrize("name", NAMES)
def test_the_latent_norms_epsilon_is_the_class_default(name: str) -> None:
    golden = load(name)
    model = ReferenceModel(Snapshot.open([VECTORS / name]), mla_latent_norm_eps=1e-5)
    error = relative_l2(model.forward(golden["input_ids"].tolist(), model.new_state()), golden["logits"])
    assert 5e-3 < error < 1.2e-2


@pytest.mark.parametrize(
    ("changes", "at_least"),
    [
        ({"rms_norm_eps": 1e-6}, 1e-3),
        ({"gate_lower_bound": -4.9}, 0.1),
        ({"situ_beta": 3.9}, 1e-2),
        ({"situ_linear_beta": 24.0}, 1e-3),
        ({"residual_block": 3}, 0.5),
        ({"experts_per_token": 3}, 0.1),
    ],
)
def test_wrong_settings_are_seen(changes: dict[str, Any], at_least: float) -> None:
    assert logits_error("tiny_s0", **changes) >= at_least


@pytest.mark.parametrize("changes", [{"renormalize": False}, {"routed_scaling": 1.01}])
def test_the_norm_behind_the_experts_hides_common_factors(changes: dict[str, Any]) -> None:
    assert logits_error("tiny_s0", **changes) <= 1e-4


def swapped_nibbles(packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Any:
    return dequantize_mxfp4((packed << np.uint8(4)) | (packed >> np.uint8(4)), scales)


def scores_without_norm(x: Any, weight: Any, eps: float) -> Any:
    return x if weight is None else rms_norm(x, weight, eps)


def clipped_l2_norm(x: Any, eps: float) -> Any:
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-5)


def newest_tap_first(inputs: Any, taps: Any) -> Any:
    return causal_conv(inputs, taps[..., ::-1])


def situ_without_sigmoid(gate: Any, up: Any, beta: float, linear_beta: float) -> Any:
    return beta * np.tanh(gate / beta) * linear_beta * np.tanh(up / linear_beta)


@pytest.mark.parametrize(
    ("module", "name", "wrong", "at_least"),
    [
        (reference_weights, "dequantize_mxfp4", swapped_nibbles, 0.5),
        (forward, "rms_norm", scores_without_norm, 0.5),
        (attention, "L2_NORM_EPS", 1e-5, 1e-4),
        (attention, "l2_norm", clipped_l2_norm, 1.5 * RELATIVE_L2_MAX),
        (attention, "causal_conv", newest_tap_first, 0.1),
        (mlp, "situ", situ_without_sigmoid, 0.1),
    ],
    ids=["nibbles", "mix scores", "L2 epsilon", "L2 clipped", "convolution", "situ"],
)
def test_wrong_details_are_seen(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wrong: Any, at_least: float
) -> None:
    monkeypatch.setattr(module, name, wrong)
    assert logits_error("tiny_s0") > at_least


# --- snapshots of other forms, and of our own making ---


@pytest.mark.parametrize(
    "changes",
    [
        {"expert_order": "scattered", "shards_per_layer": 3, "shard_names": "odd"},
        {"expert_order": "shuffled", "layout": "hf_cache", "vision": False},
        {"expert_order": "id", "a_log_padded": False, "experts_per_token_key": "num_experts_per_tok"},
        {"flat_config": True},
    ],
    ids=lambda changes: "+".join(changes),
)
def test_the_form_on_disk_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    ids = [5, 400, 77, 261, 9]

    def logits(model: SyntheticModel, place: str) -> Any:
        source = Snapshot.open([write_snapshot(model, tmp_path / place)])
        reference_model = ReferenceModel(source)
        return reference_model.forward(ids, reference_model.new_state())

    usual = logits(SyntheticModel.tiny(seed=4), "usual")
    np.testing.assert_array_equal(logits(SyntheticModel.tiny(seed=4, **changes), "other"), usual)


@pytest.mark.parametrize("seed", [0, 1])
def test_synthetic_models_behave(tmp_path: Path, seed: int) -> None:
    """Activations stay near one through the layers, experts are all in use, and greedy text is no stutter."""
    shape = SyntheticModel.tiny(seed=seed, layers=12, res_block=4)
    model = ReferenceModel(Snapshot.open([write_snapshot(shape, tmp_path)]))
    ids = np.random.default_rng(seed).integers(0, 512, 48).tolist()
    state, taps = model.new_state(), Taps()
    logits = model.forward(ids, state, taps)
    for layer in range(12):
        for quantity in ("attn_out", "mlp_out", "layer_out"):
            assert 0.2 < np.std(taps[quantity, layer]) < 6, (quantity, layer)
    assert all(len(np.unique(taps["router_ids", layer])) > 12 for layer in range(1, 12))
    assert 1.0 < np.std(logits) < 4.0
    continuation, margins = model.greedy(logits[-1], state, 16)
    assert len(set(continuation)) >= 8
    assert min(margins) > 1e-4


def test_a_model_cut_off_after_some_layers_agrees_so_far() -> None:
    r = run("tiny_s0")
    model = ReferenceModel(Snapshot.open([VECTORS / "tiny_s0"]), layers=2, keep_weights=False)
    taps = Taps()
    model.forward(r.ids, model.new_state(), taps)
    for layer in range(2):
        np.testing.assert_array_equal(taps["layer_out", layer], r.taps["layer_out", layer])
    with pytest.raises(KeyError):
        taps["layer_out", 2]


@pytest.mark.parametrize("ids", [[], [512], [-1, 3]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    model = run("tiny_s0").model
    with pytest.raises(ValueError, match="0 to 511"):
        model.forward(ids, model.new_state())
