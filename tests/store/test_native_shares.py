"""Holds up: no client gets more of slots, queues and memory than its share, whatever it asks for and calls off."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from k3.store.protocol.native import NativeServer
from k3.store.protocol.ring_layout import Op, Source, Status
from tests.support.native_rig import Client, World, client_of, make_world, serving
from tests.support.waiting import wait_until

DEPTH = 2
HANGS_MS = 60_000  # until clear_faults
ROOTS = 2


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, layers=2, experts=100, payload_bytes=3 * 4096, roots=ROOTS)


@pytest.fixture
def server(world: World) -> Iterator[NativeServer]:
    """Of 80 slots 8 are promised and 18 for prefetches: 54 may be pinned. Nothing is digested."""
    with serving(world, slots=80, max_clients=2, quota=4, io_depth=DEPTH, verify="never") as running:
        yield running


def unpin(client: Client, layer: int, experts: list[int]) -> None:
    assert client.ring.submit(9, Op.UNPIN, layer, experts) == len(experts)


def requests_of(server: NativeServer, client: Client) -> int:
    return sum(entry["requests"] for entry in server.stats()["clients"] if entry["id"] == client.grant.client)


def handled(server: NativeServer, client: Client, requests: int) -> None:
    """Wait until the server has taken this many requests of a client."""
    wait_until(lambda: requests_of(server, client) == requests)


def test_pinning_and_unpinning_reads_next_to_nothing(server: NativeServer, world: World) -> None:
    """While the drives hang, 300 pins are called off: what had begun keeps its slot, and counts as pinned."""
    server.inject("stall", argument=HANGS_MS)
    with client_of(server, world) as client, client_of(server, world) as victim:
        for begin in range(0, 300, 30):
            experts = [expert % 100 for expert in range(begin, begin + 30)]
            client.ask(begin // 150, experts, op=Op.PIN)
            handled(server, client, 2 * begin + 30)
            unpin(client, begin // 150, experts)
            handled(server, client, 2 * begin + 60)
            stats = server.stats()
            assert stats["unwanted"] == stats["reading"] == stats["slots"]["filling"] <= DEPTH * ROOTS
            assert stats["pinned"] == stats["unwanted"], "what cannot be called off counts against its pinner"
        assert sum(root["queued"] for root in server.stats()["roots"]) == 0
        victim.ask(1, [99])
        wait_until(lambda: sum(root["queued"] for root in server.stats()["roots"]) == ROOTS)
        server.clear_faults()
        victim.check(victim.take(1)[0])
        wait_until(lambda: server.stats()["pinned"] == server.stats()["reading"] == 0)
        reads = sum(root["reads"] for root in server.stats()["roots"])
        assert reads <= DEPTH * ROOTS + ROOTS
        answers = client.take(300)
        assert {answer.status for answer in answers} <= {Status.CANCELLED, Status.BUSY}


def test_a_pin_called_off_in_its_own_batch_never_begins(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client:
        for _ in range(20):
            batch = [(Op.PIN, 5), (Op.UNPIN, 5)] * 10
            for op, expert in batch:
                client.ring.submit(1, op, 0, [expert])
        client.take(200)
        wait_until(lambda: server.stats()["reading"] == server.stats()["waiting_for_slot"] == 0)
        stats = server.stats()
        assert (stats["pinned"], stats["slots"]["held"]) == (0, 0)


def test_what_is_asked_for_is_read_before_pins(world: World) -> None:
    """One read at a time: of 50 pins that came first, only the one that is in progress is before a lease."""
    with (
        serving(world, slots=80, max_clients=2, quota=4, io_depth=1) as server,
        client_of(server, world) as pins,
        client_of(server, world) as asks,
    ):
        server.inject("stall", argument=HANGS_MS)
        pins.ask(0, range(50), op=Op.PIN)
        wait_until(lambda: all(root["queued"] == 49 for root in server.stats()["roots"]))
        asks.ask(1, [7])
        wait_until(lambda: all(root["queued"] == 50 for root in server.stats()["roots"]))
        server.clear_faults()
        server.inject("stall", argument=5)
        asks.check(asks.take(1)[0])
        pins.inbox += pins.ring.poll()
        assert len(pins.inbox) <= 10  # of 50
        server.clear_faults()
        pins.take(50)


def test_a_lease_takes_a_queued_pin_along(server: NativeServer, world: World) -> None:
    server.inject("stall", argument=HANGS_MS)
    with client_of(server, world) as pins, client_of(server, world) as asks:
        pins.ask(0, range(40), op=Op.PIN)
        wait_until(lambda: server.stats()["reading"] == 40)
        asks.ask(0, [39])
        handled(server, asks, 1)
        unpin(pins, 0, [39])  # nor does calling the pin off take the read away
        handled(server, pins, 41)
        server.clear_faults()
        (answer,) = asks.take(1)
        asks.check(answer)
        assert answer.source == Source.JOINED


def test_an_expert_called_off_half_way_is_read_anew_for_the_next_one(world: World) -> None:
    """Its first root hangs, its second root's queue has been emptied: whoever asks now gets the whole of it."""
    with (
        serving(world, slots=80, max_clients=2, quota=4, io_depth=1) as server,
        client_of(server, world) as pins,
        client_of(server, world) as asks,
    ):
        server.inject("stall", argument=HANGS_MS, file=0)
        pins.ask(0, [1], op=Op.PIN)
        wait_until(lambda: [root["reads"] for root in server.stats()["roots"]] == [0, 1])
        unpin(pins, 0, [1])
        handled(server, pins, 2)
        pins.ask(0, [2], op=Op.PIN)  # its half on root 0 is queued behind, the other half is read
        wait_until(lambda: [root["reads"] for root in server.stats()["roots"]] == [0, 2])
        unpin(pins, 0, [2])
        handled(server, pins, 4)
        asks.ask(0, [1, 2])
        handled(server, asks, 2)
        server.clear_faults()
        for answer in asks.take(2):
            asks.check(answer)
        wait_until(lambda: server.stats()["reading"] == 0)
        assert server.stats()["pinned"] == 0


