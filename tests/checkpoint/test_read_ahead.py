"""Holds up that reading ahead is bounded, gives each tensor once, and ends once whatever happens."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from k3.checkpoint.read_ahead import READ_AHEAD, ReadAhead
from k3.model.keys import Encoding
from k3.model.model_source import EncodedTensor

NAMES = [f"tensor {number}" for number in range(3 * READ_AHEAD)]


class Reads:
    """A function that reads a tensor, and the events around it."""

    def __init__(self, failing: str | None = None) -> None:
        self.events: list[str] = []
        self._failing = failing
        self._lock = threading.Lock()

    def __call__(self, name: str) -> EncodedTensor:
        with self._lock:
            self.events.append(f"begin {name}")
        if name == self._failing:
            raise OSError(name)
        return EncodedTensor(name, Encoding.RAW, "U8", (1,), np.zeros(1, np.uint8))

    def ended(self) -> None:
        self.events.append("end")

    def ahead(self) -> ReadAhead:
        return ReadAhead(self, NAMES, on_read=lambda name: self.events.append(f"read {name}"), on_end=self.ended)

    def begun(self) -> int:
        return sum(event.startswith("begin") for event in self.events)


def test_a_few_are_read_ahead_and_the_end_follows_the_last() -> None:
    reads = Reads()
    with reads.ahead() as load:
        for taken, name in enumerate(NAMES):
            assert load.take(name).name == name
            assert f"read {name}" in reads.events
            assert reads.begun() <= taken + 1 + READ_AHEAD
        assert reads.events.count("end") == 1
        assert reads.events[-1] == "end"
        load_s = load.load_s
        assert load.load_s == load_s  # it stands still
    assert reads.events.count("end") == 1
    assert sorted(event for event in reads.events if event.startswith("read")) == sorted(
        f"read {n}" for n in NAMES
    )


def test_a_tensor_out_of_order_does_not_wait_behind_others() -> None:
    reads = Reads()
    with reads.ahead() as load:
        assert load.take(NAMES[-1]).name == NAMES[-1]
        assert {load.take(name).name for name in reversed(NAMES[:-1])} == set(NAMES[:-1])


def test_a_failure_is_raised_where_the_tensor_is_taken() -> None:
    reads = Reads(failing=NAMES[1])
    with reads.ahead() as load:
        load.take(NAMES[0])
        with pytest.raises(OSError, match=NAMES[1]):
            load.take(NAMES[1])
        load.take(NAMES[2])
        assert "end" not in reads.events
    assert reads.events.count("end") == 1


def test_a_load_that_is_closed_early_ends_once() -> None:
    reads = Reads()
    load = reads.ahead()
    load.close()
    load.close()
    assert reads.events.count("end") == 1
    assert reads.begun() <= READ_AHEAD
