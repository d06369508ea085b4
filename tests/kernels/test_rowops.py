"""Holds up: norms, softmax, gate and residual mix equal their definition, row by row, and the model's meaning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import reference

SEEDS = st.integers(0, 2**32)
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 150))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


@settings(max_examples=250, deadline=None)
@given(size=SIZES, seed=SEEDS, magnitude=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e15]))
def test_rows_equal_their_definition(everyway, same_bits, size, seed, magnitude) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, *size) * np.float32(magnitude), normal(rng, size[1])
    for have, want in (
        (lambda: kernels.rms_norm(x, w, 1e-5), reference.rms_norm(x, w, 1e-5)),
        (lambda: kernels.l2_normalize(x), reference.l2_normalize(x, 1e-6)),
        (lambda: kernels.softmax(x), reference.softmax(x)),
    ):
        (y,) = everyway(have)
        same_bits(y, want)
    same_bits(kernels.rms_norm(x, w, 1e-5)[-1], kernels.rms_norm(x[-1], w, 1e-5))


@settings(deadline=None)
@given(seed=SEEDS)
def test_rows_against_float64(seed) -> None:
    rng = np.random.default_rng(seed)
    x, w = normal(rng, 4, 3, 200), normal(rng, 200)
    wide = x.astype(np.float64)
    rms = w * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(kernels.rms_norm(x, w, 1e-5), rms, rtol=2e-6)
    unit = wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(kernels.l2_normalize(x), unit, rtol=2e-6)
    e = np.exp(wide - wide.max(-1, keepdims=True))
    np.testing.assert_allclose(kernels.softmax(x), e / e.sum(-1, keepdims=True), rtol=3e-6)


def test_nan_is_not_lost() -> None:
    x = np.ones((2, 40), np.float32)
    for place in (0, 17, 39):
        bad = x.copy()
        bad[1, place] = np.nan
        for y in (kernels.softmax(bad), kernels.l2_normalize(bad), kernels.rms_norm(bad, x[0], 1e-5)):
            assert np.isnan(y[1]).all()
            assert np.isfinite(y[0]).all()


@settings(deadline=None)
@given(tokens=st.integers(1, 4), heads=st.integers(1, 5), dim=st.integers(1, 40), seed=SEEDS)
def test_kda_gate(everyway, same_bits, tokens, heads, dim, seed) -> None:
    rng = np.random.default_rng(seed)
    f, a_log, bias = normal(rng, tokens, heads, dim), normal(rng, heads), normal(rng, heads * dim)
    (g,) = everyway(lambda: kernels.kda_gate(f, a_log, bias))
    same_bits(g, reference.kda_gate(f, a_log, bias))
    rate = np.exp(a_log.astype(np.float64))[None, :, None]
    exact = -5 / (1 + np.exp(-rate * (f.astype(np.float64) + bias.reshape(heads, dim))))
    np.testing.assert_allclose(g, exact, rtol=1e-4, atol=1e-7)
    assert ((g <= 0) & (g >= -5)).all()


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 9), size=SIZES, seed=SEEDS)
def test_residual_mix(everyway, same_bits, count, size, seed) -> None:
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
        lambda: kernels.softmax(np.float32(1).reshape(())),
        lambda: kernels.situ(x, x[:1]),
        lambda: kernels.kda_gate(x[None], np.zeros(3, np.float32), x.reshape(-1)),
    ):
        with pytest.raises(ValueError, match=r"shape|entries|entry|columns|axes"):
            bad()
