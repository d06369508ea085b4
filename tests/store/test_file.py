"""Holds up: experts come from files whole, checked and in bounded RAM, whatever the drives do."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import resource
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from k3.base.direct_io import ReadFile
from k3.base.errors import ExpertError
from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.store.local.file_source import FileSource
from k3.store.source import BudgetError, ExpertSource
from tests.support.containers import Built, build_container
from tests.support.faults import DriveFaults, Fault, FaultySource
from tests.support.file_takes import EXPERTS, right, take
from tests.support.model_views import Scattered, Undigested
from tests.support.source_suite import Opened, SourceSuite, run_threads
from tests.support.waiting import let_others_run, wait_until

SLOTS = 10
"""What the suite needs: two whole layers at once."""


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [3, 2, 1])


class _FileSuite(SourceSuite):
    """The suite over `model_of(built)`, with `options` for the source."""

    options: ClassVar[dict[str, Any]] = {}

    def build(self, path: Path) -> Built:
        return build_container(path / "home")

    def view(self, container: Container) -> Any:
        return container

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[Opened]:
        built = self.build(tmp_path)
        container = Container.open(built.home)
        open_source = partial(FileSource, self.view(container), working_slots=SLOTS, **self.options)
        source = open_source()
        yield Opened(source, built.payloads, open_source)
        source.close()
        container.close()


class TestOneRoot(_FileSuite):
    pass


class TestThreeRoots(_FileSuite):
    def build(self, path: Path) -> Built:
        return build_container(path / "home", [path / "a", path / "b"], [3, 2, 1])


class TestHomeWithoutExperts(_FileSuite):
    def build(self, path: Path) -> Built:
        return build_container(path / "home", [path / "a", path / "b"], [0, 1, 1])


class TestInPlace(_FileSuite):
    def build(self, path: Path) -> Built:
        return build_container(path / "home", in_place=path / "snapshot")


class TestWithoutDigests(TestInPlace):
    def view(self, container: Container) -> Any:
        return Undigested(container)


class TestScattered(TestInPlace):
    def view(self, container: Container) -> Any:
        return Scattered(container)


class TestThroughThePageCache(TestThreeRoots):
    options: ClassVar[dict[str, Any]] = {"direct": False}


class TestWithACache(TestThreeRoots):
    options: ClassVar[dict[str, Any]] = {"cache_bytes": 400_000, "verify": "first"}


class TestInParts(TestThreeRoots):
    """Experts are read page by page, in any order."""

    options: ClassVar[dict[str, Any]] = {"part_bytes": 4096, "prefetch_slots": 2}


class TestInPlaceInParts(TestInPlace):
    options: ClassVar[dict[str, Any]] = {"part_bytes": 4096, "prefetch_slots": 2}


class TestScatteredInParts(TestScattered):
    options: ClassVar[dict[str, Any]] = {"part_bytes": 4096, "prefetch_slots": 1, "threads": 1}


class TestWithRoomForPrefetches(TestThreeRoots):
    options: ClassVar[dict[str, Any]] = {"prefetch_slots": 3, "cache_bytes": 100_000}


class TestOneThread(TestThreeRoots):
    options: ClassVar[dict[str, Any]] = {"threads": 1}


class TestShortAndInterruptedReads(TestThreeRoots):
    """Every third read comes up short or is interrupted; nobody notices."""

    options: ClassVar[dict[str, Any]] = {"opener": DriveFaults(noise=0.33, seed=1).open}


class TestInPlaceShortAndInterrupted(TestInPlace):
    options: ClassVar[dict[str, Any]] = {"opener": DriveFaults(noise=0.33, seed=2).open, "part_bytes": 8192}


class TestShuffled(SourceSuite):
    """A faulty wrapper that only shuffles keeps the contract too: tests of the engine lean on it."""

    @pytest.fixture
    def opened(self, built: Built, model: Container) -> Iterator[Opened]:
        def again(*, debug: bool = False) -> ExpertSource:
            return FaultySource(FileSource(model, working_slots=SLOTS, prefetch_slots=2, debug=debug), seed=3)

        source = again()
        yield Opened(source, built.payloads, again)
        source.close()


def slot_bytes_of(model: Container) -> int:
    source = FileSource(model)
    source.close()
    return source.stats().slot_bytes


# RAM


def test_released_buffers_are_reused(built: Built, model: Container) -> None:
    source = FileSource(model, working_slots=2)
    places = set()
    for layer in (1, 2, 1, 2):
        for lease in source.lease(layer, range(EXPERTS)):
            with lease:
                places.add(lease.payload.__array_interface__["data"][0])
    assert len(places) == 2
    assert source.stats().slots == 2
    source.close()


def test_a_request_may_be_larger_than_the_slots_if_leases_come_back(built: Built, model: Container) -> None:
    source = FileSource(model, working_slots=1)
    assert take(source, 1, range(EXPERTS)) == right(built, 1, range(EXPERTS))
    source.close()


def test_holding_more_than_there_is_room_for_is_refused_with_numbers(built: Built, model: Container) -> None:
    source = FileSource(model, working_slots=3, patience_s=0.2)
    stream = source.lease(1, range(EXPERTS))
    held = [next(stream), next(stream), next(stream)]
    with pytest.raises(BudgetError, match="1 more experts asked for while 3 of 3 slots are held"):
        next(stream)
    for lease in held:  # still valid
        assert lease.payload.tobytes() == built.payloads[ExpertKey(1, lease.expert)]
        lease.release()
    assert take(source, 2, range(EXPERTS)) == right(built, 2, range(EXPERTS))
    source.close()


def test_two_threads_that_hold_and_wait_get_an_error_not_a_deadlock(model: Container) -> None:
    source = FileSource(model, working_slots=3, patience_s=0.3)
    (mine,) = source.lease(1, [0])

    def greedy() -> None:
        with pytest.raises(BudgetError):
            source.lease(2, [0, 1, 2])

    run_threads(greedy)
    mine.release()
    source.close()


def test_a_waiting_request_goes_on_when_a_lease_comes_back(built: Built, model: Container) -> None:
    source = FileSource(model, working_slots=2)
    held = list(source.lease(1, [0, 1]))

    def give_back() -> None:
        for lease in held:
            lease.release()

    timer = threading.Timer(0.1, give_back)
    timer.start()
    assert take(source, 2, [3, 4]) == right(built, 2, [3, 4])
    assert source.stats().wait_ns > 50_000_000
    timer.join()
    source.close()


def test_the_cache_lends_its_slots_to_a_caller_that_holds_many(built: Built, model: Container) -> None:
    source = FileSource(model, working_slots=1, cache_bytes=10**7, patience_s=0.2)
    take(source, 1, range(EXPERTS))
    held = list(source.lease(2, range(EXPERTS)))
    assert {lease.expert: lease.payload.tobytes() for lease in held} == right(built, 2, range(EXPERTS))
    for lease in held:
        lease.release()
    source.close()


# Cache


@pytest.mark.parametrize("cache_slots", [0, 1, 3, 10, 100])
def test_the_answer_does_not_depend_on_the_cache(built: Built, model: Container, cache_slots: int) -> None:
    slot_bytes = slot_bytes_of(model)
    source = FileSource(model, cache_bytes=cache_slots * slot_bytes, working_slots=4)
    for experts in ([0, 3], [3, 4], [0, 1, 2, 3, 4], [1, 3]):
        for layer in (1, 2):
            assert take(source, layer, experts) == right(built, layer, experts)
    stats = source.stats()
    assert stats.slots == 4 + min(cache_slots, 2 * EXPERTS)
    assert stats.misses == (2 * EXPERTS if cache_slots >= 2 * EXPERTS else stats.misses)
    assert stats.hits == 0 if cache_slots == 0 else cache_slots < 2 * EXPERTS or stats.hits > 0
    source.close()


def test_a_cache_smaller_than_a_token_still_hits_in_every_layer(model: Container) -> None:
    """The reason for dividing it by layer: one list of 4 for 2 x 5 experts taken in turn would never hit."""
    slot_bytes = slot_bytes_of(model)
    source = FileSource(model, cache_bytes=4 * slot_bytes, working_slots=EXPERTS, threads=1)
    for _ in range(3):
        for layer in (1, 2):
            take(source, layer, range(EXPERTS - 1, -1, -1))
            take(source, layer, [0, 1])  # the newest two of each layer
    assert source.stats().hits >= 3 * 2 * 2
    source.close()


def test_requests_for_one_expert_share_one_read(built: Built, model: Container) -> None:
    path, extent = built.piece(1, 0)
    faults = DriveFaults([Fault("stall", path, extent.offset)])
    source = FileSource(model, opener=faults.open)
    first, second = source.lease(1, [0]), source.lease(1, [0])
    faults.resume()
    leases = [next(first), next(second)]
    assert [lease.payload.tobytes() for lease in leases] == [built.payloads[ExpertKey(1, 0)]] * 2
    assert (source.stats().misses, source.stats().joined) == (1, 1)
    leases[0].release()
    assert leases[1].payload.tobytes() == built.payloads[ExpertKey(1, 0)]
    leases[1].release()
    source.close()


def test_a_stream_given_up_while_reading_frees_its_slots(built: Built, model: Container) -> None:
    faults = DriveFaults([Fault("stall", times=100)])
    source = FileSource(model, opener=faults.open, working_slots=EXPERTS)
    source.lease(1, range(EXPERTS)).close()
    faults.resume()
    assert take(source, 2, range(EXPERTS)) == right(built, 2, range(EXPERTS))
    source.close()


# Files


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    layers = range(1, 31)
    built = build_container(
        tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [1, 1, 1], layers=layers, experts=2
    )
    container = Container.open(built.home)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = open_descriptors()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, used + 40), before[1]))
        source = FileSource(container, threads=4)
        for layer in layers:
            assert take(source, layer, [0, 1]) == right(built, layer, [0, 1])
        assert source.stats().open_files <= max(64, used + 40) // 4
        source.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert open_descriptors() == used
    container.close()


def test_files_are_opened_when_first_needed_and_kept(built: Built, model: Container) -> None:
    faults = DriveFaults()
    source = FileSource(model, opener=faults.open)
    assert faults.opened == []
    for _ in range(3):
        take(source, 1, range(EXPERTS))
    assert len(faults.opened) == len(set(faults.opened)) == 3
    source.close()


def test_a_limit_of_one_file_works(built: Built, model: Container) -> None:
    source = FileSource(model, max_open_files=1)
    for layer in (1, 2, 1):
        assert take(source, layer, range(EXPERTS)) == right(built, layer, range(EXPERTS))
    source.close()


def test_where_o_direct_works_is_told(built: Built, model: Container) -> None:
    source = FileSource(model)
    take(source, 1, [0])
    assert source.stats().direct == {directory / "experts": True for directory in built.directories}
    source.close()


def test_falling_back_from_o_direct_is_never_silent(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Played, since newer kernels take O_DIRECT even on tmpfs."""
    built = build_container(tmp_path / "home")
    container = Container.open(built.home)

    def opener(path: Path, direct: bool) -> Any:
        return ReadFile(path, direct=False)

    source = FileSource(container, opener=opener)
    with caplog.at_level(logging.WARNING, logger="k3.store"):
        take(source, 1, [0])
        take(source, 2, [0])
    assert source.stats().direct == {tmp_path / "home" / "experts": False}
    assert [record.message.split(" cannot")[0] for record in caplog.records] == [
        str(tmp_path / "home" / "experts")
    ]
    source.close()
    container.close()


