"""Holds up that prefetches of a file source are hints: read last, bounded, taken back, never lost."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from k3.base.errors import DamageError
from k3.base.pages import PAGE_BYTES
from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.store.lending.file_source import FileSource
from tests.support.containers import Built, build_container, flip
from tests.support.faults import Fault
from tests.support.plane_faults import PlaneFaults, noisy
from tests.support.source_suite import run_threads
from tests.support.waiting import threads_here, wait_until

EXPERTS = 5


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home")


def take(source: FileSource, built: Built, layer: int, experts: list[int]) -> None:
    for lease in source.lease(layer, experts):
        with lease:
            assert lease.payload.tobytes() == built.payloads[ExpertKey(layer, lease.expert)]


def hold_everything(source: FileSource, layer: int, count: int) -> None:
    """As many leases at once as the source has room for: none was lost."""
    for lease in list(source.lease(layer, range(count))):
        lease.release()


def test_a_prefetched_expert_is_there_when_it_is_asked_for(built: Built, model: Container) -> None:
    source = FileSource(model, prefetch_slots=2)
    source.prefetch(1, [3, 4, 0])  # the likeliest two have room
    wait_until(lambda: source.stats().reads == 2)
    take(source, built, 1, [3, 4])
    stats = source.stats()
    assert (stats.hits, stats.joined, stats.misses) == (2, 0, 0)
    assert (stats.prefetched, stats.prefetch_hits) == (2, 2)
    assert stats.checked_bytes == stats.read_bytes > 0
    source.close()


def test_without_room_for_prefetches_nothing_is_read(built: Built, model: Container) -> None:
    source = FileSource(model)
    source.prefetch(1, [0, 1])
    take(source, built, 2, [0])
    assert (source.stats().reads, source.stats().prefetched) == (1, 0)
    source.close()


def test_an_expert_asked_for_while_it_is_prefetched_is_read_once(built: Built, model: Container) -> None:
    source = FileSource(model, prefetch_slots=1, part_bytes=PAGE_BYTES, threads=2)
    faults = PlaneFaults(source, Fault("stall", times=100))
    source.prefetch(1, [2])
    wait_until(lambda: len(faults.begun) == 1)
    stream = source.lease(1, [2])
    wait_until(lambda: len(faults.begun) == 2)  # no longer a guess, so no longer one thread's work
    begun = faults.begun
    assert len(begun) == len(set(begun))
    faults.resume()
    with next(stream) as lease:
        assert lease.payload.tobytes() == built.payloads[ExpertKey(1, 2)]
    stats = source.stats()
    assert (stats.hits, stats.joined, stats.misses, stats.reads) == (0, 1, 0, 1)
    assert (stats.prefetched, stats.prefetch_hits) == (1, 1)
    source.close()


def test_what_is_asked_for_goes_before_guesses(built: Built, model: Container) -> None:
    """One thread: a guess of two experts waits, half read, until everything asked for has been begun."""
    source = FileSource(model, prefetch_slots=2, part_bytes=2 * PAGE_BYTES, threads=1)
    faults = PlaneFaults(source, Fault("stall"))
    source.prefetch(1, [0, 1])
    wait_until(lambda: len(faults.begun) == 1)
    stream = source.lease(1, [3, 4])
    faults.watch()
    faults.resume_begun()
    held = list(stream)
    wait_until(lambda: source.stats().reads == 4)
    places = [built.piece(1, expert)[1] for expert in range(EXPERTS)]
    order = [
        next(number for number, extent in enumerate(places) if 0 <= at - extent.offset < extent.stored_bytes)
        for at in faults.begun
    ]
    assert [expert for expert, _ in itertools.groupby(order)] == [0, 3, 4, 0, 1]
    for lease in held:
        lease.release()
    source.close()


def test_guesses_leave_a_thread_for_what_is_asked_for(built: Built, model: Container) -> None:
    """A drive on which every guess hangs: one thread is still there for others."""
    path, _ = built.piece(1, 0)
    source = FileSource(model, prefetch_slots=4, threads=4)
    faults = PlaneFaults(source, Fault("stall", path, times=100))
    source.prefetch(1, [0, 1, 2, 3])
    wait_until(lambda: faults.struck == 3)
    take(source, built, 2, list(range(EXPERTS)))
    assert faults.struck == 3
    faults.resume()
    take(source, built, 1, list(range(EXPERTS)))
    source.close()


def test_a_hint_taken_back_frees_its_room(built: Built, model: Container) -> None:
    source = FileSource(model, prefetch_slots=2, part_bytes=PAGE_BYTES, threads=2)
    faults = PlaneFaults(source, Fault("stall", times=100))
    cancel = source.prefetch(1, [0, 1])
    wait_until(lambda: len(faults.begun) == 1)
    cancel()  # one part is being read; no more are
    faults.resume()
    wait_until(lambda: source.stats().read_bytes == PAGE_BYTES)
    assert source.stats().prefetched == 1, "of the other, nothing had begun"
    take(source, built, 1, list(range(EXPERTS)))
    stats = source.stats()
    assert (stats.misses + stats.joined, stats.hits, stats.prefetch_hits) == (EXPERTS, 0, stats.joined)
    source.prefetch(2, [0, 1])
    wait_until(lambda: source.stats().prefetched == 3)
    take(source, built, 2, [0, 1])
    assert source.stats().prefetch_hits == 2 + stats.prefetch_hits
    source.close()


def test_a_guess_that_was_dropped_half_read_can_still_be_asked_for(built: Built, model: Container) -> None:
    source = FileSource(model, prefetch_slots=1, part_bytes=PAGE_BYTES, threads=2)
    faults = PlaneFaults(source, Fault("stall", times=100))
    cancel = source.prefetch(1, [2])
    wait_until(lambda: len(faults.begun) == 1)
    cancel()
    stream = source.lease(1, [2])
    faults.resume()
    with next(stream) as lease:
        assert lease.payload.tobytes() == built.payloads[ExpertKey(1, 2)]
    assert (source.stats().joined, source.stats().reads) == (1, 1)
    hold_everything(source, 1, EXPERTS)
    source.close()


def test_new_guesses_displace_old_ones_and_nothing_else(built: Built, model: Container) -> None:
    slot_bytes = FileSource(model).stats().slot_bytes
    source = FileSource(model, prefetch_slots=2, cache_bytes=2 * EXPERTS * slot_bytes)
    take(source, built, 2, list(range(EXPERTS)))
    for pair, prefetched in (([0, 1], 2), ([1, 2], 3), ([3, 4], 5)):
        source.prefetch(1, pair)

        def has_landed(prefetched: int = prefetched) -> bool:
            """Tell whether these guesses are in memory: only then is there room for the next two."""
            return source.stats().prefetched == prefetched and source.stats().reads == EXPERTS + prefetched

        wait_until(has_landed)
    take(source, built, 2, list(range(EXPERTS)))
    stats = source.stats()
    assert (stats.hits, stats.evictions) == (EXPERTS, 0)
    take(source, built, 1, [3, 4])
    assert source.stats().hits == EXPERTS + 2
    source.close()


def test_a_damaged_guess_is_told_to_whoever_asks(built: Built, model: Container) -> None:
    path, extent = built.piece(1, 3)
    flip(path, extent.offset + 5)
    source = FileSource(model, prefetch_slots=1, working_slots=EXPERTS)
    for _ in range(3):
        source.prefetch(1, [3])
        wait_until(lambda: source.stats().reads % 2 == 0 and source.stats().reads > 0)
    with pytest.raises(DamageError) as raised:
        take(source, built, 1, [3])
    assert (raised.value.layer, raised.value.expert) == (1, 3)
    hold_everything(source, 2, EXPERTS)
    source.close()


def test_closing_with_guesses_under_way(model: Container) -> None:
    before = threads_here()
    source = FileSource(model, prefetch_slots=3)
    faults = PlaneFaults(source, Fault("stall", times=100))
    cancel = source.prefetch(1, [0, 1, 2])
    threading.Timer(0.05, faults.resume).start()
    source.close()
    cancel()
    wait_until(lambda: threads_here() <= before)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_random_life_with_prefetches(built: Built, model: Container, seed: int) -> None:
    """Four threads, noise, hints taken back or not, streams given up: always the right bytes, no room lost."""
    slot_bytes = FileSource(model).stats().slot_bytes
    source = FileSource(
        model, working_slots=6, prefetch_slots=1 + seed, cache_bytes=seed * slot_bytes, threads=3,
        part_bytes=PAGE_BYTES,
    )  # fmt: skip
    noisy(source, 0.1, seed)

    def work(number: int) -> None:
        dice = random.Random(10 * seed + number)
        cancel: Callable[[], None] | None = None
        for _ in range(40):
            layer = dice.choice((1, 2))
            if dice.random() < 0.7:
                cancel = source.prefetch(layer, dice.sample(range(EXPERTS), dice.randint(1, 4)))
            asked = dice.sample(range(EXPERTS), dice.randint(1, 3))
            stream = source.lease(layer, asked)
            if cancel is not None and dice.random() < 0.5:
                cancel()
            for lease in itertools.islice(stream, dice.randint(0, len(asked))):
                with lease:
                    assert lease.payload.tobytes() == built.payloads[ExpertKey(layer, lease.expert)]
            if dice.random() < 0.5:
                stream.close()
            del stream

    bodies: list[Callable[[], Any]] = [partial(work, number) for number in range(4)]
    run_threads(*bodies)
    stats = source.stats()
    assert stats.prefetch_hits <= stats.prefetched
    hold_everything(source, 1, EXPERTS)
    hold_everything(source, 2, EXPERTS)
    source.close()
