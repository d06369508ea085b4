"""Holds up: state updates and cached attention equal their definition and the model, in one call or by tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import reference

SEEDS = st.integers(0, 2**32)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def kda_inputs(rng: np.random.Generator, tokens: int, heads: int, dk: int, dv: int) -> list[np.ndarray]:
    q, k = (reference.l2_normalize(normal(rng, tokens, heads, dk)) for _ in range(2))
    g = -5 * rng.random((tokens, heads, dk), np.float32)
    return [q, k, normal(rng, tokens, heads, dv), g, rng.random((tokens, heads), np.float32)]


@settings(max_examples=150, deadline=None)
@given(sizes=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.integers(1, 70)), seed=SEEDS)
def test_kda_step(everyway, same_bits, sizes, seed) -> None:
    tokens, heads, dk, dv = sizes
    rng = np.random.default_rng(seed)
    start, inputs = normal(rng, heads, dk, dv), kda_inputs(rng, *sizes)

    def together() -> tuple[np.ndarray, np.ndarray]:
        state = start.copy()
        return kernels.kda_step(state, *inputs), state

    def one_by_one() -> tuple[np.ndarray, np.ndarray]:
        state = start.copy()
        parts = [kernels.kda_step(state, *[a[t : t + 1] for a in inputs]) for t in range(tokens)]
        return np.concatenate(parts), state

    want_state = start.copy()
    want = reference.kda_step(want_state, *inputs)
    for call in (together, one_by_one):
        out, state = everyway(call)
        same_bits(out, want)
        same_bits(state, want_state)


def test_kda_step_is_the_delta_rule() -> None:
    rng = np.random.default_rng(1)
    q, k, v, g, beta = (a.astype(np.float64) for a in kda_inputs(rng, 20, 2, 16, 24))
    state = np.zeros((2, 16, 24), np.float32)
    out = kernels.kda_step(state, *[a.astype(np.float32) for a in (q, k, v, g, beta)])
    for h in range(2):
        s = np.zeros((16, 24))
        for t in range(20):
            kt = k[t, h][:, None]
            s = (np.eye(16) - beta[t, h] * kt @ kt.T) @ np.diag(np.exp(g[t, h])) @ s + beta[t, h] * kt * v[t, h]
            np.testing.assert_allclose(out[t, h], s.T @ q[t, h], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state[h], s, rtol=1e-4, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 7), channels=st.integers(1, 50), taps=st.integers(1, 6), three=st.booleans(), seed=SEEDS
)
def test_short_conv(everyway, same_bits, tokens, channels, taps, three, seed) -> None:
    rng = np.random.default_rng(seed)
    start, u, w = normal(rng, taps - 1, channels), normal(rng, tokens, channels), normal(rng, channels, taps)
    stored = w[:, None, :] if three else w

    def together() -> tuple[np.ndarray, np.ndarray]:
        window = start.copy()
        return kernels.short_conv(window, u, stored), window

    def one_by_one() -> tuple[np.ndarray, np.ndarray]:
        window = start.copy()
        return np.concatenate([kernels.short_conv(window, u[t : t + 1], stored) for t in range(tokens)]), window

    want_window = start.copy()
    want = reference.short_conv(want_window, u, w)
    for call in (together, one_by_one):
        out, window = everyway(call)
        same_bits(out, want)
        same_bits(window, want_window)
    history = np.concatenate([start, u]).astype(np.float64)
    plain = np.stack([(history[t : t + taps] * w.T).sum(0) for t in range(tokens)])
    np.testing.assert_allclose(out, plain / (1 + np.exp(-plain)), rtol=1e-4, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    tokens=st.integers(1, 4),
    before=st.sampled_from([0, 1, 30, 251, 255, 256, 520]),
    heads=st.integers(1, 19),
    widths=st.tuples(st.integers(1, 50), st.integers(1, 20)),
    bf16=st.booleans(),
    seed=SEEDS,
)
def test_latent_attention(everyway, same_bits, tokens, before, heads, widths, bf16, seed) -> None:
    rng = np.random.default_rng(seed)
    q_latent, q_rope = normal(rng, tokens, heads, widths[0]), normal(rng, tokens, heads, widths[1])
    latent, rope = normal(rng, before + tokens, widths[0]), normal(rng, before + tokens, widths[1])
    if bf16:
        cached = [(a.view(np.uint32) >> 16).astype(np.uint16) for a in (latent, rope)]
        latent, rope = (reference.widen_bf16(a) for a in cached)
    else:
        cached = [latent, rope]
    (out,) = everyway(lambda: kernels.latent_attention(q_latent, q_rope, *cached, 0.2))
    same_bits(out, reference.latent_attention(q_latent, q_rope, latent, rope, 0.2))
    first = [a[: before + 1] for a in cached]
    same_bits(out[:1], kernels.latent_attention(q_latent[:1], q_rope[:1], *first, 0.2))
    for t in range(tokens):
        seen = before + t + 1
        scores = (q_latent[t] @ latent[:seen].T + q_rope[t] @ rope[:seen].T).astype(np.float64) * 0.2
        share = np.exp(scores - scores.max(1, keepdims=True))
        exact = share / share.sum(1, keepdims=True) @ latent[:seen]
        np.testing.assert_allclose(out[t], exact, rtol=1e-3, atol=1e-4)


def matrix(encoding: str, w: np.ndarray) -> tuple[SimpleNamespace, np.ndarray]:
    data, scales, dense = w, None, w
    if encoding == "raw":
        data = (w.view(np.uint32) >> 16).astype(np.uint16)
        dense = reference.widen_bf16(data)
    elif encoding == "int8":
        data, scales = reference.quantize_int8(w)
        dense = reference.dequantize_int8(data, scales)
    elif encoding == "int4":
        data, scales = reference.quantize_int4(w)
        dense = reference.dequantize_int4(data, scales, w.shape[1])
    return SimpleNamespace(encoding=encoding, shape=w.shape, data=data, scales=scales), dense


@settings(max_examples=150, deadline=None)
@given(
    encoding=st.sampled_from(["raw", "f32", "int8", "int4"]),
    sizes=st.tuples(*[st.integers(1, 6)] * 4, st.integers(1, 100)),
    seed=SEEDS,
)
def test_absorbed_projections(everyway, same_bits, encoding, sizes, seed) -> None:
    tokens, heads, key_dim, value_dim, width = sizes
    rng = np.random.default_rng(seed)
    kv_b, dense = matrix(encoding, normal(rng, heads * (key_dim + value_dim), width))
    q, x = normal(rng, tokens, heads, key_dim), normal(rng, tokens, heads, width)
    (absorbed,) = everyway(lambda: kernels.absorb_query(q, kv_b, value_dim))
    same_bits(absorbed, reference.absorb_query(q, dense, value_dim))
    same_bits(absorbed[-1:], kernels.absorb_query(q[-1:], kv_b, value_dim))
    (values,) = everyway(lambda: kernels.expand_value(x, kv_b, key_dim))
    same_bits(values, reference.expand_value(x, dense, key_dim))
    split = dense.reshape(heads, key_dim + value_dim, width).astype(np.float64)
    np.testing.assert_allclose(absorbed, np.einsum("thi,hic->thc", q, split[:, :key_dim]), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(values, np.einsum("thc,hvc->thv", x, split[:, key_dim:]), rtol=1e-3, atol=1e-4)


def test_arrays_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng(0)
    inputs = kda_inputs(rng, 2, 3, 4, 5)
    for state in (
        np.zeros((3, 4, 6), np.float32),
        np.zeros((2, 4, 5), np.float32),
        np.zeros((3, 5, 5), np.float32),
    ):
        with pytest.raises(ValueError, match="shape"):
            kernels.kda_step(state, *inputs)
    frozen = np.zeros((3, 4, 5), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.kda_step(frozen, *inputs)
    with pytest.raises(ValueError, match="row-major"):
        kernels.kda_step(np.zeros((3, 5, 4), np.float32).transpose(0, 2, 1), *inputs)
    u, w = np.zeros((2, 8), np.float32), np.zeros((8, 4), np.float32)
    with pytest.raises(ValueError, match="window"):
        kernels.short_conv(np.zeros((4, 8), np.float32), u, w)
    with pytest.raises(ValueError, match="taps"):
        kernels.short_conv(np.zeros((16, 8), np.float32), u, np.zeros((8, 17), np.float32))
    q, r = np.zeros((3, 2, 8), np.float32), np.zeros((3, 2, 4), np.float32)
    with pytest.raises(ValueError, match="own positions"):
        kernels.latent_attention(q, r, np.zeros((2, 8), np.float32), np.zeros((2, 4), np.float32), 1.0)
    with pytest.raises(ValueError, match="length"):
        kernels.latent_attention(q, r, np.zeros((5, 8), np.float32), np.zeros((4, 4), np.float32), 1.0)
    kv_b, _ = matrix("f32", np.zeros((2 * 9, 8), np.float32))
    with pytest.raises(ValueError, match="shape"):
        kernels.absorb_query(np.zeros((1, 2, 4), np.float32), kv_b, 4)
    with pytest.raises(ValueError, match="hold no values"):
        kernels.expand_value(q, kv_b, 9)
