"""The parts of the attention layers that carry a state or read a cache, all float32.

A token's result does not depend on how many tokens a call is given: one call with S tokens equals S calls with
one, bit for bit, state included. Safe to call from any thread, but for one state only from one at a time; the
interpreter's lock is dropped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3.kernels import _kernels
from k3.kernels.arrays import Floats, activations, output, stored
from k3.kernels.weights import EncodedMatrix, encoding_of


def kda_step(state: Floats, q: Floats, k: Floats, v: Floats, g: Floats, beta: Floats) -> Floats:
    """Delta-rule update of `state` [H, dk, dv] (in place) by S tokens in order; returns o [S, H, dv].

    Per token and head: state = exp(g) * state (by rows); e = beta * (v - state^T k); state += k e^T;
    o = state^T q.
    q, k, g [S, H, dk] (q and k normalised and scaled before; g is the log decay), v [S, H, dv], beta [S, H].
    """
    q = activations("q", q, 3)
    v = activations("v", v, 3)
    out = np.empty_like(v)
    _kernels.kda_step(
        output("state", state, np.float32),
        q,
        activations("k", k, 3),
        v,
        activations("g", g, 3),
        activations("beta", beta, 2),
        out,
    )
    return out


def short_conv(window: Floats, u: Floats, w: Floats) -> Floats:
    """Depthwise causal convolution of u [S, C] and SiLU: float32 [S, C]; `window` [taps - 1, C] moves on in place.

    window holds the last raw inputs, oldest first (zeros at the start of a sequence). w [C, taps] or
    [C, 1, taps], the last tap meets the newest input. 1 to 16 taps.
    """
    u = activations("u", u, 2)
    out = np.empty_like(u)
    weights = stored("w", w, np.float32).reshape(w.shape[0], w.shape[-1])
    _kernels.short_conv(output("window", window, np.float32), u, weights, out)
    return out


def latent_attention(
    q_latent: Floats,
    q_rope: Floats,
    latent: npt.NDArray[Any],
    rope: npt.NDArray[Any],
    scale: float,
) -> Floats:
    """Causal attention over a latent cache: float32 [S, H, C], per head the softmax-weighted sum of latents.

    q_latent [S, H, C], q_rope [S, H, R]; latent [T, C] and rope [T, R] float32 or uint16 (bfloat16 patterns),
    T >= S; the S queries belong to the last S positions, each sees itself and everything before it.
    score = (q_latent . latent + q_rope . rope) * scale.
    """
    q_latent = activations("q_latent", q_latent, 3)
    out = np.empty_like(q_latent)
    _kernels.latent_attention(
        q_latent,
        activations("q_rope", q_rope, 3),
        stored("latent", latent, np.float32, np.uint16),
        stored("rope", rope, np.float32, np.uint16),
        scale,
        out,
    )
    return out


def absorb_query(q: Floats, kv_b: EncodedMatrix, value_dim: int) -> Floats:
    """Queries taken into the latent space, key_h^T q: float32 [S, H, C] from q [S, H, key_dim].

    kv_b [H * (key_dim + value_dim), C], per head its key rows, then its value rows. Always exact.
    """
    q = activations("q", q, 3)
    out = np.empty((q.shape[0], q.shape[1], kv_b.shape[1]), np.float32)
    data = stored("data", kv_b.data, kv_b.data.dtype.type)
    _kernels.absorb_query(q, encoding_of(kv_b), data, kv_b.scales, value_dim, out)
    return out


def expand_value(x: Floats, kv_b: EncodedMatrix, key_dim: int) -> Floats:
    """Latent sums taken to values, value_h x: float32 [S, H, value_dim] from x [S, H, C]. Always exact."""
    x = activations("x", x, 3)
    value_dim = kv_b.shape[0] // x.shape[1] - key_dim
    if value_dim <= 0:
        raise ValueError(f"{kv_b.shape[0]} rows hold no values for {x.shape[1]} heads with {key_dim} key rows")
    out = np.empty((x.shape[0], x.shape[1], value_dim), np.float32)
    data = stored("data", kv_b.data, kv_b.data.dtype.type)
    _kernels.expand_value(x, encoding_of(kv_b), data, kv_b.scales, key_dim, out)
    return out