def busy(server: NativeServer) -> tuple[int, int, int, int]:
    """Return how many reads are in progress, and how many slots are held, being filled and pinned."""
    stats = server.stats()
    return stats["reading"], stats["slots"]["held"], stats["slots"]["filling"], stats["pinned"]


@pytest.mark.parametrize("seed", range(6))
def test_reads_for_nobody_are_bounded_whatever_is_asked(world: World, seed: int) -> None:
    """Lease, pin and prefetch at random, and cancel everything at random, with clients that leave.

    While the drives stand still, at most as many flights are without waiters as reads can be in progress, as soon
    as what has ended has landed; and never does a lease within its quota fail.
    """
    random = np.random.default_rng(seed)
    depth = int(random.integers(1, 4))
    with serving(world, slots=40, max_clients=2, quota=4, io_depth=depth, verify="never") as server:  # noqa: SIM117
        with client_of(server, world, "honest") as honest:
            other = Client(server, world)
            for _ in range(60):
                server.inject("stall", argument=HANGS_MS)
                held = int(random.integers(1, 4))
                for _ in range(held):
                    layer, op = int(random.integers(2)), Op(int(random.choice([1, 3, 4, 5, 5, 5, 6, 6])))
                    experts = random.choice(100, int(random.integers(1, 12)), replace=False).tolist()
                    other.ring.submit(int(random.integers(3)), op, layer, [0] if op == Op.CANCEL else experts)
                sent = other
                if random.random() < 0.2:
                    other.close()
                    other = Client(server, world)
                wait_until(lambda: server.stats()["unwanted"] <= depth * ROOTS)
                pin_slots = server.stats()["pin_slots"]
                wait_until(lambda: server.stats()["pinned"] <= pin_slots + depth * ROOTS)  # noqa: B023
                honest.ask(int(random.integers(2)), random.choice(100, 3, replace=False).tolist())
                server.clear_faults()
                for answer in honest.take(3):
                    honest.check(answer)
                    honest.give_back([answer])
                if sent is other:
                    for answer in other.ring.poll():
                        if answer.op == Op.LEASE and answer.status == Status.OK:
                            other.give_back([answer])
            other.close()
            wait_until(lambda: busy(server) == (0, 0, 0, 0))  # what was given back may not have been handled yet


