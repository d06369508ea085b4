"""Holds up: what a client pins stays in RAM until it says otherwise, also when the daemon goes and comes back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3.base.errors import DaemonError, DriveError, ExpertError
from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.store.client.daemon_source import DaemonSource
from k3.store.lending.file_source import FileSource
from k3.store.source import BudgetError
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, daemon_inside, daemon_outside
from tests.support.faults import STALL_MS
from tests.support.waiting import wait_until

FEW = ("--quota", "2", "--max-clients", "2")
SLOTS = 14  # 4 are promised to the two clients, 2 are for prefetches: 8 may be pinned


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("container")
    return build_container(place / "home", [place / "a"], [1, 2], layers=(1, 2, 3))


@pytest.fixture
def daemon(built: Built, tmp_path: Path) -> Iterator[Inside]:
    cache_bytes = SLOTS * 28672
    with daemon_inside(
        tmp_path / "s", built.directories, quota=2, max_clients=2, cache_bytes=cache_bytes
    ) as inside:
        assert inside.server.settings.slots >= SLOTS - 1
        yield inside


def take(source: DaemonSource, built: Built, layer: int, experts: list[int]) -> None:
    for lease in source.lease(layer, experts):
        with lease:
            assert lease.payload.tobytes() == built.payloads[ExpertKey(layer, lease.expert)]


def test_pinned_experts_stay_whatever_else_is_read(built: Built, daemon: Inside) -> None:
    source = DaemonSource(daemon.socket)
    source.pin(1, [0, 3])
    source.pin(1, [3])
    assert daemon.server.stats()["pinned"] == 2
    for _ in range(3):
        for layer in (1, 2, 3):
            take(source, built, layer, [0, 1, 2, 3, 4])
    misses = source.stats().misses
    take(source, built, 1, [0, 3])
    assert source.stats().misses == misses
    source.unpin(1, [0, 3, 4])
    wait_until(lambda: daemon.server.stats()["pinned"] == 0)
    source.pin(2, [1])
    source.close()
    wait_until(lambda: daemon.server.stats()["pinned"] == 0)


def test_pins_have_a_share_and_no_more(built: Built, daemon: Inside) -> None:
    source = DaemonSource(daemon.socket)
    room = daemon.server.stats()["pin_slots"]
    assert 5 <= room < 10
    source.pin(1, range(5))
    source.pin(2, range(room - 5))
    with pytest.raises(BudgetError, match="Unpin others"):
        source.pin(3, [0, 1])
    wait_until(lambda: daemon.server.stats()["pinned"] == room)
    source.unpin(1, [0])
    source.pin(3, [0])
    source.close()


def test_what_cannot_be_pinned(built: Built, daemon: Inside) -> None:
    source = DaemonSource(daemon.socket)
    with pytest.raises(ExpertError):
        source.pin(1, [77])
    with pytest.raises(ValueError, match="more than once"):
        source.pin(1, [1, 1])
    daemon.server.inject("error", argument=5)
    with pytest.raises(DriveError, match=r"layer 2.*expert 1"):
        source.pin(2, [1])
    daemon.server.clear_faults()
    source.pin(2, [1])
    assert daemon.server.stats()["pinned"] == 1
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.pin(2, [1])


def test_an_expert_dropped_before_it_came_is_not_kept(built: Built, daemon: Inside) -> None:
    daemon.server.inject("stall", argument=STALL_MS)
    source = DaemonSource(daemon.socket)
    thread = threading.Thread(target=source.pin, args=(1, [0, 1]))
    thread.start()
    wait_until(lambda: daemon.server.stats()["pinned"] > 0)
    source.unpin(1, [0, 1])
    thread.join(60)
    daemon.server.clear_faults()
    take(source, built, 2, [0])
    wait_until(lambda: daemon.server.stats()["pinned"] == 0)
    source.close()


def test_pins_come_back_with_the_daemon(built: Built, tmp_path: Path) -> None:
    with daemon_outside(tmp_path / "s", built.directories, *FEW) as first:
        source = DaemonSource(tmp_path / "s", reconnect_s=60)
        source.pin(1, [1, 2])
        source.pin(3, [0])
        source.unpin(1, [2])
        first.kill()
    with daemon_outside(tmp_path / "s", built.directories, *FEW) as second:
        take(source, built, 2, [0])
        wait_until(lambda: second.status()["cache"]["pinned"] == 2)
        source.unpin(1, [1])
        source.unpin(3, [0])
        wait_until(lambda: second.status()["cache"]["pinned"] == 0)
        assert source.reconnects == 1
        source.close()


def test_pins_that_cannot_come_back_are_told_of(
    built: Built, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with daemon_inside(tmp_path / "s", built.directories, quota=2, max_clients=2):
        source = DaemonSource(tmp_path / "s", reconnect_s=60)
        source.pin(1, [1])
    with daemon_inside(tmp_path / "s", built.directories, quota=2, max_clients=2) as inside:
        inside.server.inject("error", argument=5)
        with pytest.raises(DriveError):
            source.pin(1, [1])
        inside.server.clear_faults()
        assert "cannot be pinned again" in caplog.text
        source.pin(1, [1])
        assert inside.server.stats()["pinned"] == 1
        source.close()


def test_without_a_daemon(built: Built, tmp_path: Path) -> None:
    container = Container.open(built.home)
    source = DaemonSource(tmp_path / "s", fallback=lambda: FileSource(container))
    with pytest.raises(DaemonError, match="no daemon"):
        source.pin(1, [1])
    source.close()
    container.close()


@pytest.mark.parametrize("seed", range(3))
def test_pins_against_a_set(built: Built, daemon: Inside, seed: int) -> None:
    """Threads pin, unpin and lease at random, some of it in vain: at the end just what is wanted is pinned."""
    daemon.server.inject("error", argument=5, probability=0.1, seed=seed)
    source = DaemonSource(daemon.socket)
    wanted: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    failures: list[BaseException] = []

    def work(layer: int) -> None:
        dice = random.Random(f"{seed} {layer}")
        try:
            for _ in range(60):
                expert = dice.randrange(5)
                action = dice.randrange(3)
                try:
                    if action == 0:
                        wanted[layer].discard(expert)
                        source.pin(layer, [expert])
                        wanted[layer].add(expert)
                    elif action == 1:
                        source.unpin(layer, [expert])
                        wanted[layer].discard(expert)
                    else:
                        take(source, built, layer, [expert])
                except (BudgetError, DriveError):
                    pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, f"seed {seed}"
    daemon.server.clear_faults()
    take(source, built, 1, [0])
    total = sum(map(len, wanted.values()))
    wait_until(lambda: daemon.server.stats()["pinned"] == total)
    source.close()
