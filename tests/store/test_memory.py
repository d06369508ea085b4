"""Holds up: the memory source keeps every promise of an expert source."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from k3.model.keys import ExpertKey
from k3.store.lending.memory_source import MemorySource
from tests.support.source_suite import Opened, SourceSuite

PAYLOADS = {
    ExpertKey(layer, expert): np.random.default_rng([layer, expert]).bytes(1000 + layer)
    for layer in (1, 4)
    for expert in range(6)
}


class TestMemorySource(SourceSuite):
    @pytest.fixture
    def opened(self) -> Iterator[Opened]:
        source = MemorySource(PAYLOADS)
        yield Opened(source, PAYLOADS, lambda *, debug=False: MemorySource(PAYLOADS, debug=debug))
        source.close()


def test_it_counts_what_is_held() -> None:
    source = MemorySource(PAYLOADS)
    stream = source.lease(1, [0, 1, 2])
    first = next(stream)
    second = next(stream)
    assert source.held == 2
    first.release()
    first.release()
    second.release()
    assert source.held == 0


def test_it_keeps_a_copy() -> None:
    given = np.arange(10, dtype=np.uint8)
    source = MemorySource({ExpertKey(0, 0): given})
    given[:] = 0
    (lease,) = source.lease(0, [0])
    assert lease.payload.tolist() == list(range(10))


def test_gaps_in_the_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="without gaps"):
        MemorySource({ExpertKey(0, 1): b"x"})
