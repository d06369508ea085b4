"""Holds up: samples are seeded, parts make up everything exactly once, sizes are met, nonsense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.verify.sample import EVERYTHING, Selection, parse_selection
from k3.verify.target import Target

SIZES = st.lists(st.integers(1, 10_000), max_size=60)
SEEDS = st.integers(0, 2**31)


def targets_of(sizes: list[int]) -> list[Target]:
    return [Target(0, 4096 * index, size, bytes(16)) for index, size in enumerate(sizes)]


@given(SIZES, st.integers(1, 12), SEEDS)
def test_parts_are_a_partition(sizes: list[int], parts: int, seed: int) -> None:
    targets = targets_of(sizes)
    chosen = [Selection(part=(number, parts)).choose(targets, seed) for number in range(1, parts + 1)]
    together = [target for part in chosen for target in part]
    assert sorted(together, key=lambda target: target.offset) == targets
    counts = [len(part) for part in chosen]
    assert max(counts) - min(counts) <= 1


@given(SIZES, st.integers(1, 200_000), SEEDS)
def test_a_size_is_met_and_not_exceeded_by_more_than_one_extent(sizes: list[int], wanted: int, seed: int) -> None:
    targets = targets_of(sizes)
    chosen = Selection(nbytes=wanted).choose(targets, seed)
    total = sum(target.stored_bytes for target in chosen)
    assert total >= min(wanted, sum(sizes))
    assert total < wanted + max(sizes, default=1)


@given(SIZES, st.floats(0.01, 100), SEEDS)
def test_a_share_is_met(sizes: list[int], percent: float, seed: int) -> None:
    chosen = Selection(percent=percent).choose(targets_of(sizes), seed)
    total = sum(target.stored_bytes for target in chosen)
    assert total >= round(sum(sizes) * percent / 100)
    assert total <= round(sum(sizes) * percent / 100) + max(sizes, default=0)


@given(SIZES, SEEDS)
def test_everything_is_everything(sizes: list[int], seed: int) -> None:
    targets = targets_of(sizes)
    for text in ("all", "1/1", "100%", "1T"):
        assert parse_selection(text).choose(targets, seed) == targets


@given(SIZES, st.integers(1, 9), SEEDS)
def test_the_choice_is_in_order_and_depends_on_nothing_but_the_seed(
    sizes: list[int], parts: int, seed: int
) -> None:
    targets = targets_of(sizes)
    selection = Selection(part=(1, parts))
    chosen = selection.choose(targets, seed)
    assert chosen == selection.choose(targets, seed)
    assert chosen == sorted(chosen, key=lambda target: target.offset)


def test_another_seed_is_another_choice() -> None:
    targets = targets_of([1] * 100)
    choices = {tuple(t.offset for t in Selection(percent=10).choose(targets, seed)) for seed in range(20)}
    assert len(choices) > 15


def test_a_known_choice_never_changes() -> None:
    """A cron job that began with an older release must still cover everything after an update."""
    chosen = parse_selection("2/5").choose(targets_of([1] * 20), seed=0)
    assert [target.offset // 4096 for target in chosen] == [7, 8, 11, 18]


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("1/5", Selection(part=(1, 5))),
        ("5/5", Selection(part=(5, 5))),
        ("2.5%", Selection(percent=2.5)),
        ("100%", Selection(percent=100)),
        ("50G", Selection(nbytes=50 * 10**9)),
        ("1.5 GiB", Selection(nbytes=3 << 29)),
        (" all ", EVERYTHING),
    ],
)
def test_spellings(text: str, selection: Selection) -> None:
    assert parse_selection(text) == selection
    assert parse_selection(str(selection)) == selection


@pytest.mark.parametrize(
    "text",
    ["", "0/5", "6/5", "1/0", "-1/5", "1/5/5", "1.5/5", "0%", "101%", "-2%", "nan%", "%", "0", "-5G", "5X", "half",
     "1/5%", "1e3", "inf", "9999999999/9999999999"],
)  # fmt: skip
def test_refusals_say_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"50G|is not a part|above 0%|less than one byte"):
        parse_selection(text)
