"""`Requests`: a routing trace as the cache sees it, one set of experts per layer and pass.

The tokens of a pass share each expert, so a set is the union of what they chose. Immutable; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3.store.routing.route_trace import RoutedPass, RouteHeader, RouteTraceReader

Numbers = npt.NDArray[np.int64]

Key = tuple[int, int]
"""Layer and expert."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Set r asks for `experts[starts[r]:starts[r + 1]]`, ascending, of layer `layers[r]`."""

    header: RouteHeader
    passes: int
    tokens: int
    layers: Numbers
    starts: Numbers
    experts: Numbers

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def sizes(self) -> Numbers:
        """Experts of each set, [R]."""
        return np.diff(self.starts)

    @property
    def keys(self) -> Numbers:
        """Each wanted expert as one number that differs from every other expert's."""
        return np.repeat(self.layers, self.sizes) << 16 | self.experts

    @classmethod
    def from_passes(cls, header: RouteHeader, passes: Iterable[RoutedPass]) -> Requests:
        """Return the sets of these passes, in order."""
        sets: list[npt.NDArray[np.uint16]] = []
        count = tokens = 0
        for routed in passes:
            sets.extend(choice.wanted() for choice in routed.choices)
            count += 1
            tokens += routed.tokens
        starts = np.cumsum([0, *(len(ids) for ids in sets)], dtype=np.int64)
        layers = np.tile(np.array([entry.layer for entry in header.layers], np.int64), count)
        experts = np.concatenate(sets or [np.empty(0, np.uint16)]).astype(np.int64)
        return cls(header, count, tokens, layers, starts, experts)

    @classmethod
    def from_trace(cls, path: Path) -> Requests:
        """Return the sets of a trace file. Raises what RouteTraceReader raises."""
        with RouteTraceReader(path) as trace:
            return cls.from_passes(trace.header, trace)

    def most_wanted(self, count: int) -> list[Key]:
        """Return the `count` experts that most sets ask for; of equals, lower layers and ids first."""
        keys, times = np.unique(self.keys, return_counts=True)
        order = np.argsort(-times, kind="stable")[:count]
        return [(int(key) >> 16, int(key) & 0xFFFF) for key in keys[order]]
