"""Holds up: a forked child can neither use nor harm its parent's connection to the daemon."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3.base.errors import DaemonError
from k3.model.keys import ExpertKey
from k3.store.client.daemon_source import DaemonSource
from k3.store.protocol.ring_layout import Op
from tests.support.children import in_child
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, daemon_inside
from tests.support.native_rig import client_of, make_world, serving
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("container")
    return build_container(place / "home", [place / "a"], [1, 2])


@pytest.fixture
def daemon(built: Built, tmp_path: Path) -> Iterator[Inside]:
    with daemon_inside(tmp_path / "s", built.directories, quota=4, max_clients=2) as inside:
        yield inside


def test_a_child_that_leaves_a_lease_does_not_give_it_back(built: Built, daemon: Inside) -> None:
    """It leaves an inherited `with lease:`, closes stream and source, and forgets another lease."""
    source = DaemonSource(daemon.socket)
    stream = source.lease(1, [0, 1])
    leases = [next(stream), next(stream)]
    other = source.lease(2, [3])

    def leave() -> None:
        with leases[0]:
            assert leases[0].payload.tobytes() == built.payloads[ExpertKey(1, leases[0].expert)]
        leases.pop()
        stream.close()
        other.close()
        source.close()

    assert in_child(leave) == 0
    for expert in range(5):  # as many reads as would take the slots, had they been given back
        for lease in source.lease(2, [expert]):
            lease.release()
    for lease in leases:
        assert lease.payload.tobytes() == built.payloads[ExpertKey(1, lease.expert)]
    assert daemon.server.stats()["clients"][0]["leases"] >= 2
    for lease in [*leases, *other]:
        lease.release()
    source.close()
    assert daemon.server.stats()["stale_releases"] == 0


def test_whatever_a_child_asks_for_is_refused(daemon: Inside) -> None:
    """Also while the lock was held by a thread that the child does not have."""
    source = DaemonSource(daemon.socket)
    cancel = source.prefetch(1, [4])
    stream = source.lease(1, [0])

    def ask() -> None:
        calls: list[Callable[[], object]] = [
            lambda: source.lease(1, [0]), lambda: source.prefetch(1, [1]), lambda: source.pin(1, [1]),
            lambda: source.unpin(1, [1]), lambda: next(stream), source.stats,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(DaemonError, match="Open another one in the child"):
                call()
        cancel()
        stream.close()
        source.close()
        with DaemonSource(daemon.socket).lease(1, [2]) as own:  # a child may have a connection of its own
            next(own).release()

    held = threading.Event()
    done = threading.Event()

    def hold() -> None:
        with source._changed:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    code = in_child(ask)
    done.set()
    thread.join(60)
    assert code == 0
    with next(stream) as lease:
        assert lease.expert == 0
    source.close()


def test_a_child_that_lives_on_does_not_keep_its_dead_parent_s_leases(daemon: Inside) -> None:
    """The middle process leases, forks and ends; its child stays until it is told to go."""
    ends, tell = os.pipe()

    def lease_and_leave_a_child() -> None:
        source = DaemonSource(daemon.socket)
        kept = [next(source.lease(1, [0]))]
        assert kept
        if os.fork() == 0:
            os.close(tell)
            os.read(ends, 1)
            os._exit(0)
        os._exit(0)

    assert in_child(lease_and_leave_a_child) == 0
    wait_until(lambda: daemon.server.stats()["clients"] == [])
    assert daemon.server.stats()["slots"]["held"] == 0
    os.close(tell)
    os.close(ends)


def test_a_ring_is_of_one_process(tmp_path: Path) -> None:
    """Below Python, too: the ring is not even mapped in a child, and closing it there unmaps nothing."""
    world = make_world(tmp_path)
    with serving(world) as server, client_of(server, world) as client:
        (lease,) = client.lease(0, [0])

        def use() -> None:
            calls: list[Callable[[], object]] = [
                lambda: client.ring.submit(1, Op.LEASE, 0, [1]), client.ring.poll, client.ring.take,
                lambda: client.ring.release([lease.slot], [lease.generation]), lambda: client.ring.wait(1.0),
                lambda: client.ring.closed_by_daemon,
            ]  # fmt: skip
            for call in calls:
                with pytest.raises(ValueError, match=f"belongs to process {os.getppid()}"):
                    call()
            client.check(lease)
            client.ring.close()

        assert in_child(use) == 0
        client.check(lease)
        client.give_back([lease])
        assert client.lease(0, [1])
