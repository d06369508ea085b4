"""Attention Residuals: each sub-layer reads a learned mixture of the stream and of its earlier blocks.

`blocks` are the streams banked at block starts (depth-wise, made anew in every forward pass) and `stream` is
the running sum since the last of them. The mixture's weights are a softmax over them of one learned query
against each entry's direction. All float32; a token's result depends on that token alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.engine.weights import Weights

Array = npt.NDArray[np.float32]


class ResidualMix:
    """The mixture in front of one sub-layer, `name` being e.g. "model.layers.3.mlp_res"."""

    def __init__(self, weights: Weights, name: str, eps: float) -> None:
        self._query: Array = weights.floats(f"{name}_norm.weight") * weights.floats(f"{name}_proj.weight")[0]
        self._eps = eps

    def __call__(self, blocks: Sequence[Array], stream: Array) -> Array:
        """blocks: arrays [S, hidden], oldest first; stream [S, hidden] -> [S, hidden]."""
        if not blocks:
            return stream
        return kernels.residual_mix([*blocks, stream], self._query, self._eps)
