"""Holds up: experts come from files whole, checked and in bounded RAM, whatever the drives do."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from k3.base.errors import DriveError, ExpertError
from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.store._store import Policy
from k3.store.lending.file_source import POLICY, FileSource
from k3.store.source import BudgetError, ExpertSource
from tests.support.children import in_child
from tests.support.containers import Built, build_container
from tests.support.faults import Fault, FaultySource
from tests.support.file_takes import EXPERTS, right, take
from tests.support.model_views import Scattered, Undigested
from tests.support.plane_faults import PlaneFaults, noisy
from tests.support.source_suite import Opened, SourceSuite, run_threads
from tests.support.waiting import let_others_run, threads_here, wait_until

SLOTS = 10
"""What the suite needs: two whole layers at once."""


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [3, 2, 1])


class _FileSuite(SourceSuite):
    """The suite over `model_of(built)`, with `options` for the source."""

    options: ClassVar[dict[str, Any]] = {}
    noise_seed: ClassVar[int | None] = None

    def build(self, path: Path) -> Built:
        return build_container(path / "home")

    def view(self, container: Container) -> Any:
        return container

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[Opened]:
        built = self.build(tmp_path)
        container = Container.open(built.home)

        def open_source(*, debug: bool = False) -> FileSource:
            source = FileSource(self.view(container), working_slots=SLOTS, debug=debug, **self.options)
            return source if self.noise_seed is None else noisy(source, 0.33, self.noise_seed)

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


class TestShortReads(TestThreeRoots):
    """Every third read comes up short; nobody notices."""

    noise_seed = 1


class TestInPlaceShortReads(TestInPlace):
    noise_seed = 2
    options: ClassVar[dict[str, Any]] = {"part_bytes": 8192}


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


def test_memory_is_taken_by_what_is_read_and_not_by_what_may_be(built: Built, tmp_path: Path) -> None:
    """Room for a thousand experts, and a process that stays as small as the ten that there are."""
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from k3.container.reader import Container
        from k3.store.lending.file_source import FileSource
        from tests.support.file_takes import take

        def resident_bytes():
            return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

        container = Container.open(Path(sys.argv[1]))
        take(FileSource(container), 1, [0])  # imports all that is needed
        before = resident_bytes()
        source = FileSource(container, working_slots=100_000, prefetch_slots=1000)
        for layer in (1, 2):
            take(source, layer, range(5))
        stats = source.stats()
        assert stats.slots * stats.slot_bytes > 2e9
        assert resident_bytes() - before < 64e6, resident_bytes() - before
        source.close()
    """)
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", script, str(built.home)], capture_output=True, text=True, timeout=60, cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


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
    assert cache_slots < 2 * EXPERTS or stats.hits > 0
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
    source = FileSource(model)
    faults = PlaneFaults(source, Fault("stall", path, extent.offset))
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
    source = FileSource(model, working_slots=EXPERTS)
    faults = PlaneFaults(source, Fault("stall", times=100))
    source.lease(1, range(EXPERTS)).close()
    faults.resume()
    assert take(source, 2, range(EXPERTS)) == right(built, 2, range(EXPERTS))
    source.close()


def test_slots_that_nobody_holds_are_cache(model: Container) -> None:
    source = FileSource(model, working_slots=EXPERTS)
    for _ in range(2):
        take(source, 1, range(EXPERTS))
    assert (source.stats().misses, source.stats().hits) == (EXPERTS, EXPERTS)
    source.close()


def test_experts_leave_by_the_policy_that_was_decided_on(model: Container) -> None:
    """Three sets of two in turns, and room for five: one list by last use would never hit."""
    source = FileSource(model, working_slots=5)
    sets = [(1, [0, 1]), (2, [0, 1]), (1, [2, 3])]
    native = Policy(POLICY, 5, {1: EXPERTS, 2: EXPERTS})
    right_hits = 0
    for layer, experts in sets * 4:
        take_together(source, layer, experts)
        found = [expert for expert in experts if native.access(layer, expert)]
        right_hits += len(found)
        for expert in found:
            native.hold(layer, expert)
        for expert in experts:
            if expert not in found:
                native.insert(layer, expert)
                native.hold(layer, expert)
        for expert in experts:
            native.unhold(layer, expert)
    assert source.stats().hits == right_hits > 0
    source.close()


