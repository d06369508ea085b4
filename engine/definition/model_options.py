"""Settings that change a model's numbers, besides its weights and its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from k3.engine.definition.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """`exact` computes with float32 activations everywhere; otherwise quantized weights are multiplied with int8
    ones. `keep_share` prunes experts as described at `moe.Router`."""

    exact: bool = False
    keep_share: float = 1.0


def model_options(settings: ModelSettings) -> ModelOptions:
    """Return the options that the settings ask for."""
    return ModelOptions(exact=settings.exact, keep_share=settings.keep_share)
