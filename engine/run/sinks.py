"""The files that a run writes besides stdout: logits, trace, routing trace. Main thread only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k3.engine.definition.settings import RunSettings, SettingsError
from k3.engine.launch.model_files import OpenedModel
from k3.engine.run.logits_file import LogitsFile
from k3.engine.run.trace_file import TraceFile
from k3.store.routing.route_trace import RouteHeader, RouteTraceWriter, TracedLayer


@dataclass(frozen=True, slots=True)
class Sinks:
    """The files that were asked for, open. The caller publishes `logits` when the run has ended well."""

    logits: LogitsFile | None = None
    trace: TraceFile | None = None
    routes: RouteTraceWriter | None = None


@contextlib.contextmanager
def open_sinks(opened: OpenedModel, settings: RunSettings) -> Iterator[Sinks]:
    """Open the files that the settings ask for. SettingsError, DriveError.

    The routing trace is published at the end of the block, also after Ctrl-C.
    """
    with contextlib.ExitStack() as stack:
        trace = None if settings.trace is None else stack.enter_context(TraceFile(settings.trace))
        logits = None if settings.logits is None else stack.enter_context(LogitsFile(settings.logits))
        if settings.route_trace is None:
            yield Sinks(logits, trace)
            return
        routes = stack.enter_context(open_route_trace(opened, settings.route_trace))
        try:
            yield Sinks(logits, trace, routes)
        except KeyboardInterrupt:
            if not routes.torn:
                routes.publish()
            raise
        routes.publish()


def open_route_trace(opened: OpenedModel, path: Path) -> RouteTraceWriter:
    """Open a routing trace for runs of this model. SettingsError when no layer has experts; DriveError."""
    source, config = opened.source, opened.config
    layers = tuple(
        TracedLayer(layer, source.expert_count(layer), source.expert_layout(layer).payload_bytes)
        for layer in config.layers
        if layer in config.moe_layers
    )
    if not layers:
        raise SettingsError("--route-trace: no layer of this run has experts")
    return RouteTraceWriter(path, RouteHeader(source.identity.weights, config.moe.top_k, layers))
