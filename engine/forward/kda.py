"""Kimi Delta Attention: a recurrent memory per head, written by the delta rule and forgotten per channel.

For each head, with the memory S [key, value], in float32:

    S = diag(exp g) S          every key channel decays by its own gate
    e = beta (v - S^T k)       the error of the memory's prediction for k
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
from k3.base.errors import SourceError
from k3.engine.forward.deferred import Deferred
from k3.engine.forward.state import KdaState
from k3.engine.forward.weights import Weights
from k3.model.architecture import L2_NORM_EPS, ModelConfig

Array = npt.NDArray[np.float32]


class KdaAttention:
    """The attention of one KDA layer; `name` is the tensors' prefix, e.g. "model.layers.0.self_attn"."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig) -> None:
        self._qkv = [weights.matrix(f"{name}.{stream}_proj.weight") for stream in "qkv"]
        self._f_a = weights.matrix(f"{name}.f_a_proj.weight", exact=True)
        self._f_b = weights.matrix(f"{name}.f_b_proj.weight", exact=True)
        self._beta = weights.matrix(f"{name}.b_proj.weight", exact=True)
        self._vectors = _vectors(weights, name, config)
        self._gate = weights.matrix(f"{name}.g_proj.weight")
        self._out = weights.matrix(f"{name}.o_proj.weight")

    def __call__(self, x: Array, state: KdaState, position: int) -> Array:
        """Return attention [S, hidden] of normed `x` [S, hidden], and advance `state` by S tokens.

        `position` is not used.
        """
        vectors = self._vectors()
        q, k, v = (project(x) for project in self._qkv)
        decay, beta, gate = self._f_b(self._f_a(x)), self._beta(x), self._gate(x)
        return self._out(kernels.kda_heads(q, k, v, decay, beta, gate, state.windows, state.memory, vectors))


def _vectors(weights: Weights, name: str, config: ModelConfig) -> Deferred[kernels.KdaVectors]:
    """Return the layer's convolutions, gates and norm in the kernel's form."""
    a_log, dt_bias = weights.floats(f"{name}.A_log"), weights.floats(f"{name}.dt_bias")
    taps = [weights.floats(f"{name}.{stream}_conv1d.weight") for stream in "qkv"]
    norm = weights.floats(f"{name}.o_norm.weight")

    def make() -> kernels.KdaVectors:
        return kernels.KdaVectors(
            # The kernel reads the taps of neighbouring channels together.
            conv=np.ascontiguousarray(np.stack([tap()[:, 0].T for tap in taps])),
            a_log=_unpadded(a_log(), config.kda.heads, f"{weights.prefix}{name}.A_log"),
            dt_bias=dt_bias(),
            norm=norm(),
            lower_bound=config.kda.gate_lower_bound,
            l2_eps=L2_NORM_EPS,
            norm_eps=config.eps,
        )

    return Deferred(make)


def _unpadded(values: Array, heads: int, name: str) -> Array:
    """Return the first `heads` values. SourceError unless all values after them are zero."""
    if values[heads:].any():
        raise SourceError(
            f"{len(values)} values for {heads} heads, and those beyond the heads are not zero", tensor=name
        )
    return values[:heads]
