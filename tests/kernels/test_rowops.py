"""Holds up: norms, softmax, gates, top-k and residual mix equal their definition and their meaning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import reference
from tests.support.arrays import Array, Everyway, SameBits

SEEDS = st.integers(0, 2**32)
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 150))


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


@settings(max_examples=250, deadline=None)
@given(size=SIZES, seed=SEEDS, magnitude=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e15]))
def test_rows_equal_their_definition(
    everyway: Everyway, same_bits: SameBits, size: tuple[int, int], seed: int, magnitude: float
) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, *size) * np.float32(magnitude), normal(rng, size[1])
    for have, want in (
        (lambda: kernels.rms_norm(x, w, 1e-5), reference.rms_norm(x, w, 1e-5)),
        (lambda: kernels.softmax(x), reference.softmax(x)),
    ):
        (y,) = everyway(have)
        same_bits(y, want)
    same_bits(kernels.rms_norm(x, w, 1e-5)[-1], kernels.rms_norm(x[-1], w, 1e-5))


@settings(deadline=None)
@given(seed=SEEDS)
def test_rows_against_float64(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, 4, 3, 200), normal(rng, 200)
    wide = x.astype(np.float64)
    rms = w * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(kernels.rms_norm(x, w, 1e-5), rms, rtol=2e-6)
    e = np.exp(wide - wide.max(-1, keepdims=True))
    np.testing.assert_allclose(kernels.softmax(x), e / e.sum(-1, keepdims=True), rtol=3e-6)


def test_nan_is_not_lost() -> None:
    x = np.ones((2, 40), np.float32)
    for place in (0, 17, 39):
        bad = x.copy()
        bad[1, place] = np.nan
        for y in (kernels.softmax(bad), kernels.rms_norm(bad, x[0], 1e-5)):
            assert np.isnan(y[1]).all()
            assert np.isfinite(y[0]).all()


@settings(deadline=None)
@given(size=SIZES, seed=SEEDS)
def test_gated(everyway: Everyway, same_bits: SameBits, size: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, gate = normal(rng, *size), 20 * normal(rng, *size)
    (y,) = everyway(lambda: kernels.gated(x, gate))
    same_bits(y, reference.gated(x, gate))
    same_bits(y, x * kernels.sigmoid(gate))


@settings(deadline=None)
@given(size=SIZES, data=st.data(), few=st.integers(1, 6), seed=SEEDS)
def test_top_k(same_bits: SameBits, size: tuple[int, int], data: st.DataObject, few: int, seed: int) -> None:
    k = data.draw(st.integers(1, size[1]))
    choice = (
        np.random.default_rng(seed).integers(-few, few, size).astype(np.float32)
    )  # ties, and zeros of both signs
    choice = np.where(choice == 0, np.copysign(choice, -1), choice).astype(np.float32)
    ids = kernels.top_k(choice, k)
    same_bits(ids, reference.top_k(choice, k))
    for row, chosen in zip(choice, ids, strict=True):
        left = np.delete(row, chosen)
        assert left.size == 0 or left.max() <= row[chosen].min()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_top_k_refuses_what_has_no_place(value: float) -> None:
    choice = np.zeros((3, 20), np.float32)
    choice[1, 19] = choice[2, 0] = value
    with pytest.raises(kernels.NonFiniteError, match="ranked") as refusal:
        kernels.top_k(choice, 4)
    assert (refusal.value.row, refusal.value.column) == (1, 19)


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 9), size=SIZES, seed=SEEDS)
def test_residual_mix(
    everyway: Everyway, same_bits: SameBits, count: int, size: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    entries, weight = [normal(rng, *size) for _ in range(count)], normal(rng, size[1])
    (y,) = everyway(lambda: kernels.residual_mix(entries, weight))
    same_bits(y, reference.residual_mix(entries, weight))
    same_bits(y[-1:], kernels.residual_mix([entry[-1:] for entry in entries], weight))
    stack = np.stack(entries).astype(np.float64)
    normed = stack / np.sqrt((stack**2).mean(-1, keepdims=True) + 1e-5)
    scores = (normed * weight).sum(-1)
    share = np.exp(scores - scores.max(0))
    exact = ((share / share.sum(0))[..., None] * stack).sum(0)
    np.testing.assert_allclose(y, exact, rtol=1e-3, atol=1e-4)


def test_a_mix_of_one_entry_is_that_entry() -> None:
    entry = normal(np.random.default_rng(0), 3, 50)
    np.testing.assert_array_equal(kernels.residual_mix([entry], entry[0]), entry)


def test_arrays_that_do_not_fit_are_refused() -> None:
    x = np.zeros((2, 8), np.float32)
    for bad in (
        lambda: kernels.rms_norm(x, x[0, :7].copy(), 1e-5),
        lambda: kernels.residual_mix([], x[0]),
        lambda: kernels.residual_mix([x] * 65, x[0]),
        lambda: kernels.residual_mix([x, x[:1]], x[0]),
        lambda: kernels.softmax(np.zeros((2, 0), np.float32)),
        lambda: kernels.softmax(np.array(1, np.float32)),
        lambda: kernels.situ(x, x[:1]),
        lambda: kernels.gated(x, x[:1]),
        lambda: kernels.top_k(x, 0),
        lambda: kernels.top_k(x, 9),
    ):
        with pytest.raises(ValueError, match=r"shape|entries|entry|columns|axes|differ"):
            bad()
