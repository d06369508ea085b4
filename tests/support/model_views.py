"""Other faces of a container's experts for source tests: without digests, scattered, or counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3.container.reader import Container
from k3.model.keys import Extent


class ModelView:
    """A `ModelSource` that passes everything to a container, except where an expert lies."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)


class Undigested(ModelView):
    """Like a raw snapshot: nobody knows a digest."""

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        extents = self._container.expert_extents(layer, expert)
        return tuple(replace(extent, digest=None) for extent in extents)


class Scattered(ModelView):
    """One extent per part: a shard whose tensors lie in no useful order. Only for contiguous experts."""

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        first = self._container.expert_extents(layer, expert)[0]
        return tuple(
            Extent(first.path, first.offset + part.offset, part.nbytes, part.nbytes)
            for part in self._container.expert_layout(layer).parts
        )
