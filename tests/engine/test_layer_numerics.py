"""Holds up what `docs/numerics.md` says of a layer: golden input to golden output, exact and in int8.

Every half of every layer starts from the golden input, so no error of an earlier layer is in the way.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from k3 import kernels
from k3.engine.forward.state import State
from tests.support.engines import GOLDEN_REL_L2, Array, golden, loaded, rel_l2, snapshot

ACTIVATIONS_REL_L2 = 0.025
"""Of half a layer with int8 activations against the same half computed exactly, on the same weights."""

INT8_REL_L2 = 0.035
"""The same with int8 weights, against the golden outputs, which know neither rounding."""

STEPS = 127 * math.sqrt(12)


@pytest.fixture(scope="module", params=["tiny_s0", "tiny_s1"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def truth(name: str) -> dict[str, Array]:
    return golden(name)


def halves(name: str, bits: int, *, exact: bool) -> list[Array]:
    """Return the outputs of attention and MLP of every layer, in order, each from its golden input."""
    truth = golden(name)
    outputs: list[Array] = []
    with loaded(snapshot(name, bits), exact=exact) as model:
        state = State(model.config, len(truth["input_ids"]))
        for layer in model.layers:
            outputs.append(layer.attend(truth["attn_mix"][layer.index], state))
            outputs.append(layer.transform(truth["mlp_mix"][layer.index]))
    return outputs


def golden_halves(truth: dict[str, Array]) -> list[Array]:
    return [truth[key][layer] for layer in range(len(truth["attn_out"])) for key in ("attn_out", "mlp_out")]


def distances(found: list[Array], wanted: list[Array]) -> list[float]:
    return [rel_l2(a, b) for a, b in zip(found, wanted, strict=True)]


def test_exact_arithmetic_is_the_makers(name: str, truth: dict[str, Array]) -> None:
    assert max(distances(halves(name, 16, exact=True), golden_halves(truth))) <= GOLDEN_REL_L2


@pytest.mark.parametrize("bits", [8, 4])
def test_int8_activations_against_exact_ones(name: str, bits: int) -> None:
    found = distances(halves(name, bits, exact=False), halves(name, bits, exact=True))
    assert max(found) <= ACTIVATIONS_REL_L2
    assert min(found) > 0.005  # or they were not int8 at all


def test_int8_activations_and_weights_against_the_makers(name: str, truth: dict[str, Array]) -> None:
    assert max(distances(halves(name, 8, exact=False), golden_halves(truth))) <= INT8_REL_L2


@pytest.mark.parametrize("kind", ["normal", "one in each group", "heavy tails"])
def test_the_noise_of_a_product_follows_from_its_steps(kind: str) -> None:
    """Expect at most c / (127 sqrt(12)) for independent weights.

    c is the groups' largest values over all values, each as a root mean square.
    """
    rng = np.random.default_rng(3)
    x = rng.standard_normal((8, 1024), dtype=np.float32)
    if kind == "one in each group":
        x *= np.where(np.arange(1024) % 64 == 5, np.float32(1), np.float32(0.02))
    if kind == "heavy tails":
        x = x**3
    weights, scales = kernels.quantize_int8(rng.standard_normal((4096, 1024), dtype=np.float32))
    exact = kernels.matmul_encoded(x, weights, scales, "int8", exact=True)
    rounded = kernels.matmul_encoded(x, weights, scales, "int8", exact=False)
    largest = np.abs(x.reshape(8, -1, 64)).max(axis=-1)
    for row in range(len(x)):
        crest = np.sqrt((largest[row] ** 2).mean() / (x[row] ** 2).mean())
        assert 1 <= crest <= 8
        noise = rel_l2(rounded[row], exact[row])
        assert noise <= 1.1 * crest / STEPS
        if (
            kind == "normal"
        ):  # where few values are large the noise is less: the largest of a group are met exactly
            assert noise >= 0.9 * crest / STEPS
