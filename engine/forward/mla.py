"""Gated multi-head latent attention without positions, in its absorbed form.

The cache holds two things of a token: its normalised latent c, and the "rope" columns r that all heads share
(never rotated in this model). Keys and values are never expanded. Instead the key half of kv_b is applied to the
query, and the value half after the softmax:

    score = (Wk_h^T q_nope) . c + q_rope . r          out_h = Wv_h (sum of softmax(score) c)

which is algebraically the textbook form. Everything inside the attention is float32, also when other products use
int8 activations and when the cache has a narrower type. A chunk gives the same bits as its tokens one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.engine.forward.state import MlaState
from k3.engine.forward.weights import Weights
from k3.model.architecture import ModelConfig

Array = npt.NDArray[np.float32]


class LatentAttention:
    """The attention of one MLA layer; `name` is the tensors' prefix, e.g. "model.layers.3.self_attn"."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig) -> None:
        self._mla = config.mla
        self._q_a = weights.matrix(f"{name}.q_a_proj.weight")
        self._q_norm = weights.floats(f"{name}.q_a_layernorm.weight")
        self._q_b = weights.matrix(f"{name}.q_b_proj.weight")
        self._kv_a = weights.matrix(f"{name}.kv_a_proj_with_mqa.weight")
        self._kv_norm = weights.floats(f"{name}.kv_a_layernorm.weight")
        self._kv_b = weights.matrix(f"{name}.kv_b_proj.weight")  # per head: key rows, then value rows
        self._gate = weights.matrix(f"{name}.g_proj.weight")
        self._out = weights.matrix(f"{name}.o_proj.weight")

    def __call__(self, x: Array, state: MlaState, position: int) -> Array:
        """Return attention [S, hidden] of normed `x` [S, hidden].

        Fills rows [position, position + S) of `state`.
        """
        mla, end = self._mla, position + len(x)
        both = self._kv_a(x)
        latent = kernels.rms_norm(both[:, : mla.latent], self._kv_norm(), mla.eps)
        state.keep(position, latent, both[:, mla.latent :])
        q = self._q_b(kernels.rms_norm(self._q_a(x), self._q_norm(), mla.eps))
        q = q.reshape(len(x), mla.heads, mla.nope + mla.rope)
        q_latent = kernels.absorb_query(q[:, :, : mla.nope], self._kv_b.tensor, mla.value)
        mixed = kernels.latent_attention(
            q_latent, q[:, :, mla.nope :], state.latent[:end], state.rope[:end], mla.scale
        )
        out = kernels.expand_value(mixed, self._kv_b.tensor, mla.nope).reshape(len(x), -1)
        return self._out(kernels.gated(out, self._gate(x)))
