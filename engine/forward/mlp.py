"""SiTU-gated MLP: that of a dense layer, and that of the shared experts, which are stored as one wide MLP."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.engine.forward.weights import Weights
from k3.model.architecture import ModelConfig

Array = npt.NDArray[np.float32]


class GatedMlp:
    """The product down(situ(gate x, up x)). `name` is the common prefix of the tensors."""

    def __init__(self, weights: Weights, name: str, config: ModelConfig) -> None:
        self._gate = weights.matrix(f"{name}.gate_proj.weight")
        self._up = weights.matrix(f"{name}.up_proj.weight")
        self._down = weights.matrix(f"{name}.down_proj.weight")
        self._betas = config.situ_beta, config.situ_linear_beta

    def __call__(self, x: Array) -> Array:
        """Return the MLP [S, hidden] of `x` [S, hidden]."""
        beta, linear_beta = self._betas
        return self._down(kernels.situ(self._gate(x), self._up(x), beta, linear_beta))
