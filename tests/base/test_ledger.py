"""Holds up: a ledger is complete only when every required unit was proven to its last byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.ledger import Ledger, Tally, distinct_bytes

SIZES = st.dictionaries(st.integers(0, 30), st.integers(0, 20), min_size=1, max_size=12)


@given(SIZES, st.data())
def test_any_unit_that_was_left_out_leaves_it_open(sizes: dict[int, int], data: st.DataObject) -> None:
    settled = data.draw(st.sets(st.sampled_from(sorted(sizes))))
    tally = Tally(sizes)
    for unit in settled:
        tally.settle(unit)
    ledger = tally.ledger()
    assert ledger.open() == [unit for unit in sizes if unit not in settled]
    assert ledger.complete is (settled == set(sizes))
    assert ledger.proven_units == len(settled)
    assert ledger.proven_bytes == sum(sizes[unit] for unit in settled)
    assert ledger.required_bytes == sum(sizes.values())


@given(SIZES, st.data())
def test_one_byte_less_is_not_enough(sizes: dict[int, int], data: st.DataObject) -> None:
    """Parts in any order, entered more than once; all of them but one byte."""
    unit = data.draw(st.sampled_from(sorted(sizes)))
    nbytes = sizes[unit]
    tally = Tally(sizes)
    for other in sizes:
        if other != unit:
            tally.settle(other)
    missing = data.draw(st.integers(0, max(0, nbytes - 1)))
    runs = [(byte, byte + 1) for byte in range(nbytes) if byte != missing]
    for start, stop in data.draw(st.permutations(runs + runs[:3])):
        tally.settle(unit, start, stop)
    assert tally.ledger().open() == [unit]
    if nbytes:
        assert tally.ledger().proven.get(unit, 0) == nbytes - 1
        tally.settle(unit, missing, missing + 1)
    else:
        tally.settle(unit)
    assert tally.ledger().complete


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12))
def test_bytes_count_once(spans: list[tuple[int, int]]) -> None:
    runs = [(start, start + nbytes) for start, nbytes in spans]
    assert distinct_bytes(runs) == len({byte for start, stop in runs for byte in range(start, stop)})


def test_what_was_not_required_proves_nothing() -> None:
    tally = Tally({"a": 10})
    for unit, start, stop in (("b", 0, 1), ("a", 5, 11), ("a", -1, 3), ("a", 4, 3)):
        with pytest.raises(ValueError, match="were not required"):
            tally.settle(unit, start, stop)
    with pytest.raises(ValueError, match="required with 10 and with 11"):
        tally.require("a", 11)
    assert not tally.ledger().complete


def test_more_than_was_required_is_not_what_was_required() -> None:
    assert not Ledger({"a": 10}, {"a": 11}).complete
    assert not Ledger({"a": 0}, {}).complete
    assert Ledger({"a": 0}, {"a": 0}).complete
    assert Ledger({"a": 10}, {"a": 10, "b": 5}).proven_bytes == 10


def test_a_ledger_does_not_change_with_its_tally() -> None:
    tally = Tally({"a": 1, "b": 2})
    tally.settle("a")
    before = tally.ledger()
    tally.settle("b")
    assert before.open() == ["b"]
    assert tally.ledger().complete
