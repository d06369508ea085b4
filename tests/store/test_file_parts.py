"""Holds up that an expert read in parts is the expert, and that a part that fails costs one more read."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3.base.errors import DamageError, DriveError
from k3.base.pages import PAGE_BYTES
from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.store.lending.file_source import FileSource
from tests.support.containers import Built, build_container, flip
from tests.support.faults import Fault
from tests.support.plane_faults import PlaneFaults

EXPERTS = 5


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home")


def take_one(source: FileSource, expert: int) -> bytes:
    (lease,) = source.lease(1, [expert])
    with lease:
        return lease.payload.tobytes()


@pytest.mark.parametrize("kind", ["eio", "flip"])
def test_one_bad_part_costs_one_read_of_the_whole(built: Built, model: Container, kind: str) -> None:
    path, extent = built.piece(1, 2)
    source = FileSource(model, part_bytes=PAGE_BYTES)
    PlaneFaults(source, Fault(kind, path, extent.offset + 2 * PAGE_BYTES + 5))  # type: ignore[arg-type]
    assert take_one(source, 2) == built.payloads[ExpertKey(1, 2)]
    stats = source.stats()
    assert (stats.reads, stats.retries, stats.read_bytes) == (2, 1, 2 * extent.stored_bytes)
    source.close()


def test_a_part_that_stays_bad_names_its_place(built: Built, model: Container) -> None:
    path, extent = built.piece(1, 2)
    bad = extent.offset + 2 * PAGE_BYTES
    source = FileSource(model, part_bytes=PAGE_BYTES)
    PlaneFaults(source, Fault("eio", path, bad, times=2))
    with pytest.raises(DriveError) as raised:
        take_one(source, 2)
    assert (raised.value.path, raised.value.layer, raised.value.expert) == (str(path), 1, 2)
    flip(path, bad)
    with pytest.raises(DamageError, match="instead of"):
        take_one(source, 2)
    flip(path, bad)
    assert take_one(source, 2) == built.payloads[ExpertKey(1, 2)]
    source.close()


def test_experts_come_one_after_the_other(built: Built, model: Container) -> None:
    """All threads work on the first expert before any is at the second: it comes while the others stall."""
    path, extent = built.piece(1, 1)
    source = FileSource(model, part_bytes=PAGE_BYTES, threads=2)
    faults = PlaneFaults(source, Fault("stall", path, extent.offset, times=100))
    stream = source.lease(1, [0, 1])
    assert next(stream).expert == 0
    faults.resume()
    assert next(stream).expert == 1
    source.close()