def take_together(source: FileSource, layer: int, experts: list[int]) -> None:
    """Give everything back at the end, in order, as the policy is told."""
    leases = sorted(source.lease(layer, experts), key=lambda lease: lease.expert)
    for lease in leases:
        lease.release()


# Files


def test_a_pipe_in_place_of_a_file_is_an_error_and_no_hang(built: Built, model: Container) -> None:
    path, _ = built.piece(1, 0)
    path.unlink()
    os.mkfifo(path)
    source = FileSource(model)
    with pytest.raises(DriveError, match="is not a regular file but a pipe") as raised:
        take(source, 1, [0])
    assert (raised.value.path, raised.value.layer, raised.value.expert) == (str(path), 1, 0)
    source.close()


def test_names_may_be_any_bytes(tmp_path: Path) -> None:
    built = build_container(tmp_path / os.fsdecode(b"caf\xe9"))
    with contextlib.closing(Container.open(built.home)) as container:
        source = FileSource(container)
        assert take(source, 1, range(EXPERTS)) == right(built, 1, range(EXPERTS))
        source.close()


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
    source = FileSource(model)
    assert source.stats().open_files == 0
    for _ in range(3):
        take(source, 1, range(EXPERTS))
        assert source.stats().open_files == 3
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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter knows the numbers of one kind of processor")
def test_falling_back_from_o_direct_is_never_silent(tmp_path: Path) -> None:
    """Under a seccomp filter that refuses O_DIRECT, since newer kernels take it even on tmpfs."""
    script = textwrap.dedent("""
        import ctypes, errno, logging, os, struct, sys
        from pathlib import Path
        from k3.container.reader import Container
        from k3.store.lending.file_source import FileSource
        from tests.support.containers import build_container
        from tests.support.file_takes import right, take

        place = Path(sys.argv[1])
        built = build_container(place)
        libc = ctypes.CDLL(None, use_errno=True)
        program = b"".join(struct.pack("<HBBI", *line) for line in (
            (0x20, 0, 0, 0),                         # load the system call's number
            (0x15, 0, 3, 257),                       # openat?
            (0x20, 0, 0, 32),                        # load its flags
            (0x45, 0, 1, os.O_DIRECT),               # O_DIRECT among them?
            (0x06, 0, 0, 0x00050000 | errno.EINVAL), # refuse it
            (0x06, 0, 0, 0x7FFF0000)))               # allow everything else
        buffer = ctypes.create_string_buffer(program)
        header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, header, 0, 0) == 0
        logging.basicConfig(format="%(levelname)s %(message)s")
        container = Container.open(place)
        source = FileSource(container)
        for layer in (1, 2):
            assert take(source, layer, [0]) == right(built, layer, [0])
        assert source.stats().direct == {place / "experts": False}
        source.close()
    """)
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "home")], capture_output=True, text=True, timeout=60,
        cwd=root, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("WARNING")]
    assert len(lines) == 1
    assert str(tmp_path / "home" / "experts") in lines[0]
    assert "cannot be read with O_DIRECT" in lines[0]


def test_asking_for_the_page_cache_is_no_fallback(
    built: Built, model: Container, caplog: pytest.LogCaptureFixture
) -> None:
    source = FileSource(model, direct=False)
    take(source, 1, [0])
    assert set(source.stats().direct.values()) == {False}
    assert caplog.records == []
    source.close()


def test_closing_waits_for_reads_and_leaves_no_thread(model: Container) -> None:
    before = threads_here()
    source = FileSource(model)
    faults = PlaneFaults(source, Fault("stall", times=3))
    stream = source.lease(1, range(EXPERTS))
    wait_until(lambda: faults.struck == 3)
    timer = threading.Timer(0.05, faults.resume)
    timer.start()
    source.close()
    timer.join()
    with pytest.raises(ValueError, match="closed"):
        next(stream)
    assert threads_here() <= before


