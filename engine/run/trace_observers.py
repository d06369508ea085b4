"""Observers that record forward passes: times and bytes for --trace, the experts used for --route-trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3.engine.forward.layer import Layer
from k3.engine.forward.lookahead import LookAhead
from k3.engine.forward.moe import Routing
from k3.engine.forward.observer import PassObserver
from k3.engine.forward.state import State
from k3.engine.run.trace_file import TraceFile
from k3.store.routing.route_trace import RouteTraceWriter
from k3.store.source import ExpertSource, SourceStats

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Moment:
    """A point in time, and the counters of the expert source at it."""

    ns: int
    stats: SourceStats

    def ms_until(self, later: _Moment) -> float:
        """Return the milliseconds from here to a later moment."""
        return round((later.ns - self.ns) / 1e6, 3)


class TraceObserver(PassObserver):
    """An observer that writes a record for each layer and each pass to a `TraceFile`."""

    def __init__(self, file: TraceFile, experts: ExpertSource, look_ahead: LookAhead | None) -> None:
        """Read counters of `experts`, the model's source; `look_ahead`, if any, is called before this observer."""
        self._file = file
        self._experts = experts
        self._look_ahead = look_ahead
        self._passes = 0
        self._begun = self._layer_begun = self._middle = self._layers_done = self._now()
        self._routing: Routing | None = None
        self._place: dict[str, int] = {}

    def _now(self) -> _Moment:
        return _Moment(time.monotonic_ns(), self._experts.stats())

    def pass_begun(self, state: State, tokens: int) -> None:
        """See `PassObserver.pass_begun`."""
        self._place = {"pass": self._passes, "position": state.position, "tokens": tokens}
        self._begun = self._layer_begun = self._now()

    def before_mlp(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """See `PassObserver.before_mlp`."""
        self._middle, self._routing = self._now(), None

    def experts_requested(self, layer: Layer, routing: Routing) -> None:
        """See `PassObserver.experts_requested`."""
        self._routing = routing

    def layer_done(self, layer: Layer) -> None:
        """See `PassObserver.layer_done`."""
        now, routing = self._now(), self._routing
        self._file.record(
            "layer",
            **self._place,
            layer=layer.index,
            attention="kda" if layer.is_kda else "mla",
            mlp="moe" if layer.has_experts else "dense",
            attention_ms=self._layer_begun.ms_until(self._middle),
            mlp_ms=self._middle.ms_until(now),
            wait_ms=round((now.stats.wait_ns - self._middle.stats.wait_ns) / 1e6, 3),
            read_bytes=now.stats.read_bytes - self._layer_begun.stats.read_bytes,
            experts=None if routing is None else routing.per_token(),
            foreseen=None if routing is None or self._look_ahead is None else self._look_ahead.last,
        )
        self._layer_begun = now

    def before_head(self) -> None:
        """See `PassObserver.before_head`."""
        self._layers_done = self._now()

    def pass_done(self) -> None:
        """See `PassObserver.pass_done`. DriveError when the records cannot be written."""
        now = self._now()
        self._file.record(
            "pass",
            **self._place,
            ms=self._begun.ms_until(now),
            head_ms=self._layers_done.ms_until(now),
            read_bytes=now.stats.read_bytes - self._begun.stats.read_bytes,
        )
        self._file.end_pass()
        self._passes += 1


class RouteObserver(PassObserver):
    """An observer that writes the experts that each token uses to a routing trace."""

    def __init__(self, writer: RouteTraceWriter) -> None:
        self._writer = writer
        self._position = 0

    def pass_begun(self, state: State, tokens: int) -> None:
        """See `PassObserver.pass_begun`."""
        self._position = state.position

    def experts_requested(self, layer: Layer, routing: Routing) -> None:
        """See `PassObserver.experts_requested`."""
        self._writer.add(layer.index, routing.kept.sum(axis=-1), routing.experts[routing.kept])

    def pass_done(self) -> None:
        """See `PassObserver.pass_done`. DriveError when the pass cannot be written."""
        self._writer.end_pass(self._position)


@dataclass(slots=True)
class LastRouting(PassObserver):
    """An observer that keeps the routing of the latest pass, by layer. For tests and measurements."""

    routing: dict[int, Routing] = field(default_factory=dict)

    def experts_requested(self, layer: Layer, routing: Routing) -> None:
        """See `PassObserver.experts_requested`."""
        self.routing[layer.index] = routing
