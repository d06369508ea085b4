"""Holds up that look-ahead names what layers will ask for, in time, and never changes what is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.huge_pages import HugePages
from k3.engine.definition.model_options import ModelOptions
from k3.engine.forward.lookahead import PAYING_CHANCE, HitRecord, LookAhead
from k3.engine.forward.model import Model
from k3.engine.run.session import Session
from k3.model.architecture import ModelConfig
from k3.store.lending.file_source import FileSource
from k3.store.source import ExpertSource, LeaseStream, SourceStats
from tests.support.engines import all_logits, golden, loaded_model, snapshot

Event = tuple[str, int, tuple[int, ...]]


class Recorder:
    """Notes what is asked of a source, and when."""

    def __init__(self, inner: ExpertSource) -> None:
        self._inner = inner
        self.events: list[Event] = []

    def lease(self, layer: int, experts: Sequence[int]) -> LeaseStream:
        self.events.append(("lease", layer, tuple(experts)))
        return self._inner.lease(layer, experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        self.events.append(("hint", layer, tuple(experts)))
        cancel = self._inner.prefetch(layer, experts)

        def noted() -> None:
            self.events.append(("cancel", layer, tuple(experts)))
            cancel()

        return noted

    def stats(self) -> SourceStats:
        return self._inner.stats()

    def huge_pages(self) -> HugePages:
        return self._inner.huge_pages()

    def close(self) -> None:
        self._inner.close()


@contextlib.contextmanager
def looking_ahead(most: int) -> Iterator[tuple[Model, Recorder]]:
    """tiny_s1 with nothing cached, and what it asks for. `most` 0 is without look-ahead."""
    source = snapshot("tiny_s1")
    config = ModelConfig.from_raw(source.config, Path("config.json"))
    with contextlib.closing(Recorder(FileSource(source, prefetch_slots=most, threads=2))) as experts:
        model = loaded_model(source, config, experts, ModelOptions())
        if most:
            model.observer = LookAhead(experts, most, config.moe.top_k, model.layers)
        yield model, experts


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_bits_are_the_same(most: int, chunk: int) -> None:
    ids = golden("tiny_s1")["input_ids"]
    with looking_ahead(0) as (model, _):
        wanted = all_logits(model, ids, chunk)
    with looking_ahead(most) as (model, experts):
        assert all_logits(model, ids, chunk).tobytes() == wanted.tobytes()
        stats = experts.stats()
        assert stats.prefetched > 0
        assert stats.prefetch_hits <= stats.prefetched
        asked = sum(len(ids) for what, _, ids in experts.events if what == "lease")
        assert stats.hits + stats.joined + stats.misses == asked


def test_a_layer_is_predicted_until_it_asks_and_the_next_one_from_then_on() -> None:
    with looking_ahead(4) as (model, experts):
        session = Session(model, 2, 1)
        session.step(1)
        first = len(experts.events)
        session.step(2)
    # The first layer is dense: before each of its halves the layer after it is foreseen, better every time. Each
    # guess takes back the one before it.
    orders = [(what, layer) for what, layer, _ in experts.events[first:]]
    assert orders[:5] == [("hint", 1), *[("hint", 1), ("cancel", 1)] * 2]
    for layer in (1, 2, 3):
        at = orders.index(("lease", layer))
        assert orders[at : at + 5] == [
            ("lease", layer), ("cancel", layer), ("hint", layer + 1), ("hint", layer + 1), ("cancel", layer + 1),
        ]  # fmt: skip
    assert orders[-2:] == [("lease", 4), ("cancel", 4)]
    assert len(orders) == 5 + 3 * 5 + 2
    assert all(len(ids) <= 4 for what, _, ids in experts.events if what == "hint")


def test_what_is_predicted_is_mostly_what_is_asked_for() -> None:
    """Of 16 experts a token picks 4: a blind guess would be right a quarter of the time."""
    with looking_ahead(4) as (model, experts):
        session = Session(model, 25, 1)
        for token in golden("tiny_s1")["input_ids"].tolist():
            session.step(token)
    right = guessed = 0
    named: tuple[int, ...] = ()
    for what, layer, ids in experts.events[1:]:
        if what == "hint":
            foreseen, named = layer, ids
        elif what == "lease" and named:
            assert layer == foreseen
            right, guessed = right + len({*ids} & {*named}), guessed + len(named)
    assert guessed > 3 * 24
    assert right / guessed > 0.5


def test_only_places_that_are_right_half_of_the_time_are_named() -> None:
    """Guesses whose first two places are always right, and whose others a third of the time; then nothing is."""
    named: list[list[int]] = []
    look_ahead = LookAhead(_Noting(named), 4, 2)  # type: ignore[arg-type]
    choice = np.array([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]], np.float32)
    for turn in range(60):
        look_ahead.predict(3, choice, 1)
        look_ahead.requested(3, [0, 1] if turn % 3 else [0, 1, 2, 3])
    assert named[0] == [0, 1, 2, 3]
    assert named[-1] == [0, 1]
    for _ in range(200):
        look_ahead.predict(3, choice, 1)
        look_ahead.requested(3, [4, 5])
    assert named[-1] == []
    look_ahead.predict(3, choice, 2)  # made further ahead: another kind, of which nothing is known yet
    assert named[-1] == [0, 1, 2, 3]
    for _ in range(200):
        look_ahead.predict(3, choice, 1)
        look_ahead.requested(3, [0, 1])
    assert named[-1] == [0, 1]  # it is seen without being named


def test_a_guess_that_nobody_came_for_is_not_held_against_another_layer() -> None:
    named: list[list[int]] = []
    look_ahead = LookAhead(_Noting(named), 2, 2)  # type: ignore[arg-type]
    choice = np.array([[0.9, 0.8, 0.7]], np.float32)
    for _ in range(50):
        look_ahead.predict(3, choice, 1)
        look_ahead.requested(4, [2])
    look_ahead.predict(3, choice, 1)
    assert named[-1] == [0, 1]


@given(st.lists(st.tuples(st.permutations(range(6)), st.sets(st.integers(0, 5))), max_size=300))
def test_a_record_keeps_shares(guesses: list[tuple[list[int], set[int]]]) -> None:
    record = HitRecord(6)
    for ranking, wanted in guesses:
        record.add(ranking, wanted)
        assert ((record.chances >= 0) & (record.chances <= 1)).all()
        worth = record.paying_places(6)
        assert (record.chances[worth:] < PAYING_CHANCE).all()
        assert worth == 0 or record.chances[worth - 1] >= PAYING_CHANCE
        assert record.paying_places(3) <= 3


def test_places_that_a_ranking_seldom_reaches_keep_what_is_known_of_them() -> None:
    record = HitRecord(4)
    for _ in range(3000):  # far more than it takes to halve a number away
        record.add([0, 1], {0})
    assert record.chances.tolist() == [1, record.chances[1], 1, 1]
    assert record.chances[1] < 0.1


class _Noting:
    """Notes what is named."""

    def __init__(self, named: list[list[int]]) -> None:
        self._named = named

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        self._named.append(list(experts))
        return lambda: None


class _Nothing:
    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        raise AssertionError


def ranked(choice: list[list[float]], most: int = 3) -> list[int]:
    look_ahead = LookAhead(_Nothing(), most, 2)  # type: ignore[arg-type]
    return list(look_ahead.likeliest(1, np.array(choice, np.float32)))


def test_likeliest_first() -> None:
    assert ranked([[0.1, 0.9, 0.5, 0.7, 0.7]]) == [1, 3, 4]
    assert ranked([[0.1, 0.9, 0.5, 0.7, 0.7]], 1) == [1]
    # Of a chunk, by how many tokens would use it (2 each), then by the best score; what nobody uses is left out.
    assert ranked([[0.1, 0.9, 0.5, 0.0], [0.8, 0.2, 0.6, 0.0], [0.7, 0.0, 0.9, 0.1]], 4) == [2, 0, 1]


def test_scores_that_are_no_numbers_name_nothing() -> None:
    assert ranked([[0.1, np.nan, 0.5, 0.7]]) == []
    assert ranked([[0.1, np.inf, 0.5, 0.7], [0.0, 0.0, 0.0, 0.0]]) == []