def test_slots_of_a_forgotten_stream_are_free_for_the_next(built: Built, model: Container) -> None:
    cache_bytes = EXPERTS * slot_bytes_of(model)
    source = FileSource(model, layers=[1], working_slots=EXPERTS, cache_bytes=cache_bytes, patience_s=0)
    take(source, 1, range(EXPERTS))
    streams = [source.lease(1, range(EXPERTS)) for _ in range(2)]
    with pytest.raises(BudgetError):
        source.lease(1, range(EXPERTS))
    streams.clear()
    assert take(source, 1, range(EXPERTS)) == right(built, 1, range(EXPERTS))
    source.close()


def test_a_thread_that_waits_is_woken_by_close(model: Container) -> None:
    source = FileSource(model, threads=1)
    faults = PlaneFaults(source, Fault("stall", times=100))
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
        {"part_bytes": 0}, {"part_bytes": 5000}, {"part_bytes": 8 << 20}, {"max_open_files": -1},
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
    slot_bytes = slot_bytes_of(model)
    source = noisy(FileSource(model, working_slots=6, cache_bytes=3 * slot_bytes, threads=3), 0.1, seed=9)

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


# Processes and signals


def test_a_forked_child_can_neither_use_nor_harm_a_source(built: Built, model: Container) -> None:
    source = FileSource(model, prefetch_slots=1)
    faults = PlaneFaults(source, Fault("stall", built.piece(2, 0)[0], times=100))
    (lease,) = source.lease(1, [0])
    stream = source.lease(2, [0])  # its read stands still, and keeps doing so in no child
    wait_until(lambda: faults.struck)

    def use() -> None:
        with lease:
            assert lease.payload.tobytes() == built.payloads[ExpertKey(1, 0)]
        stream.close()
        for ask in (lambda: source.lease(1, [0]), lambda: source.prefetch(1, [0]), lambda: next(iter(stream))):
            with pytest.raises(ValueError, match="forked"):
                ask()
        source.stats()
        source.close()

    assert in_child(use) == 0
    faults.resume()
    with next(stream) as other:
        assert other.payload.tobytes() == built.payloads[ExpertKey(2, 0)]
    assert lease.payload.tobytes() == built.payloads[ExpertKey(1, 0)]
    lease.release()
    source.close()


def test_a_source_that_has_not_read_yet_can_be_used_in_a_child(built: Built, model: Container) -> None:
    source = FileSource(model)

    def use() -> None:
        assert take(source, 1, [0]) == right(built, 1, [0])
        source.close()

    assert in_child(use) == 0
    assert take(source, 1, [0]) == right(built, 1, [0])
    source.close()


def test_ctrl_c_ends_a_wait_and_costs_no_slot(built: Built, model: Container) -> None:
    source = FileSource(model, working_slots=EXPERTS, layers=[1])
    faults = PlaneFaults(source, Fault("stall", times=100))
    stream = source.lease(1, range(EXPERTS))
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):  # while it waits for an expert
        next(stream)
    faults.resume_begun()
    held = source.lease(1, range(EXPERTS))
    interrupt = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):  # while it waits for its turn
        source.lease(1, range(EXPERTS))
    faults.resume()
    for lease in list(held):
        lease.release()
    assert take(source, 1, range(EXPERTS)) == right(built, 1, range(EXPERTS))
    source.close()


def test_a_process_ends_without_closing(built: Built) -> None:
    """Also one whose drive does not answer, and without a word of what it left."""
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from k3.container.reader import Container
        from k3.store.lending.file_source import FileSource
        from tests.support.faults import Fault
        from tests.support.plane_faults import PlaneFaults

        source = FileSource(Container.open(Path(sys.argv[1])))
        (lease,) = source.lease(1, [0])
        faults = PlaneFaults(source, Fault("stall", times=100))
        stream = source.lease(1, [1, 2])
    """)
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", script, str(built.home)], capture_output=True, text=True, timeout=60, cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
