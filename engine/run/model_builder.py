"""Build a model over weights that are loading, with the source of its experts. Called from the main thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from k3 import kernels
from k3.engine.definition.model_options import model_options
from k3.engine.definition.settings import ModelSettings
from k3.engine.forward.lookahead import LookAhead
from k3.engine.forward.model import Model
from k3.engine.forward.observer import Observers, PassObserver
from k3.engine.launch.memory_plan import MemoryPlan
from k3.engine.launch.model_files import OpenedModel
from k3.engine.run.sinks import Sinks
from k3.engine.run.trace_observers import RouteObserver, TraceObserver
from k3.model.model_source import TensorLoad
from k3.store.lending.file_source import FileSource
from k3.store.source import ExpertSource


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model that can run, and the source of its experts."""

    model: Model
    experts: ExpertSource


@contextlib.contextmanager
def built_model(
    opened: OpenedModel, settings: ModelSettings, weights: TensorLoad, plan: MemoryPlan, sinks: Sinks
) -> Iterator[BuiltModel]:
    """Build the model that `plan` was made for; the source of its experts is closed with the block.

    Weights continue to load; the model waits for each at its first use.
    """
    if settings.threads is not None:
        kernels.set_threads(settings.threads)
    with contextlib.closing(_open_experts(opened, settings, plan)) as experts:
        model = Model(opened.source, opened.config, experts, model_options(settings), weights)
        model.observer = _observers(model, experts, plan, sinks)
        yield BuiltModel(model, experts)


def _observers(model: Model, experts: ExpertSource, plan: MemoryPlan, sinks: Sinks) -> PassObserver:
    """Return look-ahead and the traces that were asked for as one observer."""
    look_ahead = None
    if plan.prefetch:
        look_ahead = LookAhead(experts, plan.prefetch, model.config.moe.top_k, model.layers)
    observers: list[PassObserver] = [] if look_ahead is None else [look_ahead]
    if sinks.trace is not None:
        observers.append(TraceObserver(sinks.trace, experts, look_ahead))
    if sinks.routes is not None:
        observers.append(RouteObserver(sinks.routes))
    return observers[0] if len(observers) == 1 else Observers(observers)


def _open_experts(opened: OpenedModel, settings: ModelSettings, plan: MemoryPlan) -> ExpertSource:
    """Open the daemon's experts if the model comes from one, else the files."""
    if opened.attachment is not None:
        from k3.engine.launch.daemon_attachment import open_experts

        return open_experts(
            opened.attachment, settings, cache_bytes=plan.cache_bytes, prefetch_slots=plan.prefetch
        )
    return FileSource(
        opened.source, layers=opened.config.layers, cache_bytes=plan.cache_bytes, prefetch_slots=plan.prefetch,
        direct=settings.direct, verify=settings.verify,
    )  # fmt: skip
