"""The bytes of a timeline's state: what `engine/forward/state.py` allocates, by the configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3.model.architecture import ModelConfig

if TYPE_CHECKING:
    from k3.model.architecture import LatentType

_LATENT_NUMBER_BYTES: dict[LatentType, int] = {"f32": 4, "bf16": 2, "f16": 2}


def kda_bytes(config: ModelConfig) -> int:
    """Memory of a KDA layer's state, which does not grow."""
    kda = config.kda
    return 4 * (kda.width * kda.head_dim + 3 * (kda.conv_taps - 1) * kda.width)


def mla_bytes(config: ModelConfig, capacity: int) -> int:
    """Memory of an MLA layer's state of `capacity` tokens."""
    return _LATENT_NUMBER_BYTES[config.mla.cache] * capacity * (config.mla.latent + config.mla.rope)


def state_bytes(config: ModelConfig, capacity: int) -> int:
    """Memory that a `State` of `capacity` tokens takes."""
    return sum(
        kda_bytes(config) if layer in config.kda_layers else mla_bytes(config, capacity) for layer in config.layers
    )


def scores_bytes(config: ModelConfig, capacity: int, chunk: int) -> int:
    """Memory for the scores of one MLA layer, which a run holds on to: of one token against `capacity` others, and
    of more of a chunk's tokens within 16 MiB."""
    if all(layer in config.kda_layers for layer in config.layers):
        return 0
    token_bytes = 4 * config.mla.heads * (capacity + 16)
    return min(chunk * token_bytes, max(token_bytes, 16 << 20))
