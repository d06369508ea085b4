"""Holds up that experts without use are told from others, however their bytes come, and named as published."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.checkpoint.odd_experts import ExpertWatch, odd_experts_note
from k3.model.keys import ExpertKey, ExpertLayout, ExpertPart
from tests.support.arrays import Array

LAYOUT = ExpertLayout(
    "model.layers.1.block_sparse_moe.experts",
    (
        ExpertPart("w1.weight_packed", "U8", (4, 256), 0, 1024),
        ExpertPart("w1.weight_scale", "U8", (4, 16), 1024, 64),
    ),
)


def payload() -> Array:
    return np.full(1088, 120, np.uint8)


def problems(data: Array, cuts: list[int]) -> tuple[str, ...]:
    watch = ExpertWatch(LAYOUT)
    places = [0, *sorted(cuts), len(data)]
    for start, stop in pairwise(places):
        watch.feed(start, data[start:stop])
    return watch.problems()


@given(cuts=st.lists(st.integers(0, 1088), max_size=5), place=st.integers(0, 1087))
def test_one_byte_decides_however_the_payload_is_cut(cuts: list[int], place: int) -> None:
    assert problems(payload(), cuts) == ()
    data = payload()
    data[place] = 255
    assert bool(problems(data, cuts)) == (place >= 1024)
    data = np.where(np.arange(1088) < 1024, 0x80, 120).astype(np.uint8)  # zeros of both signs
    assert problems(data, cuts) == ("w1.weight_packed is all zeros",)
    data[place] = 0x10
    assert bool(problems(data, cuts)) == (place >= 1024)


@pytest.mark.parametrize(
    ("scale", "said"), [(167, ()), (168, ("w1.weight_scale has the byte 168, a factor of 2^41",))]
)
def test_a_factor_that_no_weight_has_is_odd(scale: int, said: tuple[str, ...]) -> None:
    data = payload()
    data[1030] = scale
    assert problems(data, []) == said


def test_watches_of_pieces_add_up_and_a_part_says_nothing_of_the_rest() -> None:
    data = payload()
    data[:1024] = 0
    data[1087] = 255
    first, second = ExpertWatch(LAYOUT), ExpertWatch(LAYOUT)
    first.feed(0, data[:700])
    second.feed(700, data[700:])
    assert first.problems(whole=False) == ()
    first.add(second)
    zeros, scale = "w1.weight_packed is all zeros", "w1.weight_scale has the byte 255, which stands for no number"
    assert first.problems() == (zeros, scale)
    assert first.problems(whole=False) == (scale,)


def test_the_note_names_experts_and_says_how_many_more() -> None:
    assert odd_experts_note({}) is None
    odd = {ExpertKey(1, expert): ("w1.weight_packed is all zeros",) for expert in range(8)}
    note = odd_experts_note(odd)
    assert note is not None
    assert "layer 1 expert 0 (w1.weight_packed is all zeros)" in note
    assert "and 3 more" in note


@pytest.mark.parametrize("name", ["up.weight", "w1.bias"])
def test_parts_of_another_kind_are_not_judged(name: str) -> None:
    watch = ExpertWatch(ExpertLayout("x", (ExpertPart(name, "U8", (4,), 0, 4),)))
    watch.feed(0, np.zeros(4, np.uint8))
    assert watch.problems() == ()
