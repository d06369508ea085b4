"""Options that change the numbers a model computes, besides its weights and its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from k3.engine.definition.settings import ModelSettings


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Choices of arithmetic.

    `exact` computes with float32 activations everywhere; without it, activations are rounded to int8 where
    weights are quantized. `keep_share` prunes experts as described at `moe.Router`.
    """

    exact: bool = False
    keep_share: float = 1.0


def model_options(settings: ModelSettings) -> ModelOptions:
    """Return the options that the settings ask for."""
    return ModelOptions(exact=settings.exact, keep_share=settings.keep_share)
