"""Kimi Delta Attention: a recurrent memory per head, written by the delta rule and forgotten per channel.

For each head, with the memory S [key, value], in float32:

    S = diag(exp g) S          every key channel decays by its own gate
    e = beta (v - S^T k)       what the memory does not yet say about k
    S = S + k e^T
    o = S^T q                  read after the write

q, k and v pass a short causal convolution first; the output is normalised per head, then gated. The
projections of a chunk's tokens share matrix products; the recurrence takes one token after the other, so a
chunk gives the same bits as its tokens one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.container.errors import SourceError
from k3.engine.config import L2_NORM_EPS, ModelConfig
from k3.engine.state import KdaState
from k3.engine.weights import Weights

Array = npt.NDArray[np.float32]


class KdaAttention:
    """The attention of one KDA layer; `name` is the tensors' prefix, e.g. "model.layers.0.self_attn"."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig) -> None:
        kda = config.kda
        self._kda = kda
        self._norm_eps = config.eps
        self._qkv = [weights.matrix(f"{name}.{stream}_proj.weight") for stream in "qkv"]
        self._conv = [weights.floats(f"{name}.{stream}_conv1d.weight") for stream in "qkv"]
        self._f_a = weights.matrix(f"{name}.f_a_proj.weight", exact=True)
        self._f_b = weights.matrix(f"{name}.f_b_proj.weight", exact=True)
        padded = weights.floats(f"{name}.A_log")
        self._log_rate = _unpadded(padded, kda.heads, f"{weights.prefix}{name}.A_log")
        self._gate_bias = weights.floats(f"{name}.dt_bias")
        self._beta = weights.matrix(f"{name}.b_proj.weight", exact=True)
        self._out_norm = weights.floats(f"{name}.o_norm.weight")
        self._gate = weights.matrix(f"{name}.g_proj.weight")
        self._out = weights.matrix(f"{name}.o_proj.weight")

    def __call__(self, x: Array, state: KdaState, position: int) -> Array:
        """x [S, hidden], normed -> [S, hidden]. Advances `state` by S tokens; `position` plays no part."""
        heads = (len(x), self._kda.heads, self._kda.head_dim)
        q, k, v = (
            kernels.short_conv(window, project(x), taps).reshape(heads)
            for window, project, taps in zip(state.windows, self._qkv, self._conv, strict=True)
        )
        query: Array = kernels.l2_normalize(q, L2_NORM_EPS) * np.float32(self._kda.head_dim**-0.5)
        key: Array = kernels.l2_normalize(k, L2_NORM_EPS)
        f = self._f_b(self._f_a(x)).reshape(heads)
        log_decay = kernels.kda_gate(f, self._log_rate, self._gate_bias, self._kda.gate_lower_bound)
        beta = kernels.sigmoid(self._beta(x))
        read = kernels.kda_step(state.memory, query, key, v, log_decay, beta)
        normed = kernels.rms_norm(read, self._out_norm, self._norm_eps).reshape(len(x), -1)
        return self._out(normed * kernels.sigmoid(self._gate(x)))


def _unpadded(values: Array, heads: int, name: str) -> Array:
    """The first `heads` values. SourceError unless everything behind them is zero."""
    if values[heads:].any():
        raise SourceError(
            f"{len(values)} values for {heads} heads, and those beyond the heads are not zero", tensor=name
        )
    return values[:heads]
