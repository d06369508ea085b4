"""Holds up that look-ahead names what layers will ask for, in time, and never changes what is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from engines import Array, all_logits, golden, snapshot

from k3.engine.config import ModelConfig
from k3.engine.lookahead import LookAhead
from k3.engine.model import Model, ModelOptions
from k3.engine.session import Session
from k3.store.file import FileSource
from k3.store.source import ExpertSource, LeaseStream, SourceStats

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

    def close(self) -> None:
        self._inner.close()


@contextlib.contextmanager
def looking_ahead(most: int) -> Iterator[tuple[Model, Recorder]]:
    """tiny_s1 with nothing cached, and what it asks for. `most` 0 is without look-ahead."""
    source = snapshot("tiny_s1")
    config = ModelConfig.from_raw(source.config, Path("config.json"))
    with contextlib.closing(Recorder(FileSource(source, prefetch_slots=most, threads=2))) as experts:
        look_ahead = LookAhead(experts, most, config.moe.top_k) if most else None
        yield Model(source, config, experts, ModelOptions(), look_ahead=look_ahead), experts


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


def test_hints_come_before_the_layer_and_are_taken_back_when_it_has_asked() -> None:
    with looking_ahead(4) as (model, experts):
        session = Session(model, 2, 1)
        session.step(1)
        first = len(experts.events)
        session.step(2)
    # The first layer is dense: before each of its halves the layer after it is foreseen, better every time.
    orders = [(what, layer) for what, layer, _ in experts.events[first:]]
    assert orders[:7] == [("hint", 1), *[("hint", 1), ("cancel", 1)] * 2, ("lease", 1), ("cancel", 1)]
    assert orders[7:] == [(what, layer) for layer in (2, 3, 4) for what in ("hint", "lease", "cancel")]
    assert all(len(ids) <= 4 for what, _, ids in experts.events if what == "hint")


def test_what_is_foreseen_is_mostly_what_is_asked_for() -> None:
    """Of 16 experts a token picks 4: a blind guess would be right a quarter of the time."""
    with looking_ahead(4) as (model, experts):
        session = Session(model, 25, 1)
        for token in golden("tiny_s1")["input_ids"].tolist():
            session.step(token)
    right = guessed = 0
    for (what, layer, ids), (then, asking, asked) in zip(experts.events, experts.events[1:], strict=False):
        if (what, then) == ("hint", "lease"):
            assert layer == asking
            right, guessed = right + len({*ids} & {*asked}), guessed + len(ids)
    assert guessed == 3 * 4 * 24
    assert right / guessed > 0.5


class _Nothing:
    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        raise AssertionError


def ranked(choice: Array, most: int = 3) -> list[int]:
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