def test_asking_for_the_page_cache_is_no_fallback(
    built: Built, model: Container, caplog: pytest.LogCaptureFixture
) -> None:
    source = FileSource(model, direct=False)
    take(source, 1, [0])
    assert set(source.stats().direct.values()) == {False}
    assert caplog.records == []
    source.close()


def test_closing_waits_for_reads_and_leaves_no_thread(model: Container) -> None:
    before = threading.active_count()
    faults = DriveFaults([Fault("stall", times=3)])
    source = FileSource(model, opener=faults.open)
    stream = source.lease(1, range(EXPERTS))
    timer = threading.Timer(0.05, faults.resume)
    timer.start()
    source.close()
    timer.join()
    with pytest.raises(ValueError, match="closed"):
        next(stream)
    assert threading.active_count() <= before


def test_slots_of_a_forgotten_stream_are_free_for_the_next(
    built: Built, model: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that takes the note of it must not wait: nobody else will wake it."""
    wait, this = threading.Condition.wait, threading.current_thread()

    def wait_elsewhere(condition: threading.Condition, timeout: float | None = None) -> bool:
        assert threading.current_thread() is not this, "waits for what it has"
        return wait(condition, timeout)

    cache_bytes = EXPERTS * slot_bytes_of(model)
    source = FileSource(model, layers=[1], working_slots=EXPERTS, cache_bytes=cache_bytes)
    take(source, 1, range(EXPERTS))
    # Two streams hold every slot, all from the cache: nothing lands that would wake anybody.
    streams = [source.lease(1, range(EXPERTS)) for _ in range(2)]
    streams.clear()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", wait_elsewhere)
        assert take(source, 1, range(EXPERTS)) == right(built, 1, range(EXPERTS))
    source.close()


def test_a_thread_that_waits_is_woken_by_close(model: Container) -> None:
    faults = DriveFaults([Fault("stall", times=100)])
    source = FileSource(model, opener=faults.open, threads=1)

    woken = threading.Event()

    def wait() -> None:
        with pytest.raises(ValueError, match="closed"):
            for _ in source.lease(1, range(EXPERTS)):
                pass
        woken.set()

    def close() -> None:
        wait_until(lambda: faults.struck)
        source.close()

    def resume() -> None:
        assert woken.wait(60), "the drive was waited for"
        faults.resume()

    run_threads(wait, close, resume)


@pytest.mark.parametrize(
    "options",
    [
        {"cache_bytes": -1}, {"working_slots": 0}, {"prefetch_slots": -1}, {"threads": 0}, {"verify": "sometimes"},
        {"part_bytes": 0}, {"part_bytes": 5000}, {"max_open_files": -1},
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(model: Container, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"make no source|verify must be|whole pages|limit of open files"):
        FileSource(model, **options)


def test_layers_that_are_not_served_take_no_cache(built: Built, model: Container) -> None:
    every = model.expert_layers()
    experts = range(model.expert_count(every[0]))
    with contextlib.closing(
        FileSource(model, layers=every[:1], cache_bytes=len(experts) * slot_bytes_of(model))
    ) as source:
        for _ in range(2):
            for lease in source.lease(every[0], experts):
                lease.release()
        assert (source.stats().hits, source.stats().misses) == (len(experts), len(experts))
        with pytest.raises(ExpertError, match="no experts of this layer"):
            source.lease(every[1], [0])


def test_a_long_random_life(built: Built, model: Container) -> None:
    """Four threads with noise, held leases, abandoned streams and a small cache: always the right bytes."""
    faults = DriveFaults(noise=0.1, seed=9)
    slot_bytes = slot_bytes_of(model)
    source = FileSource(model, opener=faults.open, working_slots=6, cache_bytes=3 * slot_bytes, threads=3)

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(40):
            layer = dice.choice((1, 2))
            asked = dice.sample(range(EXPERTS), dice.randint(1, 3))
            stream = source.lease(layer, asked)
            for lease in itertools.islice(stream, dice.randint(0, len(asked))):
                assert lease.payload.tobytes() == built.payloads[ExpertKey(layer, lease.expert)]
                if dice.random() < 0.3:
                    let_others_run()
                    assert lease.payload.tobytes() == built.payloads[ExpertKey(layer, lease.expert)]
                lease.release()
            if dice.random() < 0.5:
                stream.close()
            del stream  # forgotten: what it still had a right to is free again

    bodies: list[Callable[[], Any]] = [partial(work, seed) for seed in range(4)]
    run_threads(*bodies)
    assert take(source, 1, range(EXPERTS)) == right(built, 1, range(EXPERTS))
    held = list(source.lease(2, range(EXPERTS)))  # no ticket was lost on the way
    for lease in held:
        lease.release()
    source.close()
