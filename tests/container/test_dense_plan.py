"""Holds up that dense tensors fill a region without gaps, and that the reads bring exactly their bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import UnsupportedError
from k3.base.pages import PAGE_BYTES
from k3.container.catalog import CatalogTensor
from k3.container.catalog_record import CatalogExtent
from k3.container.dense_plan import plan_dense
from k3.model.keys import Encoding


def tensor(name: str, extents: list[tuple[int, int, int]]) -> CatalogTensor:
    """Return a tensor of one or two extents, each (file, offset, stored bytes)."""
    weights, *scales = (CatalogExtent(file, offset, stored, stored, bytes(16)) for file, offset, stored in extents)
    return CatalogTensor(name, "BF16", (1,), Encoding.RAW, weights, scales[0] if scales else None)


@st.composite
def tensors(draw: st.DrawFn) -> list[CatalogTensor]:
    """Tensors in one or two files, mostly one after the other, with gaps and in any order."""
    ends = {0: PAGE_BYTES, 1: 0}
    found = []
    for number in range(draw(st.integers(0, 12))):
        extents = []
        for _ in range(draw(st.integers(1, 2))):
            file, gap = draw(st.sampled_from((0, 0, 0, 1))), draw(st.sampled_from((0, 0, 0, 1)))
            offset, nbytes = ends[file] + gap * PAGE_BYTES, draw(st.integers(1, 20)) * PAGE_BYTES
            extents.append((file, offset, nbytes))
            ends[file] = offset + nbytes
        found.append(tensor(f"t{number}", extents))
    return draw(st.permutations(found))


@given(tensors(), st.integers(1, 9).map(lambda pages: pages * PAGE_BYTES))
def test_every_byte_is_read_once_to_its_place(given_tensors: list[CatalogTensor], read_bytes_max: int) -> None:
    plan = plan_dense(given_tensors, read_bytes_max)
    wanted = [extent for item in given_tensors for extent in (item.weights, item.scales) if extent is not None]
    assert [placed.extent for placed in plan.extents] == wanted
    for parts in (plan.extents, plan.reads):
        ends = [part.end for part in parts]
        assert [part.start for part in parts] == [0, *ends[:-1]][: len(ends)]
        assert (ends[-1] if ends else 0) == plan.nbytes
    assert all(0 < read.nbytes <= read_bytes_max for read in plan.reads)
    source = {  # page of the region -> page of a file
        (read.start + at) // PAGE_BYTES: (read.file, read.offset + at)
        for read in plan.reads
        for at in range(0, read.nbytes, PAGE_BYTES)
    }
    for placed in plan.extents:
        for at in range(0, placed.extent.stored_bytes, PAGE_BYTES):
            assert source[(placed.start + at) // PAGE_BYTES] == (placed.extent.file, placed.extent.offset + at)


def test_neighbours_are_read_together() -> None:
    plan = plan_dense([tensor("a", [(0, 4096, 8192), (0, 12288, 4096)]), tensor("b", [(0, 16384, 4096)])], 1 << 20)
    assert [(read.offset, read.nbytes) for read in plan.reads] == [(4096, 16384)]


@pytest.mark.parametrize("extent", [(0, 100, 4096), (0, 4096, 100)])
def test_a_tensor_off_the_pages_is_refused(extent: tuple[int, int, int]) -> None:
    with pytest.raises(UnsupportedError, match="whole pages") as caught:
        plan_dense([tensor("a", [(0, 0, 4096)]), tensor("odd", [extent])])
    assert caught.value.tensor == "odd"