def has_prefetched(server: NativeServer, experts: int) -> bool:
    return bool(server.stats()["cache"]["prefetched"] == experts)


def test_used_prefetches_leave_nothing_behind(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=64, payload_bytes=300)
    with serving(world, slots=24, max_clients=1, quota=4) as server, client_of(server, world) as client:
        for turn in range(40):
            experts = [(4 * turn + n) % 64 for n in range(4)]
            before = server.stats()["cache"]["prefetched"]
            client.ask(0, experts, op=Op.PREFETCH, tag=turn)
            wait_until(partial(has_prefetched, server, before + 4))
            client.give_back(client.lease(0, experts))
            wait_until(lambda: server.stats()["slots"]["held"] == 0)
            assert server.stats()["unused_prefetches"] == 0
        assert server.stats()["cache"]["prefetch_hits"] == 160


def test_freeing_a_client_looks_at_each_of_its_reads_once(tmp_path: Path) -> None:
    """However many others are queued: 300 pins of two reads each are 600 steps, and not 600 for each of 900."""
    world = make_world(tmp_path, layers=2, experts=400, payload_bytes=2 * 4096, roots=2)
    with serving(world, slots=1000, max_clients=3, quota=4, io_depth=1) as server:
        server.inject("stall", argument=HANGS_MS)
        stays = Client(server, world)
        stays.ask(0, range(400), op=Op.PIN)
        goes = Client(server, world)
        goes.ask(1, range(300), op=Op.PIN)
        wait_until(lambda: server.stats()["reading"] == 700)
        # Both drives are at the first expert: one that began later would begin with another.
        wait_until(lambda: all(root["in_flight"] == 1 for root in server.stats()["roots"]))
        before = server.stats()["call_off_steps"]
        goes.close()
        stats = server.stats()
        assert stats["reading"] == 400
        assert stats["call_off_steps"] - before == 600
        before = stats["call_off_steps"]
        unpin(stays, 0, list(range(400)))
        handled(server, stays, 800)
        assert server.stats()["call_off_steps"] - before == 800
        assert server.stats()["reading"] == 1
        stays.close()


def test_pins_of_policy_and_clients_share(tmp_path: Path) -> None:
    """The policy's pins are part of what may be pinned: what is promised can be had, all of it."""
    world = make_world(tmp_path, layers=1, experts=60)
    policy_pins = tuple((0, expert) for expert in range(18))
    with (
        serving(world, policy="pin-lru", pins=policy_pins, slots=32, max_clients=2, quota=4) as server,
        client_of(server, world) as pins,
        client_of(server, world) as asks,
    ):
        assert server.stats()["pin_slots"] == 0  # 32 - 8 promised - 6 for prefetches - 18 of the policy
        for begin in range(0, 18, 2):
            pins.give_back(pins.lease(0, [begin, begin + 1]))
        pins.ask(0, range(20, 34), op=Op.PIN)
        assert {answer.status for answer in pins.take(14)} == {Status.BUSY}
        asks.give_back(asks.lease(0, [50, 51, 52, 53]))


def test_a_read_that_hangs_is_told_of(world: World) -> None:
    with serving(world) as server, client_of(server, world) as client:
        client.give_back(client.lease(0, [0]))
        assert [root["oldest_read_ns"] for root in server.stats()["roots"]] == [0, 0]
        server.inject("stall", argument=HANGS_MS, file=1)
        client.ask(0, [1])

        def hangs_alone() -> bool:
            """Tell whether the other drive's part of the expert has been read: both begin at once."""
            other_ns, hanging_ns = (root["oldest_read_ns"] for root in server.stats()["roots"])
            return bool(hanging_ns > 20_000_000 and other_ns == 0)

        wait_until(hangs_alone)
        server.clear_faults()
        client.take(1)
        assert [root["oldest_read_ns"] for root in server.stats()["roots"]] == [0, 0]
