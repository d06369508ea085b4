"""Attention Residuals: attention and MLP each read a learned mixture of the stream and of its earlier blocks.

`blocks` are the streams banked at block starts (by depth, begun anew in every forward pass), and `stream` is the
running sum since the last of them. The weights of the mixture are a softmax over one learned query against the
direction of each entry. All float32; a token's result depends on that token alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.engine.forward.deferred import Deferred
from k3.engine.forward.weights import Weights

Array = npt.NDArray[np.float32]


class ResidualMix:
    """The mixture before one attention or MLP. `name` is the tensors' prefix, e.g. "model.layers.3.mlp_res"."""

    def __init__(self, weights: Weights, name: str, eps: float) -> None:
        norm, projection = weights.floats(f"{name}_norm.weight"), weights.floats(f"{name}_proj.weight")
        self._query: Deferred[Array] = Deferred(lambda: norm() * projection()[0])
        self._eps = eps

    @property
    def ready(self) -> bool:
        """True once the mixture has been used."""
        return self._query.ready

    def __call__(self, blocks: Sequence[Array], stream: Array) -> Array:
        """Return the mixture [S, hidden] of blocks and stream.

        `blocks` are arrays [S, hidden], the oldest first; `stream` is [S, hidden].
        """
        query = self._query()  # also where it is not used, so that a damaged tensor is always an error
        return kernels.residual_mix([*blocks, stream], query, self._eps) if blocks else stream
