"""One decoder layer: attention and MLP, each after a residual mixture and a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.base.errors import ExpertError
from k3.engine.definition.model_options import ModelOptions
from k3.engine.forward.kda import KdaAttention
from k3.engine.forward.mla import LatentAttention
from k3.engine.forward.mlp import GatedMlp
from k3.engine.forward.moe import LatentMoe, Routing
from k3.engine.forward.residual import ResidualMix
from k3.engine.forward.state import State
from k3.engine.forward.weights import Weights
from k3.model.architecture import ModelConfig
from k3.model.model_source import ModelSource
from k3.store.source import ExpertSource

Array = npt.NDArray[np.float32]


class Layer:
    """Layer `index` of a model. Weights may still be loading: each is waited for at its first use."""

    def __init__(
        self, weights: Weights, index: int, config: ModelConfig, source: ModelSource, experts: ExpertSource,
        options: ModelOptions,
    ) -> None:  # fmt: skip
        """Raise ExpertError or UnsupportedError when the layer's experts are not what `config` says."""
        name = f"model.layers.{index}"
        self.index = index
        self.starts_block = index % config.residual_block == 0
        self.is_kda = index in config.kda_layers
        self._eps = config.eps
        self.attention_mix = ResidualMix(weights, f"{name}.self_attention_res", config.eps)
        self._attention_norm = weights.floats(f"{name}.input_layernorm.weight")
        kind = KdaAttention if self.is_kda else LatentAttention
        # Any: the kind of the layer's state follows from the same list as its kind of attention.
        self._attention: Callable[[Array, Any, int], Array] = kind(weights, f"{name}.self_attn", config)
        self.mlp_mix = ResidualMix(weights, f"{name}.mlp_res", config.eps)
        self._mlp_norm = weights.floats(f"{name}.post_attention_layernorm.weight")
        self.mlp: GatedMlp | LatentMoe
        if index not in config.moe_layers:
            self.mlp = GatedMlp(weights, f"{name}.mlp", config)
            return
        _check_experts(source, index, config)
        self.mlp = LatentMoe(
            weights, f"{name}.block_sparse_moe", index, config, experts, source.expert_layout(index),
            exact=options.exact, keep_share=options.keep_share,
        )  # fmt: skip

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts, False for a dense MLP."""
        return isinstance(self.mlp, LatentMoe)

    def attend(self, mixed: Array, state: State) -> Array:
        """Return the attention of a mixture [S, hidden], to be added to the stream. Advances the layer's state."""
        normed = kernels.rms_norm(mixed, self._attention_norm(), self._eps)
        return self._attention(normed, state.layers[self.index], state.position)

    def transform(
        self, mixed: Array, on_request: Callable[[Layer, Routing], None] = lambda layer, routing: None
    ) -> Array:
        """Return the MLP of a mixture [S, hidden], to be added to the stream.

        `on_request` receives this layer and the routing once the experts are requested. Raises what the expert
        source raises.
        """
        normed = kernels.rms_norm(mixed, self._mlp_norm(), self._eps)
        return self.mlp(normed, partial(on_request, self)) if isinstance(self.mlp, LatentMoe) else self.mlp(normed)

    @property
    def can_rank_experts(self) -> bool:
        """True when the layer has experts, and the weights that `rank_experts` needs were used before."""
        return (
            isinstance(self.mlp, LatentMoe)
            and self.mlp.router.ready
            and self.mlp_mix.ready
            and self._mlp_norm.ready
        )

    def rank_experts(self, blocks: Sequence[Array], stream: Array) -> Array:
        """Return the scores [S, experts] that the router would give to `stream` [S, hidden] as it is now."""
        assert isinstance(self.mlp, LatentMoe)
        return self.mlp.router.choice(kernels.rms_norm(self.mlp_mix(blocks, stream), self._mlp_norm(), self._eps))


def _check_experts(source: ModelSource, layer: int, config: ModelConfig) -> None:
    """Raise ExpertError unless all of the layer's routed experts are in the model."""
    if layer not in source.expert_layers():
        raise ExpertError("the layer's routed experts are not in the model", layer=layer)
    count = source.expert_count(layer)
    if count != config.moe.experts:
        raise ExpertError(
            f"the layer has {count} routed experts, the configuration gives {config.moe.experts}", layer=layer
        )
