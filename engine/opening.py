"""From a model that was found to one that can run: its weights in memory or on their way, its experts at hand.

Called once per process from its main thread; close what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from k3 import kernels
from k3.container.memory_limit import memory_limit
from k3.engine.finding import FoundModel, begin_loading
from k3.engine.lookahead import LookAhead
from k3.engine.model import Model, ModelOptions
from k3.engine.plan import MemoryPlan, plan_memory
from k3.engine.settings import ModelSettings, SettingsError
from k3.engine.trace import Tracer
from k3.store.file import FileSource
from k3.store.route_trace import RouteHeader, RouteTraceWriter, TracedLayer
from k3.store.source import ExpertSource


def load_model(
    found: FoundModel,
    settings: ModelSettings,
    *,
    capacity: int,
    chunk: int,
    every_logit: bool,
    tracer: Tracer,
    routes: RouteTraceWriter | None,
    on_read: Callable[[str], None],
) -> tuple[Model, ExpertSource]:
    """Plan, begin and open at once. UnsupportedError when the run does not fit in memory."""
    plan = plan_memory(
        found.source, found.config, found.names, settings, memory_limit(),
        capacity=capacity, chunk=chunk, every_logit=every_logit,
    )  # fmt: skip
    begin_loading(found, plan, on_read=on_read, on_loaded=lambda: None)
    return open_model(found, settings, plan, tracer=tracer, routes=routes, on_read=on_read)


def open_model(
    found: FoundModel,
    settings: ModelSettings,
    plan: MemoryPlan,
    *,
    tracer: Tracer,
    routes: RouteTraceWriter | None,
    on_read: Callable[[str], None],
) -> tuple[Model, ExpertSource]:
    """The model that `plan` was made for, and the source of its experts, which is the caller's to close.

    A container's weights go on being read when this returns, and the model waits for each where it first needs it;
    any other source's are read here, and `on_read` is told the name of each.
    """
    if settings.threads is not None:
        kernels.set_threads(settings.threads)
    experts = _open_experts(found, settings, plan)
    try:
        model = Model(
            found.source, found.config, experts,
            model_options(settings),
            tracer=tracer, routes=routes, on_read=None if found.loading else on_read, loading=found.loading,
            look_ahead=LookAhead(experts, plan.prefetch, found.config.moe.top_k) if plan.prefetch else None,
        )  # fmt: skip
    except BaseException:
        experts.close()
        raise
    return model, experts


def _open_experts(found: FoundModel, settings: ModelSettings, plan: MemoryPlan) -> ExpertSource:
    if found.attachment is not None:
        from k3.engine.attaching import open_experts

        return open_experts(found.attachment, settings, plan)
    return FileSource(
        found.source, layers=found.config.layers, cache_bytes=plan.cache_bytes, prefetch_slots=plan.prefetch,
        direct=settings.direct, verify=settings.verify,
    )  # fmt: skip


def model_options(settings: ModelSettings) -> ModelOptions:
    """The settings that change a model's numbers, besides its weights and its configuration."""
    return ModelOptions(exact=settings.exact, keep_share=settings.keep_share)


def open_route_trace(found: FoundModel, path: Path) -> RouteTraceWriter:
    """A routing trace of this model's runs. SettingsError when it has no experts; DriveError."""
    source, config = found.source, found.config
    layers = tuple(
        TracedLayer(layer, source.expert_count(layer), source.expert_layout(layer).payload_bytes)
        for layer in config.layers
        if layer in config.moe_layers
    )
    if not layers:
        raise SettingsError("--route-trace: none of the layers that are run has experts")
    return RouteTraceWriter(path, RouteHeader(source.identity.weights, config.moe.top_k, layers))
