"""A model with every weight in memory and no prompt, for measurements and programs with their own loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from k3.base.memory_limit import memory_limit
from k3.engine.definition.settings import ModelSettings
from k3.engine.forward.model import Model
from k3.engine.launch.loading import loading_weights
from k3.engine.launch.memory_plan import plan_memory
from k3.engine.launch.model_files import OpenedModel
from k3.engine.run.model_builder import built_model
from k3.engine.run.sinks import Sinks
from k3.model.model_source import TensorLoad
from k3.store.source import ExpertSource


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A loaded model, the source of its experts, and the load of its weights."""

    model: Model
    experts: ExpertSource
    weights: TensorLoad


@contextlib.contextmanager
def ready_model(
    opened: OpenedModel, settings: ModelSettings, *, capacity: int, chunk: int, every_logit: bool = False
) -> Iterator[ReadyModel]:
    """Plan a run of `capacity` tokens, load and build the model; all is closed with the block.

    UnsupportedError when the run does not fit in memory, and the errors of reading weights.
    """
    plan = plan_memory(opened, settings, memory_limit(), capacity=capacity, chunk=chunk, every_logit=every_logit)
    plan.check()
    with loading_weights(opened) as weights, built_model(opened, settings, weights, plan, Sinks()) as built:
        built.model.load()
        yield ReadyModel(built.model, built.experts, weights)
