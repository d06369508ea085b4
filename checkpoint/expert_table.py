"""The places of the routed experts of one layer of a snapshot: shard and offset of every part.

K3 has half a million expert tensors; as objects they would take 300 MB and seconds to create. So a layer is a
table of numbers, and names, tensors and extents are created on request.

Tables are immutable; safe to use from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.base.errors import ExpertError
from k3.checkpoint.shard import Shard, SourceTensor
from k3.model.keys import ExpertLayout, ExpertName, Extent


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTable:
    """The experts of one layer: for each expert (row) and part (column) the shard and the offset in it."""

    layer: int
    layout: ExpertLayout
    shards: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    @property
    def count(self) -> int:
        """Number of experts; ids run from 0."""
        return len(self.offsets)

    def extents(self, expert: int, shards: Sequence[Shard]) -> tuple[Extent, ...]:
        """Return an expert's extents in payload order, with adjacent parts in one extent.

        Raises ExpertError for an unknown id.
        """
        if not 0 <= expert < self.count:
            raise ExpertError(
                f"there is no such expert; the layer has {self.count}",
                path=shards[int(self.shards[0, 0])].path,
                layer=self.layer,
                expert=expert,
                advice="Expert ids run from 0",
            )
        runs: list[tuple[int, int, int]] = []
        places = zip(self.shards[expert].tolist(), self.offsets[expert].tolist(), self.layout.parts, strict=True)
        for shard, offset, part in places:
            if runs and runs[-1][0] == shard and runs[-1][1] + runs[-1][2] == offset:
                runs[-1] = (shard, runs[-1][1], runs[-1][2] + part.nbytes)
            else:
                runs.append((shard, offset, part.nbytes))
        return tuple(Extent(shards[shard].path, offset, length, length) for shard, offset, length in runs)

    def find(self, name: ExpertName) -> SourceTensor | None:
        """Return the tensor of this name, None when the layer has none."""
        if name.prefix != self.layout.prefix or not 0 <= name.key.expert < self.count:
            return None
        for column, part in enumerate(self.layout.parts):
            if part.name == name.part:
                return self._tensor(name.key.expert, column)
        return None

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors, by expert, then part."""
        for expert in range(self.count):
            for part in self.layout.parts:
                yield f"{self.layout.prefix}.{expert}.{part.name}"

    def in_shard(self, shard: int) -> Iterator[SourceTensor]:
        """Yield the layer's tensors in one shard, by expert, then part."""
        for expert, column in np.argwhere(self.shards == shard).tolist():
            yield self._tensor(expert, column)

    def _tensor(self, expert: int, column: int) -> SourceTensor:
        part = self.layout.parts[column]
        return SourceTensor(
            f"{self.layout.prefix}.{expert}.{part.name}",
            part.dtype,
            part.shape,
            int(self.shards[expert, column]),
            int(self.offsets[expert, column]),
            part.nbytes,
        )
