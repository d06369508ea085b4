"""The place of each dense tensor in one region of memory, and the reads that fill the region. Pure; any thread.

The region has the tensors in the given order, which is the order of use. Extents that are adjacent in a file are
therefore adjacent in the region too, and one read may cover several of them: reads end at a size, not at a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from k3.base.errors import UnsupportedError
from k3.base.pages import PAGE_BYTES
from k3.container.catalog import CatalogTensor
from k3.container.catalog_record import CatalogExtent

READ_BYTES = 8 << 20
"""Limit of one read: long enough for a drive's full rate, short enough that a tensor need not wait long for its
end."""


@dataclass(frozen=True, slots=True)
class PlacedExtent:
    """One extent of a tensor; `start` is its offset in the region."""

    tensor: str
    extent: CatalogExtent
    start: int

    @property
    def end(self) -> int:
        """The first offset of the region after the extent."""
        return self.start + self.extent.stored_bytes


@dataclass(frozen=True, slots=True)
class DenseRead:
    """One read: `nbytes` from `offset` of data file `file` to `start` in the region. All are whole pages."""

    file: int
    offset: int
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first offset of the region after the read."""
        return self.start + self.nbytes


@dataclass(frozen=True, slots=True)
class DensePlan:
    """The region of `nbytes` bytes; `extents` and `reads` each cover it without gaps, ascending."""

    nbytes: int
    extents: tuple[PlacedExtent, ...]
    reads: tuple[DenseRead, ...]


def plan_dense(tensors: Sequence[CatalogTensor], read_bytes_max: int = READ_BYTES) -> DensePlan:
    """Return the plan for these tensors. Raises UnsupportedError for one that does not lie on whole pages."""
    assert read_bytes_max % PAGE_BYTES == 0
    extents = tuple(_placed(tensors))
    reads = []
    for run in _runs(extents):
        first = run[0]
        for done in range(0, run[-1].end - first.start, read_bytes_max):
            nbytes = min(read_bytes_max, run[-1].end - first.start - done)
            reads.append(DenseRead(first.extent.file, first.extent.offset + done, first.start + done, nbytes))
    return DensePlan(extents[-1].end if extents else 0, extents, tuple(reads))


def _placed(tensors: Sequence[CatalogTensor]) -> Iterator[PlacedExtent]:
    end = 0
    for tensor in tensors:
        for extent in (tensor.weights, tensor.scales):
            if extent is None:
                continue
            if extent.offset % PAGE_BYTES or extent.stored_bytes % PAGE_BYTES:
                raise UnsupportedError(
                    "a dense tensor does not lie on whole pages", tensor=tensor.name, offset=extent.offset
                )
            yield PlacedExtent(tensor.name, extent, end)
            end += extent.stored_bytes


def _runs(extents: Sequence[PlacedExtent]) -> list[list[PlacedExtent]]:
    """Return the extents in groups; those of one group are adjacent in one file."""
    runs: list[list[PlacedExtent]] = []
    for placed in extents:
        last = runs[-1][-1].extent if runs else None
        extent = placed.extent
        if last is not None and (extent.file, extent.offset) == (last.file, last.offset + last.stored_bytes):
            runs[-1].append(placed)
        else:
            runs.append([placed])
    return runs
