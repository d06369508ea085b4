"""Holds up: state updates and cached attention equal their definition and the model, in one call or by tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import reference
from tests.support.arrays import Array, Everyway, SameBits

SEEDS = st.integers(0, 2**32)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def kda_heads(rows: Sequence[Array], windows: Array, memory: Array, vectors: kernels.KdaVectors) -> Array:
    """Call the kernel with its six inputs from `rows`."""
    q, k, v, f, b, g = rows
    return kernels.kda_heads(q, k, v, f, b, g, windows, memory, vectors)


def latent_attention(queries: Sequence[Array], caches: Sequence[Array], scale: float = 0.2) -> Array:
    """Call the kernel with queries and caches each as latent and rotary part."""
    (q_latent, q_rope), (latent, rope) = queries, caches
    return kernels.latent_attention(q_latent, q_rope, latent, rope, scale)


def kda_layer(
    rng: np.random.Generator, tokens: int, heads: int, dim: int, taps: int
) -> tuple[list[Array], Array, Array, kernels.KdaVectors]:
    """Return inputs, window, memory and vectors of a call."""
    width = heads * dim
    rows = [normal(rng, tokens, width) for _ in range(4)] + [
        normal(rng, tokens, heads),
        normal(rng, tokens, width),
    ]
    vectors = kernels.KdaVectors(
        conv=normal(rng, 3, taps, width),
        a_log=normal(rng, heads),
        dt_bias=normal(rng, width),
        norm=normal(rng, dim),
        lower_bound=-5.0,
        l2_eps=1e-6,
        norm_eps=1e-5,
    )
    return rows, normal(rng, 3, taps - 1, width), normal(rng, heads, dim, dim), vectors


@settings(max_examples=120, deadline=None)
@given(
    sizes=st.tuples(st.sampled_from([1, 2, 5, 16, 17, 33]), st.integers(1, 4), st.integers(1, 70)),
    taps=st.sampled_from([1, 3, 4, 5, 16]),
    cut=st.integers(0, 40),
    seed=SEEDS,
)
def test_kda_heads(
    everyway: Everyway, same_bits: SameBits, sizes: tuple[int, int, int], taps: int, cut: int, seed: int
) -> None:
    rows, windows, memory, vectors = kda_layer(np.random.default_rng(seed), *sizes, taps)

    def in_parts(*ends: int) -> Callable[[], tuple[Array, ...]]:
        def call() -> tuple[Array, ...]:
            states = windows.copy(), memory.copy()
            parts = [
                kda_heads([row[begin:end] for row in rows], *states, vectors)
                for begin, end in zip((0, *ends[:-1]), ends, strict=True)
            ]
            return np.concatenate(parts), *states

        return call

    wanted = windows.copy(), memory.copy()
    q, k, v, f, b, g = rows
    want = (reference.kda_heads(q, k, v, f, b, g, *wanted, vectors), *wanted)
    tokens = sizes[0]
    for ends in ((tokens,), (min(cut, tokens), tokens), tuple(range(1, tokens + 1))):
        for have, expected in zip(everyway(in_parts(*ends)), want, strict=True):
            same_bits(have, expected)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(2, 40)), taps=st.integers(1, 4), seed=SEEDS
)
def test_kda_heads_is_the_layer_of_the_paper(sizes: tuple[int, int, int], taps: int, seed: int) -> None:
    tokens, heads, dim = sizes
    rows, windows, memory, vectors = kda_layer(np.random.default_rng(seed), *sizes, taps)
    wide = [np.concatenate([w, x]).astype(np.float64) for w, x in zip(windows, rows, strict=False)]
    q, k, v = (
        np.stack([(x[t : t + taps] * w).sum(0) for t in range(tokens)])
        for x, w in zip(wide, vectors.conv.astype(np.float64), strict=True)
    )
    q, k, v = ((x / (1 + np.exp(-x))).reshape(tokens, heads, dim) for x in (q, k, v))
    f, b, g = (x.astype(np.float64) for x in rows[3:])
    q, k = (x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    rate = np.exp(vectors.a_log.astype(np.float64))[None, :, None]
    decay = np.exp(-5 / (1 + np.exp(-rate * (f + vectors.dt_bias).reshape(tokens, heads, dim))))
    beta = 1 / (1 + np.exp(-b))
    want, states = np.empty((tokens, heads, dim)), memory.astype(np.float64)
    for h in range(heads):
        s = states[h]
        for t in range(tokens):
            key = k[t, h][:, None]
            s = (np.eye(dim) - beta[t, h] * key @ key.T) @ np.diag(decay[t, h]) @ s + beta[t, h] * key * v[t, h]
            want[t, h] = s.T @ q[t, h] / np.sqrt(dim)
        states[h] = s
    want = want / np.sqrt((want**2).mean(-1, keepdims=True) + 1e-5) * vectors.norm
    have = kda_heads(rows, windows, memory, vectors)
    np.testing.assert_allclose(have, want.reshape(tokens, -1) / (1 + np.exp(-g)), rtol=2e-2, atol=2e-3)
    np.testing.assert_allclose(memory, states, rtol=1e-3, atol=1e-4)


CACHES = ("float32", "bfloat16", "float16")


def cached(values: Array, kind: str) -> tuple[Array, Array]:
    """Values as a cache of this kind holds them, and what they are then as float32."""
    if kind == "bfloat16":
        patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
        return patterns, reference.widen_bf16(patterns)
    held = values.astype(kind)
    return held, held.astype(np.float32)


@settings(max_examples=120, deadline=None)
@given(
    tokens=st.integers(1, 5),
    before=st.sampled_from([0, 1, 3, 30, 62, 63, 64, 200, 251, 255, 256, 520]),
    heads=st.sampled_from([1, 2, 3, 4, 5, 19, 32, 37]),
    widths=st.tuples(st.sampled_from([1, 15, 16, 50, 64, 100, 144]), st.integers(1, 40)),
    kind=st.sampled_from(CACHES),
    seed=SEEDS,
)
def test_latent_attention(
    everyway: Everyway,
    same_bits: SameBits,
    tokens: int,
    before: int,
    heads: int,
    widths: tuple[int, int],
    kind: str,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    queries = q_latent, q_rope = [normal(rng, tokens, heads, width) for width in widths]
    pairs = [cached(normal(rng, before + tokens, width), kind) for width in widths]
    caches, (latent, rope) = [pair[0] for pair in pairs], (pair[1] for pair in pairs)
    (out,) = everyway(lambda: latent_attention(queries, caches))
    same_bits(out, reference.latent_attention(q_latent, q_rope, latent, rope, 0.2))
    first = [a[: before + 1] for a in caches]
    same_bits(out[:1], latent_attention([q[:1] for q in queries], first))
    for t in range(tokens):
        seen = before + t + 1
        scores = (q_latent[t] @ latent[:seen].T + q_rope[t] @ rope[:seen].T).astype(np.float64) * 0.2
        share = np.exp(scores - scores.max(1, keepdims=True))
        exact = share / share.sum(1, keepdims=True) @ latent[:seen]
        np.testing.assert_allclose(out[t], exact, rtol=1e-3, atol=1e-4)


def test_more_tokens_than_scores_are_held_for(same_bits: SameBits) -> None:
    rng = np.random.default_rng(5)
    tokens, heads, rows = 40, 96, 1500  # 4 Mi scores are held at once: 28 of these tokens
    queries = [normal(rng, tokens, heads, width) for width in (16, 4)]
    caches = [normal(rng, rows, width) for width in (16, 4)]
    out = latent_attention(queries, caches)
    for t in (0, 27, 28, 29, 39):
        own = [q[t : t + 1] for q in queries]
        same_bits(out[t : t + 1], latent_attention(own, [c[: rows - tokens + 1 + t] for c in caches]))


def test_every_bfloat16_and_float16_is_read_as_what_it_is(everyway: Everyway, same_bits: SameBits) -> None:
    patterns = np.arange(1 << 16).astype(np.uint16)
    zeros = np.zeros((1, 1, len(patterns)), np.float32)
    for cache, values in (
        (patterns, reference.widen_bf16(patterns)),
        (patterns.view(np.float16), patterns.view(np.float16).astype(np.float32)),
    ):
        # One position: its weight is exp(0) / 1, and the result the latent itself. Not for infinity, times 0.
        finite = np.isfinite(values)
        held = np.where(finite, cache, np.zeros_like(cache)).reshape(1, -1)
        (out,) = everyway(partial(latent_attention, (zeros, zeros[:, :, :1]), (held, held[:, :1].copy()), 1.0))
        same_bits(np.abs(out[0, 0]), np.abs(np.where(finite, values, np.float32(0))))
        assert (out[0, 0] == np.where(finite, values, 0)).all()
        for bad in np.flatnonzero(~finite)[::37]:
            one = np.broadcast_to(cache[bad : bad + 1], (1, 1)).copy()
            assert np.isnan(kernels.latent_attention(zeros[:, :, :1], zeros[:, :, :1], one, one, 1.0)).all()


def matrix(encoding: str, w: Array) -> tuple[SimpleNamespace, Array]:
    data, scales, dense = w, None, w
    if encoding == "raw":
        data = (w.view(np.uint32) >> 16).astype(np.uint16)
        dense = reference.widen_bf16(data)
    elif encoding == "half":
        data = w.astype(np.float16)
        encoding, dense = "raw", data.astype(np.float32)
    elif encoding == "int8":
        data, scales = reference.quantize_int8(w)
        dense = reference.dequantize_int8(data, scales)
    elif encoding == "int4":
        data, scales = reference.quantize_int4(w)
        dense = reference.dequantize_int4(data, scales, w.shape[1])
    return SimpleNamespace(encoding=encoding, shape=w.shape, data=data, scales=scales), dense


@settings(max_examples=150, deadline=None)
@given(
    encoding=st.sampled_from(["raw", "half", "f32", "int8", "int4"]),
    sizes=st.tuples(*[st.integers(1, 6)] * 4, st.integers(1, 100)),
    seed=SEEDS,
)
def test_absorbed_projections(
    everyway: Everyway, same_bits: SameBits, encoding: str, sizes: tuple[int, int, int, int, int], seed: int
) -> None:
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
    rows, windows, memory, vectors = kda_layer(rng, 2, 3, 4, 4)
    for astray in (
        np.zeros((3, 4, 6), np.float32),
        np.zeros((2, 4, 4), np.float32),
        np.zeros((3, 5, 5), np.float32),
    ):
        with pytest.raises(ValueError, match="shape"):
            kda_heads(rows, windows, astray, vectors)
    frozen = memory.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kda_heads(rows, windows, frozen, vectors)
    with pytest.raises(ValueError, match="row-major"):
        kda_heads(rows, windows, memory.transpose(0, 2, 1), vectors)
    for place in range(6):
        short = [row[:1] if i == place else row for i, row in enumerate(rows)]
        with pytest.raises(ValueError, match="shape"):
            kda_heads(short, windows, memory, vectors)
    with pytest.raises(ValueError, match="windows"):
        kda_heads(rows, windows[:, 1:].copy(), memory, vectors)
    many = replace(vectors, conv=np.zeros((3, 17, 12), np.float32))
    with pytest.raises(ValueError, match="taps"):
        kda_heads(rows, np.zeros((3, 16, 12), np.float32), memory, many)
    for name, wrong in (
        ("a_log", replace(vectors, a_log=np.zeros(2, np.float32))),
        ("dt_bias", replace(vectors, dt_bias=np.zeros(11, np.float32))),
        ("norm", replace(vectors, norm=np.zeros(12, np.float32))),
    ):
        with pytest.raises(ValueError, match=name):
            kda_heads(rows, windows, memory, wrong)
    q, r = np.zeros((3, 2, 8), np.float32), np.zeros((3, 2, 4), np.float32)
    with pytest.raises(ValueError, match="own positions"):
        kernels.latent_attention(q, r, np.zeros((2, 8), np.float32), np.zeros((2, 4), np.float32), 1.0)
    with pytest.raises(ValueError, match="length"):
        kernels.latent_attention(q, r, np.zeros((5, 8), np.float32), np.zeros((4, 4), np.float32), 1.0)
    with pytest.raises(TypeError, match="type"):
        kernels.latent_attention(q, r, np.zeros((5, 8), np.float32), np.zeros((5, 4), np.float16), 1.0)
    with pytest.raises(TypeError, match="latent"):
        kernels.latent_attention(q, r, np.zeros((5, 8), np.float64), np.zeros((5, 4), np.float64), 1.0)
    kv_b, _ = matrix("f32", np.zeros((2 * 9, 8), np.float32))
    with pytest.raises(ValueError, match="shape"):
        kernels.absorb_query(np.zeros((1, 2, 4), np.float32), kv_b, 4)
    with pytest.raises(ValueError, match="hold no values"):
        kernels.expand_value(q, kv_b, 9)
