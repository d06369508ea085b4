"""Views of a container whose experts have no digests, or an extent for each part, for tests of sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3.container.reader import Container
from k3.model.keys import Extent


class ModelView:
    """A `ModelSource` that passes every call to a container; subclasses change `expert_extents`."""

    def __init__(self, container: Container) -> None:
        self._container = container

    def __getattr__(self, name: str) -> Any:
        return getattr(self._container, name)


class Undigested(ModelView):
    """A view whose extents have no digest, like those of a snapshot."""

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        extents = self._container.expert_extents(layer, expert)
        return tuple(replace(extent, digest=None) for extent in extents)


class Scattered(ModelView):
    """A view with one extent per expert part, without digests. Each expert must lie in one extent."""

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        first = self._container.expert_extents(layer, expert)[0]
        return tuple(
            Extent(first.path, first.offset + part.offset, part.nbytes, part.nbytes)
            for part in self._container.expert_layout(layer).parts
        )
