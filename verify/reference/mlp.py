"""K3's feed-forward half: SiTU-gated MLPs, and the latent mixture of experts.

Float32; N tokens, K experts per token. Pure apart from reading experts; any thread that may use the weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3.verify.reference.arithmetic import Array, linear, rms_norm, sigmoid, situ
from k3.verify.reference.reference_config import ReferenceConfig
from k3.verify.reference.reference_weights import Expert, LayerWeights, ReferenceWeights

Ids = npt.NDArray[np.int64]


def glu(x: Array, gate: Array, up: Array, down: Array, config: ReferenceConfig) -> Array:
    """Return the output [N, D] of a gated MLP for `x` [N, D]."""
    inner = situ(linear(x, gate), linear(x, up), config.situ_beta, config.situ_linear_beta)
    return linear(inner, down)


def dense_mlp(x: Array, w: LayerWeights, config: ReferenceConfig) -> Array:
    """Return the output of the MLP whose matrices are gate_proj, up_proj and down_proj below `w`."""
    return glu(x, w["gate_proj"], w["up_proj"], w["down_proj"], config)


def route(x: Array, w: LayerWeights, config: ReferenceConfig) -> tuple[Ids, Array]:
    """Return the experts of each token in ascending id [N, K], and their weights [N, K].

    The correction bias takes part in the choice only. Of equal scores the lower id is taken.
    """
    scores = sigmoid(linear(x, w["gate"]))
    ranked = np.argsort(-(scores + w["gate.e_score_correction_bias"]), axis=-1, kind="stable")
    ids = np.sort(ranked[:, : config.experts_per_token], axis=-1)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if config.renormalize:
        weights = weights / (np.sum(weights, axis=-1, keepdims=True) + np.float32(1e-20))
    return ids, weights * np.float32(config.routed_scaling)


def latent_moe(
    x: Array, layer: int, weights: ReferenceWeights, config: ReferenceConfig
) -> tuple[Array, Ids, Array]:
    """Return the output of the experts for `x` [N, D], the chosen ids [N, K] and their weights [N, K].

    The router and the shared experts see the full width; the routed experts work on a projection of it, and
    their weighted sum (in ascending id) is normed before it is projected back.
    """
    w = weights.layer(layer).below("block_sparse_moe")
    ids, shares = route(x, w, config)

    z = linear(x, w["routed_expert_down_proj"])
    total = np.zeros_like(z)
    for number in np.unique(ids):
        tokens, slots = np.nonzero(ids == number)
        expert: Expert = weights.expert(layer, int(number))
        out = glu(z[tokens], expert.w1, expert.w3, expert.w2, config)
        total[tokens] += shares[tokens, slots][:, None] * out
    total = rms_norm(total, w["routed_expert_norm"], config.rms_norm_eps)
    routed = linear(total, w["routed_expert_up_proj"])

    return routed + dense_mlp(x, w.below("shared_experts"), config), ids, shares
