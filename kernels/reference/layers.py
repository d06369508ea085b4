"""Definition of the kernels that carry a state or read a cache."""

from __future__ import annotations

import numpy as np

from k3.kernels.arrays import Floats, KdaVectors
from k3.kernels.reference.functions import exp, kda_gate, l2_normalize, rms_norm, sigmoid, silu
from k3.kernels.reference.lanes import lane_sum
from k3.kernels.reference.product import matmul_exact

ATTENTION_BLOCK = 256


def kda_step(state: Floats, q: Floats, k: Floats, v: Floats, g: Floats, beta: Floats) -> Floats:
    """Apply the delta rule to the tokens in order and update `state` in place.

    Sums over the key index start from 0 and are taken in ascending order.
    """
    out = np.empty_like(v)
    decay = exp(g)
    for t in range(len(q)):
        state *= decay[t][:, :, None]
        seen = _weighted_sum(k[t], state)
        error = beta[t][:, None] * (v[t] - seen)
        state += k[t][:, :, None] * error[:, None, :]
        out[t] = _weighted_sum(q[t], state)
    return out


def short_conv(window: Floats, u: Floats, w: Floats) -> Floats:
    """Return SiLU of the sum over taps from the oldest input to the newest. `window` is updated in place."""
    taps = w.shape[-1]
    weights = w.reshape(w.shape[0], taps)
    history = np.concatenate([window, u])
    out = np.empty_like(u)
    for t in range(len(u)):
        total = history[t] * weights[:, 0]
        for tap in range(1, taps):
            total = total + history[t + tap] * weights[:, tap]
        out[t] = silu(total)
    window[:] = history[len(u) :]
    return out


def kda_heads(
    q: Floats,
    k: Floats,
    v: Floats,
    f: Floats,
    b: Floats,
    g: Floats,
    windows: Floats,
    memory: Floats,
    vectors: KdaVectors,
) -> Floats:
    """Apply convolution, norms, gates, delta rule, output norm and gate in turn. States are updated in place."""
    heads, dim, _ = memory.shape
    shape = (len(q), heads, dim)
    query, key, value = (
        short_conv(window, stream, taps.T).reshape(shape)
        for window, stream, taps in zip(windows, (q, k, v), vectors.conv, strict=True)
    )
    read = kda_step(
        memory,
        l2_normalize(query, vectors.l2_eps) * np.float32(dim**-0.5),
        l2_normalize(key, vectors.l2_eps),
        value,
        kda_gate(f.reshape(shape), vectors.a_log, vectors.dt_bias.reshape(heads, dim), vectors.lower_bound),
        sigmoid(b),
    )
    gated: Floats = rms_norm(read, vectors.norm, vectors.norm_eps).reshape(len(q), -1) * sigmoid(g)
    return gated


def latent_attention(q_latent: Floats, q_rope: Floats, latent: Floats, rope: Floats, scale: float) -> Floats:
    """Return sums of latents weighted by a softmax against the maximum of all positions.

    Sums are taken by blocks of 256 positions, the blocks in order.
    """
    tokens, heads, width = q_latent.shape
    out = np.empty((tokens, heads, width), np.float32)
    for t in range(tokens):
        count = len(latent) - tokens + 1 + t
        scores = matmul_exact(q_latent[t], latent[:count]) + matmul_exact(q_rope[t], rope[:count])
        scores = scores * np.float32(scale)
        top = np.max(scores, axis=1, keepdims=True)
        total: Floats = np.zeros(heads, np.float32)
        mixed: Floats = np.zeros((heads, width), np.float32)
        for begin in range(0, count, ATTENTION_BLOCK):
            share = exp(scores[:, begin : begin + ATTENTION_BLOCK] - top)
            total = total + lane_sum(share)
            rows = latent[begin : begin + ATTENTION_BLOCK][: count - begin]
            mixed = mixed + _weighted_sum(share, np.broadcast_to(rows, (heads, *rows.shape)))
        out[t] = mixed / total[:, None]
    return out


def absorb_query(q: Floats, kv_b: Floats, value_dim: int) -> Floats:
    """Return key_h^T q, summed over the key index in ascending order.

    kv_b is decoded: float32 [H * (key_dim + value_dim), C].
    """
    _, heads, key_dim = q.shape
    keys = kv_b.reshape(heads, key_dim + value_dim, -1)[:, :key_dim]
    return np.stack([_weighted_sum(token, keys) for token in q])


def expand_value(x: Floats, kv_b: Floats, key_dim: int) -> Floats:
    """Return value_h x, multiplied by `matmul_exact`."""
    heads = x.shape[1]
    values = kv_b.reshape(heads, kv_b.shape[0] // heads, -1)[:, key_dim:]
    return np.stack([matmul_exact(x[:, h], values[h]) for h in range(heads)], axis=1)


def _weighted_sum(p: Floats, rows: Floats) -> Floats:
    """Return out[h] = 0 + p[h, 0] * rows[h, 0] + p[h, 1] * rows[h, 1] + ..., in that order."""
    total = np.zeros((rows.shape[0], rows.shape[2]), np.float32)
    for i in range(rows.shape[1]):
        total = total + p[:, i, None] * rows[:, i]
    return total
