"""Holds up: whatever happens to drives or daemon, a client gets the right bytes or a typed error, never a hang."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from k3.base.errors import DaemonError, DamageError, DriveError, ExpertError
from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.store.client.daemon_model import DaemonModel
from k3.store.client.daemon_source import DaemonSource
from k3.store.client.socket_link import Link
from k3.store.lending.file_source import FileSource
from k3.store.protocol.native import FaultKind, NativeRing
from k3.store.source import BudgetError, ExpertSource
from tests.support.containers import Built, build_container, flip
from tests.support.daemons import Inside, daemon_inside, daemon_outside, start
from tests.support.faults import STALL_MS, FaultySource
from tests.support.source_suite import Opened, SourceSuite, run_threads
from tests.support.waiting import wait_until, wait_until_standing


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [1, 2, 3])


@pytest.fixture
def daemon(built: Built, tmp_path: Path) -> Iterator[Inside]:
    with daemon_inside(tmp_path / "s", built.directories, quota=10, max_clients=4) as inside:
        yield inside


def right(built: Built, layer: int, expert: int) -> bytes:
    return built.payloads[ExpertKey(layer, expert)]


def take(source: ExpertSource, built: Built, layer: int, experts: list[int]) -> None:
    """Have experts, compare them, give them back."""
    found = set()
    for lease in source.lease(layer, experts):
        with lease:
            assert lease.payload.tobytes() == right(built, layer, lease.expert)
            found.add(lease.expert)
    assert found == set(experts)


class TestBehindFaults(SourceSuite):
    """The same promises with leases in another order."""

    @pytest.fixture
    def opened(self, built: Built, daemon: Inside) -> Iterator[Opened]:
        def again(*, debug: bool = False) -> ExpertSource:
            return FaultySource(DaemonSource(daemon.socket, debug=debug), seed=3)

        source = again()
        yield Opened(source, built.payloads, again)
        source.close()


class TestReconnecting(SourceSuite):
    """The same promises after the connection was lost."""

    @pytest.fixture
    def opened(self, built: Built, daemon: Inside) -> Iterator[Opened]:
        def again(*, debug: bool = False) -> ExpertSource:
            source = DaemonSource(daemon.socket, debug=debug)
            source._session.link.socket.shutdown(2)  # type: ignore[union-attr]
            return source

        source = again()
        yield Opened(source, built.payloads, again)
        source.close()


class TestFallback(SourceSuite):
    """The same promises without any daemon."""

    @pytest.fixture
    def opened(self, built: Built, tmp_path: Path) -> Iterator[Opened]:
        container = Container.open(built.home)

        def again(*, debug: bool = False) -> ExpertSource:
            return DaemonSource(tmp_path / "none", fallback=lambda: FileSource(container, debug=debug))

        source = again()
        yield Opened(source, built.payloads, again)
        source.close()
        container.close()


# Drives


def test_damage_names_file_layer_expert_and_offset(built: Built, daemon: Inside) -> None:
    path, extent = built.piece(2, 3, index=1)
    flip(path, extent.offset + 7)
    source = DaemonSource(daemon.socket)
    with pytest.raises(DamageError) as raised:
        take(source, built, 2, [3])
    error = raised.value
    assert (error.path, error.layer, error.expert, error.offset) == (str(path), 2, 3, extent.offset)
    take(source, built, 2, [0, 1, 2, 4])
    assert sum(drive["re_reads"] for drive in daemon.status()["drives"]) == 1
    assert sum(drive["errors"] for drive in daemon.status()["drives"]) >= 2
    flip(path, extent.offset + 7)
    take(source, built, 2, [3])  # repaired: no error is remembered
    source.close()


def test_a_drive_that_refuses(built: Built, daemon: Inside) -> None:
    daemon.server.inject("error", times=100, argument=5)  # enough for every piece, read twice
    source = DaemonSource(daemon.socket)
    with pytest.raises(DriveError, match="Input/output error") as raised:
        take(source, built, 1, [2])
    assert raised.value.path is not None
    assert raised.value.path.endswith("layer-00001.safetensors")
    assert (raised.value.layer, raised.value.expert) == (1, 2)
    daemon.server.clear_faults()
    take(source, built, 1, [0, 1, 2, 3, 4])
    source.close()


def test_one_error_is_read_over(built: Built, daemon: Inside) -> None:
    source = DaemonSource(daemon.socket)
    faults: tuple[tuple[FaultKind, int], ...] = (("error", 5), ("flip", 0), ("short", 100))
    for kind, argument in faults:
        daemon.server.inject(kind, times=1, argument=argument)
        take(source, built, 1, [0, 1, 2, 3, 4])
        daemon.server.clear_faults()
    source.close()


def test_an_expert_that_the_daemon_does_not_know(daemon: Inside) -> None:
    """Not reachable through checked requests; a confused client still gets a typed answer."""
    source = DaemonSource(daemon.socket)
    source._daemon.counts = {1: 100}
    with pytest.raises(ExpertError, match="the daemon has no such expert") as raised:
        list(source.lease(1, [70]))
    assert (raised.value.layer, raised.value.expert) == (1, 70)
    source.close()


# Quotas


def test_more_than_the_quota_is_a_typed_error_and_no_hang(built: Built, daemon: Inside) -> None:
    source = DaemonSource(daemon.socket, patience_s=0.2)
    held = [*source.lease(1, range(5)), *source.lease(2, range(5))]
    with pytest.raises(BudgetError, match="10 of a quota of 10"):
        next(source.lease(1, [0]))
    for lease in held:
        lease.release()
    take(source, built, 1, [0])
    source.close()


def test_a_request_larger_than_the_quota_flows(built: Built, tmp_path: Path) -> None:
    with daemon_inside(tmp_path / "q", built.directories, quota=2, max_clients=1) as inside:
        source = DaemonSource(inside.socket, patience_s=0.2)
        take(source, built, 1, [4, 0, 2, 1, 3])
        stream = source.lease(2, range(5))
        first, second = next(stream), next(stream)
        timer = threading.Timer(0.05, first.release)
        timer.start()
        third = next(stream)  # waits for the timer
        with pytest.raises(BudgetError):
            next(stream)
        for lease in (second, third):
            lease.release()
        take(source, built, 1, [0, 1, 2, 3, 4])
        source.close()


def test_a_greedy_client_does_not_starve_another(built: Built, tmp_path: Path) -> None:
    with daemon_inside(tmp_path / "q", built.directories, quota=3, max_clients=2) as inside:
        greedy, modest = DaemonSource(inside.socket, patience_s=0.1), DaemonSource(inside.socket)
        held = list(itertools.islice(greedy.lease(1, range(5)), 3))
        for _ in range(5):
            take(modest, built, 2, [0, 1, 2, 3, 4])
        for lease in held:
            assert lease.payload.tobytes() == right(built, 1, lease.expert)
        greedy.close()
        modest.close()


def test_two_clients_cause_one_read(built: Built, daemon: Inside) -> None:
    daemon.server.inject("stall", argument=STALL_MS)
    one, two = DaemonSource(daemon.socket), DaemonSource(daemon.socket)

    def answer_both() -> None:
        wait_until(lambda: daemon.server.stats()["cache"]["joined"] == 1)
        daemon.server.clear_faults()

    run_threads(lambda: take(one, built, 1, [0]), lambda: take(two, built, 1, [0]), answer_both)
    total = [one.stats(), two.stats()]
    assert sum(stats.misses for stats in total) == 1
    assert sum(stats.hits + stats.joined for stats in total) == 1
    one.close()
    two.close()


# The daemon goes


def test_a_killed_daemon_is_an_error_at_once(built: Built, tmp_path: Path) -> None:
    with daemon_outside(tmp_path / "s", built.directories) as outside:
        source = DaemonSource(tmp_path / "s", reconnect_s=0)
        held = list(source.lease(1, range(5)))
        outside.kill()
        with pytest.raises(DaemonError, match="went away"):
            list(source.lease(2, [0]))
        for lease in held:  # the memory is ours
            assert lease.payload.tobytes() == right(built, 1, lease.expert)
            lease.release()
        with pytest.raises(DaemonError):
            source.lease(1, [0])
        source.close()


def test_a_waiting_client_is_woken_by_the_daemons_death(built: Built, tmp_path: Path) -> None:
    with daemon_inside(tmp_path / "s", built.directories, drain_s=0) as inside:
        inside.server.inject("stall", argument=STALL_MS)
        source = DaemonSource(tmp_path / "s", reconnect_s=0)
        stream = source.lease(1, [0])
        wait_until(lambda: inside.server.stats()["reading"] > 0)
        threading.Timer(0.1, lambda: inside.daemon.stop("test")).start()
        with pytest.raises(DaemonError):
            next(stream)
        assert inside.server.stats()["reading"] == 1  # the drive still does not answer
        source.close()


def test_a_client_leases_again_when_the_daemon_is_back(built: Built, tmp_path: Path) -> None:
    first = start(tmp_path / "s", built.directories)
    source = DaemonSource(tmp_path / "s", reconnect_s=60)
    stream = source.lease(1, range(5))
    lease = next(stream)
    first.kill()
    second = start(tmp_path / "s", built.directories, ready=False)
    try:
        got = {lease.expert: lease.payload.tobytes()}
        got |= {again.expert: again.payload.tobytes() for again in stream}
        assert got == {expert: right(built, 1, expert) for expert in range(5)}
        lease.release()
        take(source, built, 2, [0, 1, 2, 3, 4])
        assert source.reconnects <= 1
        stats = source.stats()
        assert stats.hits + stats.joined + stats.misses >= 10
        source.close()
    finally:
        second.process.kill()
        second.process.wait()


def test_the_files_stand_in_and_the_daemon_takes_over_again(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3.store.client.connection.RETURN_S", 0.0)
    container = Container.open(built.home)
    first = start(tmp_path / "s", built.directories)
    source = DaemonSource(tmp_path / "s", fallback=lambda: FileSource(container))
    stream = source.lease(1, range(5))
    early = next(stream)
    first.kill()
    late = list(stream)
    assert {lease.expert for lease in [early, *late]} == set(range(5))
    for lease in [early, *late]:
        assert lease.payload.tobytes() == right(built, 1, lease.expert)
        lease.release()
    take(source, built, 2, [0, 1, 2])
    connected = [source.is_connected]
    with daemon_outside(tmp_path / "s", built.directories) as second:
        take(source, built, 2, [3, 4])
        connected.append(source.is_connected)
        assert connected == [False, True]
        assert second.status()["cache"]["misses"] == 2
        source.close()
    container.close()


def test_another_container_after_a_restart_is_an_error(built: Built, tmp_path: Path) -> None:
    other = build_container(tmp_path / "other", layers=[1], seed=9)
    with daemon_inside(tmp_path / "s", built.directories):
        source = DaemonSource(tmp_path / "s")
        take(source, built, 1, [0])
    with daemon_inside(tmp_path / "s", other.directories):
        for _ in range(2):
            with pytest.raises(DaemonError, match="instead of"):
                list(source.lease(1, [0]))
        source.close()


def test_close_wakes_a_thread_that_waits(built: Built, daemon: Inside) -> None:
    daemon.server.inject("stall", argument=STALL_MS)
    source = DaemonSource(daemon.socket)
    stream = source.lease(1, [0])

    waiting: list[threading.Thread] = []

    def wait() -> None:
        waiting.append(threading.current_thread())
        with pytest.raises(ValueError, match="closed"):
            next(stream)

    def close() -> None:
        wait_until(lambda: waiting)
        wait_until_standing(*waiting)
        source.close()
        assert daemon.server.stats()["reading"] == 1  # the drive still does not answer
        daemon.server.clear_faults()

    run_threads(wait, close)


def test_a_long_random_life(built: Built, tmp_path: Path) -> None:
    """Four clients' threads with held leases, forgotten streams and a small cache: always the right bytes."""
    with daemon_inside(
        tmp_path / "q", built.directories, quota=6, max_clients=2, cache_bytes=13 * 28672
    ) as inside:
        inside.server.inject("short", probability=0.2, argument=4096, seed=5)
        sources = [DaemonSource(inside.socket), DaemonSource(inside.socket)]

        def work(source: DaemonSource, seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(60):
                layer = dice.choice((1, 2))
                asked = dice.sample(range(5), dice.randint(1, 3))
                stream = source.lease(layer, asked)
                for lease in itertools.islice(stream, dice.randint(0, len(asked))):
                    assert lease.payload.tobytes() == right(built, layer, lease.expert)
                    lease.release()
                if dice.random() < 0.5:
                    stream.close()
                del stream  # one that is kept would hold what it was not asked for

        run_threads(*[partial(work, sources[n % 2], n) for n in range(4)])
        for source in sources:
            take(source, built, 1, [0, 1, 2, 3, 4])
            source.close()
        wait_until(lambda: inside.server.stats()["slots"]["held"] == 0)


KILLED = """
    import random, sys
    from pathlib import Path
    from k3.store.client.daemon_source import DaemonSource
    dice = random.Random(int(sys.argv[2]))
    source = DaemonSource(Path(sys.argv[1]))
    held = []
    while True:
        print("on", flush=True)
        for lease in source.lease(dice.choice((1, 2)), dice.sample(range(5), dice.randint(1, 4))):
            held.append(lease)
            if len(held) > 5:
                held.pop(0).release()
"""


def test_clients_killed_at_any_instant_leave_nothing(built: Built, daemon: Inside) -> None:
    dice = random.Random(2)
    code = "\n".join(line[4:] for line in KILLED.splitlines())
    witness = DaemonSource(daemon.socket)
    for seed in range(4):
        victim = subprocess.Popen(
            [sys.executable, "-c", code, str(daemon.socket), str(seed)], stdout=subprocess.PIPE, text=True
        )
        assert victim.stdout is not None
        for _ in range(dice.randint(1, 30)):
            assert victim.stdout.readline() == "on\n"
        victim.kill()
        victim.wait()
        victim.stdout.close()
        take(witness, built, 1, [0, 1, 2, 3, 4])
        wait_until(lambda: daemon.server.stats()["slots"]["held"] == 0)
        assert len(daemon.status()["clients"]) == 1
    witness.close()


# The model


def test_the_model_behind_the_socket_is_the_container(built: Built, daemon: Inside) -> None:
    container = Container.open(built.home)
    link = Link.open(daemon.socket, "model")
    model = DaemonModel(link)
    link.close()  # the memory stays
    assert model.identity == container.identity
    assert model.config == container.config
    assert model.tensor_names() == container.tensor_names()
    assert list(model.expert_layers()) == list(container.expert_layers())
    for layer in container.expert_layers():
        assert model.expert_count(layer) == container.expert_count(layer)
        assert model.expert_layout(layer) == container.expert_layout(layer)
    for name in container.tensor_names():
        mine, wanted = model.read_tensor(name), container.read_tensor(name)
        assert (mine.name, mine.encoding, mine.dtype, mine.shape) == (
            name,
            wanted.encoding,
            wanted.dtype,
            wanted.shape,
        )
        np.testing.assert_array_equal(mine.data, wanted.data)
        assert mine.data.dtype == wanted.data.dtype
        assert (mine.scales is None) == (wanted.scales is None)
        if mine.scales is not None:
            np.testing.assert_array_equal(mine.scales, wanted.scales)
        with pytest.raises(ValueError, match="cannot set"):
            mine.data.flags.writeable = True
    for name in ("config.json", "generation_config.json"):
        path, wanted_path = model.text_file(name), container.text_file(name)
        assert path is not None
        assert wanted_path is not None
        assert path.read_bytes() == wanted_path.read_bytes()
    assert model.text_file("no such") is None
    with pytest.raises(KeyError):
        model.read_tensor("no such")
    model.close()
    container.close()


def test_prefetched_experts_are_there_when_they_are_asked_for(built: Built, tmp_path: Path) -> None:
    with daemon_inside(tmp_path / "q", built.directories, quota=2, max_clients=1) as inside:
        source = DaemonSource(inside.socket)
        source.prefetch(1, [0, 1])
        wait_until(lambda: inside.server.stats()["cache"]["prefetched"] == 2)
        take(source, built, 1, [0, 1])
        assert (source.stats().hits, source.stats().misses) == (2, 0)
        assert inside.server.stats()["cache"]["prefetch_hits"] == 2
        with pytest.raises(ExpertError):
            source.prefetch(1, [77])
        source.close()


def test_a_prefetch_of_nothing_sends_nothing(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with daemon_inside(tmp_path / "q", built.directories) as inside:
        source = DaemonSource(inside.socket)
        take(source, built, 1, [0])

        def submit(*message: object) -> None:
            raise AssertionError(message)

        with monkeypatch.context() as patch:
            patch.setattr(NativeRing, "submit", submit)
            source.prefetch(1, [])()
        source.close()


def test_a_prefetch_that_has_not_begun_is_cancelled(built: Built, tmp_path: Path) -> None:
    with daemon_inside(tmp_path / "q", built.directories, quota=2, max_clients=1, io_depth=1) as inside:
        inside.server.inject("stall", argument=STALL_MS)
        source = DaemonSource(inside.socket)
        cancel = source.prefetch(1, [0, 1, 2, 3, 4])
        cancel()
        inside.server.clear_faults()
        take(source, built, 1, [0, 1, 2, 3, 4])
        assert source.stats().misses >= 3
        source.close()


def test_a_container_whose_experts_stay_in_shards(tmp_path: Path) -> None:
    built = build_container(tmp_path / "home", in_place=tmp_path / "snapshot")
    with daemon_inside(tmp_path / "s", [tmp_path / "home", tmp_path / "snapshot"]) as inside:
        source = DaemonSource(inside.socket)
        for layer in (1, 2):
            take(source, built, layer, [0, 1, 2, 3, 4])
        source.close()


def test_a_flood_of_prefetches_does_not_lock_anybody_out(tmp_path: Path) -> None:
    """More requests than either ring has entries, answers unread meanwhile: leases still come."""
    built = build_container(tmp_path / "home", layers=[1], experts=600)
    with daemon_inside(tmp_path / "q", built.directories, quota=400, max_clients=1) as inside:
        inside.server.inject("stall", times=4, argument=50)
        source = DaemonSource(inside.socket, patience_s=20)
        for _ in range(10):
            source.prefetch(1, range(600))
        take(source, built, 1, list(range(600)))
        source.close()
        wait_until(lambda: inside.server.stats()["slots"]["held"] == 0)
