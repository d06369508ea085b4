"""The bytes of a timeline's state (`engine/forward/state.py`), computed from the configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3.model.architecture import ModelConfig

if TYPE_CHECKING:
    from k3.model.architecture import LatentType

_LATENT_NUMBER_BYTES: dict[LatentType, int] = {"f32": 4, "bf16": 2, "f16": 2}


def kda_bytes(config: ModelConfig) -> int:
    """Return the bytes of a KDA layer's state, which does not grow with tokens."""
    kda = config.kda
    return 4 * (kda.width * kda.head_dim + 3 * (kda.conv_taps - 1) * kda.width)


def mla_bytes(config: ModelConfig, capacity: int) -> int:
    """Return the bytes of an MLA layer's state for `capacity` tokens."""
    return _LATENT_NUMBER_BYTES[config.mla.cache] * capacity * (config.mla.latent + config.mla.rope)


def state_bytes(config: ModelConfig, capacity: int) -> int:
    """Return the bytes of a `State` for `capacity` tokens."""
    return sum(
        kda_bytes(config) if layer in config.kda_layers else mla_bytes(config, capacity) for layer in config.layers
    )


def scores_bytes(config: ModelConfig, capacity: int, chunk: int) -> int:
    """Return the bytes of the attention scores of one MLA layer, which a run keeps allocated.

    Scores of one token against `capacity` others always fit; of a chunk, as many tokens as fit in 16 MiB.
    """
    if all(layer in config.kda_layers for layer in config.layers):
        return 0
    token_bytes = 4 * config.mla.heads * (capacity + 16)
    return min(chunk * token_bytes, max(token_bytes, 16 << 20))
