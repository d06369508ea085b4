"""The parts of the attention layers that carry a state or read a cache, all float32.

A token's result does not depend on how many tokens a call is given: one call with S tokens equals S calls with
one, bit for bit, state included. The functions release the GIL and are safe to call from any thread, but for one
state only from one thread at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3.kernels import _kernels
from k3.kernels.arrays import Floats, KdaVectors, activations, output, stored
from k3.kernels.kernel_weights import EncodedMatrix, encoding_of


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
    """Compute a KDA layer between its projections; return gated rows [S, H * d] for the output projection.

    q, k, v [S, H * d] before the convolution, f [S, H * d] and b [S, H] before the gates of decay and beta,
    g [S, H * d] before the output gate's sigmoid. `windows` [3, taps - 1, H * d] (last raw inputs, oldest first)
    and `memory` [H, d, d] move on in place by S tokens. The composition of `reference.kda_heads`.
    """
    q = activations("q", q, 2)
    out = np.empty_like(q)
    dim = memory.shape[-1]
    _kernels.kda_heads(
        q,
        activations("k", k, 2),
        activations("v", v, 2),
        activations("f", f, 2),
        activations("b", b, 2),
        activations("g", g, 2),
        output("windows", windows, np.float32),
        output("memory", memory, np.float32),
        stored("conv", vectors.conv, np.float32),
        activations("a_log", vectors.a_log, 1),
        stored("dt_bias", vectors.dt_bias, np.float32),
        stored("norm", vectors.norm, np.float32),
        vectors.lower_bound,
        vectors.l2_eps,
        dim**-0.5,
        vectors.norm_eps,
        out,
    )
    return out


def latent_attention(
    q_latent: Floats,
    q_rope: Floats,
    latent: npt.NDArray[Any],
    rope: npt.NDArray[Any],
    scale: float,
) -> Floats:
    """Attend causally over a latent cache; return per head the softmax-weighted sum of latents, float32 [S, H, C].

    q_latent [S, H, C], q_rope [S, H, R]; latent [T, C] and rope [T, R] both float32, float16 or uint16
    (bfloat16 patterns), T >= S; the S queries belong to the last S positions, each sees itself and everything
    before it.
    score = (q_latent . latent + q_rope . rope) * scale.
    """
    q_latent = activations("q_latent", q_latent, 3)
    out = np.empty_like(q_latent)
    _kernels.latent_attention(
        q_latent,
        activations("q_rope", q_rope, 3),
        stored("latent", latent, np.float32, np.float16, np.uint16),
        stored("rope", rope, np.float32, np.float16, np.uint16),
        scale,
        out,
    )
    return out


def absorb_query(q: Floats, kv_b: EncodedMatrix, value_dim: int) -> Floats:
    """Map queries into the latent space, key_h^T q; return float32 [S, H, C] from q [S, H, key_dim].

    kv_b [H * (key_dim + value_dim), C], per head its key rows, then its value rows. Always exact.
    """
    q = activations("q", q, 3)
    out = np.empty((q.shape[0], q.shape[1], kv_b.shape[1]), np.float32)
    data = stored("data", kv_b.data, kv_b.data.dtype.type)
    _kernels.absorb_query(q, encoding_of(kv_b), data, kv_b.scales, value_dim, out)
    return out


def expand_value(x: Floats, kv_b: EncodedMatrix, key_dim: int) -> Floats:
    """Map latent sums to values, value_h x; return float32 [S, H, value_dim] from x [S, H, C]. Always exact."""
    x = activations("x", x, 3)
    value_dim = kv_b.shape[0] // x.shape[1] - key_dim
    if value_dim <= 0:
        raise ValueError(f"{kv_b.shape[0]} rows hold no values for {x.shape[1]} heads with {key_dim} key rows")
    out = np.empty((x.shape[0], x.shape[1], value_dim), np.float32)
    data = stored("data", kv_b.data, kv_b.data.dtype.type)
    _kernels.expand_value(x, encoding_of(kv_b), data, kv_b.scales, key_dim, out)
    return out
