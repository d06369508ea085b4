"""Holds up: leases of the native data plane: right bytes, single flight, quotas, generations, pins, prefetch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from k3.base.errors import UnsupportedError
from k3.store.protocol.native import (
    Completion,
    Grants,
    NativeServer,
    Policy,
    ServerSettings,
    policy_names,
    slot_bytes_for,
)
from k3.store.protocol.ring_layout import Op, Source, Status
from k3.store.source import Lease, Payload
from tests.support.faults import STALL_MS
from tests.support.native_rig import Client, World, client_of, make_world, serving
from tests.support.waiting import wait_until

SHAPES = {
    "one root": {},
    "three roots": {"roots": 3},
    "one extent anywhere": {"unaligned": 1},
    "six extents anywhere": {"unaligned": 6},
    "several chunks": {"layers": 1, "experts": 3, "payload_bytes": 11_000_001},
    "several chunks anywhere": {"layers": 1, "experts": 3, "payload_bytes": 9_000_001, "unaligned": 2},
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


@pytest.fixture
def server(world: World) -> Iterator[NativeServer]:
    with serving(world) as running:
        yield running


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direct", [True, False])
def test_every_expert_arrives_as_it_is_stored(tmp_path: Path, shape: str, direct: bool) -> None:
    world = make_world(tmp_path, **SHAPES[shape])
    with serving(world, direct=direct) as server, client_of(server, world) as client:
        for layer in world.pieces:
            for expert in world.experts(layer):
                client.give_back(client.lease(layer, [expert]))
        stats = server.stats()
        stored_bytes = sum(stored for places in world.places.values() for _, _, stored in places)
        assert stats["checked_bytes"] == stored_bytes
        assert all(root["errors"] == 0 for root in stats["roots"])
        if not direct:
            assert not any(root["direct"] for root in stats["roots"])


def test_a_second_lease_is_a_hit_and_shares_the_slot(server: NativeServer, world: World) -> None:
    with client_of(server, world) as one, client_of(server, world) as two:
        (first,) = one.lease(0, [3])
        (second,) = two.lease(0, [3])
        assert (first.source, second.source) == (Source.READ, Source.ARENA)
        assert (first.slot, first.generation) == (second.slot, second.generation)
        assert server.stats()["cache"]["hits"] == 1
        one.give_back([first])
        two.check(second)


def test_single_flight_over_four_clients(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=2)
    with serving(world) as server:
        server.inject("stall", argument=STALL_MS)
        clients = [Client(server, world, f"client {n}") for n in range(4)]
        for client in clients:
            client.ask(0, [0])
        wait_until(lambda: server.stats()["cache"]["joined"] == 3)
        server.clear_faults()
        answers = [client.take(1)[0] for client in clients]
        for client, answer in zip(clients, answers, strict=True):
            client.check(answer)
        assert sorted(answer.source for answer in answers) == [Source.READ] + 3 * [Source.JOINED]
        stats = server.stats()
        assert (stats["cache"]["misses"], stats["cache"]["joined"], stats["roots"][0]["reads"]) == (1, 3, 1)
        for client in clients:
            client.close()


@pytest.mark.parametrize("policy", policy_names())
def test_the_daemon_evicts_as_its_policy_says(tmp_path: Path, policy: str) -> None:
    world = make_world(tmp_path, layers=3, experts=12, payload_bytes=300)
    with (
        serving(world, policy=policy, slots=8, max_clients=1, quota=3) as server,
        client_of(server, world) as client,
    ):
        model = Policy(policy, 8, dict.fromkeys(range(3), 12))
        random = np.random.default_rng(7)
        evictions = 0
        for _ in range(400):
            layer = int(random.integers(3))
            experts = [int(e) for e in random.choice(12, int(random.integers(1, 4)), replace=False)]
            expected = []
            for expert in experts:  # one request after the other, so that the order of events is known
                hit = model.access(layer, expert)
                if not hit:
                    evictions += len(model.insert(layer, expert))
                model.hold(layer, expert)
                expected.append(Source.ARENA if hit else Source.READ)
            granted = [client.lease(layer, [expert])[0] for expert in experts]
            assert [completion.source for completion in granted] == expected
            for completion in granted:
                client.give_back([completion])
                model.unhold(completion.layer, completion.expert)
        assert server.stats()["cache"]["evictions"] == evictions > 0


def test_the_quota_is_answered_at_once(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client, client_of(server, world) as other:
        held = client.lease(0, [0, 1])  # the quota is 2
        client.ask(1, [4])
        (refused,) = client.take(1)
        assert (refused.status, refused.layer, refused.expert) == (Status.QUOTA, 1, 4)
        other.give_back(other.lease(1, [4]))  # it is each client's own
        client.give_back(held[:1])
        assert client.lease(1, [4])


def test_waiting_counts_toward_the_quota(server: NativeServer, world: World) -> None:
    server.inject("stall", argument=STALL_MS)
    with client_of(server, world) as client:
        client.ask(0, [0, 1, 2])
        assert [answer.status for answer in client.take(1)] == [Status.QUOTA]
        server.clear_faults()
        assert [answer.status for answer in client.take(2)] == [Status.OK, Status.OK]


def test_an_expert_that_is_not_there(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client:
        for layer, expert in ((0, 8), (3, 0), (2**32 - 1, 2**32 - 1)):
            client.ask(layer, [expert], tag=2**64 - 1)
            (answer,) = client.take(1)
            assert (answer.status, answer.tag) == (Status.NO_SUCH_EXPERT, 2**64 - 1)
            assert (answer.layer, answer.expert) == (layer, expert)
        assert server.violations() == []


def test_stale_releases_are_ignored_and_counted(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client, client_of(server, world) as other:
        (lease,) = client.lease(0, [0])
        (held,) = other.lease(0, [0])
        client.ring.release([lease.slot, lease.slot], [lease.generation + 1, lease.generation - 1])
        wait_until(lambda: server.stats()["stale_releases"] == 2)
        assert server.stats()["clients"][0]["leases"] == 1
        client.give_back([lease])
        client.give_back([lease])  # a second time: it is the other's now
        client.ring.release([15], [0])
        wait_until(lambda: server.stats()["stale_releases"] == 4)
        assert server.stats()["slots"]["held"] == 1
        other.check(held)
        assert server.violations() == []


def test_a_slot_s_generation_rises_when_it_is_filled_again(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=6)
    with serving(world, slots=1, max_clients=1, quota=1) as server, client_of(server, world) as client:
        seen = []
        for expert in range(6):
            (lease,) = client.lease(0, [expert])
            seen.append((lease.slot, lease.generation))
            client.give_back([lease])
        assert seen == [(0, generation) for generation in range(1, 7)]


def test_a_removed_client_frees_what_it_held_awaited_and_pinned(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=30)
    with serving(world, slots=12, max_clients=2, quota=4, io_depth=1) as server:
        client = Client(server, world)
        client.lease(0, [0, 1])
        client.ask(0, [2], op=Op.PIN)
        client.take(1)
        server.inject("stall", times=1, argument=STALL_MS)
        client.ask(0, [3, 4])
        wait_until(lambda: (root := server.stats()["roots"][0])["in_flight"] == 1 and root["queued"] == 1)
        client.close()
        server.remove_client(client.grant.client)  # a second time
        stats = server.stats()
        assert (stats["slots"]["held"], stats["pinned"], stats["clients"]) == (0, 0, [])
        assert stats["reading"] == 1  # what has begun is read to its end, the other never begins
        server.clear_faults()
        wait_until(lambda: server.stats()["slots"]["filling"] == 0)
        assert server.stats()["roots"][0]["reads"] == 4
        with client_of(server, world) as another:
            assert another.lease(0, [3])[0].source == Source.ARENA


def test_slots_of_abandoned_reads_are_waited_for_not_refused(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=8)
    with serving(world, slots=2, max_clients=1, quota=2, io_depth=2) as server:
        server.inject("stall", times=2, argument=STALL_MS)
        client = Client(server, world)
        client.ask(0, [0, 1])
        wait_until(lambda: server.stats()["roots"][0]["in_flight"] == 2)
        client.close()
        with client_of(server, world) as another:  # every slot is still being filled for nobody
            another.ask(0, [2, 3])
            wait_until(lambda: server.stats()["waiting_for_slot"] == 2)
            server.clear_faults()
            for answer in another.take(2):
                another.check(answer)


def test_pins_stay_and_have_a_limit(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=40)
    with serving(world, slots=16, max_clients=1, quota=4) as server, client_of(server, world) as client:
        assert server.stats()["pin_slots"] == 9  # 16 - 4 promised - 3 for prefetches
        client.ask(0, list(range(9)), op=Op.PIN)
        assert {answer.status for answer in client.take(9)} == {Status.OK}
        client.ask(0, [20], op=Op.PIN)
        assert client.take(1)[0].status == Status.BUSY
        client.ask(0, [3], op=Op.PIN)  # pinned already: nothing more is needed
        assert client.take(1)[0].status == Status.OK
        for expert in range(20, 40):
            client.give_back(client.lease(0, [expert]))
        assert all(client.lease(0, [e])[0].source == Source.ARENA for e in range(4))
        client.ring.submit(1, Op.UNPIN, 0, list(range(9)))
        wait_until(lambda: server.stats()["pinned"] == 0)


def test_the_control_side_pins_and_warms(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=2, experts=10)
    with serving(world, slots=16, max_clients=1, quota=4) as server, client_of(server, world) as client:
        assert server.warm(0, list(range(5))) == 5
        wait_until(lambda: server.stats()["warming"] == 0 and server.stats()["slots"]["filling"] == 0)
        assert server.warm(0, list(range(5))) == 0
        assert server.stats()["slots"]["cached"] == 5
        assert server.pin(1, list(range(10))) == 9
        wait_until(lambda: server.stats()["slots"]["held"] == 9)
        assert client.lease(0, [0])[0].source == Source.ARENA
        assert server.unpin(1, list(range(10))) == 9
        with pytest.raises(ValueError, match="no such expert"):
            server.warm(0, [10])


def test_prefetched_experts_are_hits(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=2, experts=8)
    with serving(world, slots=20, max_clients=1, quota=4) as server, client_of(server, world) as client:
        client.ask(0, [0, 1, 2], op=Op.PREFETCH)
        wait_until(lambda: server.stats()["cache"]["prefetched"] == 3)
        assert all(lease.source == Source.ARENA for lease in client.lease(0, [0, 1, 2]))
        stats = server.stats()["cache"]
        assert (stats["prefetch_hits"], stats["hits"], stats["misses"]) == (3, 3, 0)
        assert client.ring.poll() == []  # a prefetch that succeeds is silent


def test_prefetches_keep_to_their_share(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=2, experts=20)
    with serving(world, slots=20, max_clients=1, quota=4) as server, client_of(server, world) as client:
        client.ask(0, list(range(10)), op=Op.PREFETCH, tag=1)  # the share is 4
        refused = client.take(6)
        assert {answer.status for answer in refused} == {Status.BUSY}
        wait_until(lambda: server.stats()["cache"]["prefetched"] == 4)
        client.ask(1, list(range(4)), op=Op.PREFETCH, tag=2)  # what was not used gives way to the next one
        wait_until(lambda: server.stats()["cache"]["prefetched"] == 8)
        assert server.stats()["cache"]["prefetch_wasted"] == 4
        assert server.stats()["slots"]["cached"] == 4


def prefetched(server: NativeServer, count: int) -> None:
    """Wait until so many prefetches have landed, in all."""
    wait_until(lambda: server.stats()["cache"]["prefetched"] == count)


def in_arena(client: Client, layer: int, experts: Sequence[int]) -> list[int]:
    """Which of these experts a lease finds in RAM."""
    leases = client.lease(layer, experts)
    client.give_back(leases)
    return sorted(lease.expert for lease in leases if lease.source == Source.ARENA)


def test_a_flood_of_prefetches_displaces_only_its_own(tmp_path: Path) -> None:
    """The share of prefetches is 4: two clients that use it have 2 each, whatever the other one does."""
    world = make_world(tmp_path, layers=3, experts=40)
    with (
        serving(world, slots=24, max_clients=2, quota=4) as server,
        client_of(server, world, "floods") as flood,
        client_of(server, world, "modest") as modest,
    ):
        assert server.stats()["prefetch_slots"] == 4
        flood.ask(0, [0, 1, 2, 3], op=Op.PREFETCH, tag=1)  # alone, it may have all
        prefetched(server, 4)
        modest.ask(1, [0, 1], op=Op.PREFETCH, tag=1)
        prefetched(server, 6)
        for turn in range(4, 40, 4):
            flood.ask(0, range(turn, turn + 4), op=Op.PREFETCH, tag=turn)
            busy = flood.take(2)  # two have its share, the other two would only displace them
            assert {answer.status for answer in busy} == {Status.BUSY}
            prefetched(server, 6 + turn // 2)
        assert in_arena(modest, 1, [0, 1]) == [0, 1]
        assert in_arena(flood, 0, [36, 37]) == [36, 37]
        assert server.stats()["cache"]["prefetch_hits"] == 4


def test_who_has_no_prefetch_takes_one_from_who_has(tmp_path: Path) -> None:
    """Also where there are fewer slots for prefetches than clients."""
    world = make_world(tmp_path, layers=1, experts=20)
    with (
        serving(world, slots=16, max_clients=4, quota=3) as server,
        client_of(server, world) as first,
        client_of(server, world) as second,
    ):
        assert server.stats()["prefetch_slots"] == 1
        first.ask(0, [3], op=Op.PREFETCH)
        prefetched(server, 1)
        second.ask(0, [4], op=Op.PREFETCH)
        prefetched(server, 2)
        assert server.stats()["cache"]["prefetch_wasted"] == 1
        assert in_arena(second, 0, [4]) == [4]


def test_what_a_client_that_has_gone_prefetched_goes_first(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=20)
    with serving(world, slots=24, max_clients=2, quota=4) as server, client_of(server, world) as stays:
        stays.ask(0, [0, 1, 2], op=Op.PREFETCH, tag=1)
        prefetched(server, 3)
        with client_of(server, world) as leaves:
            leaves.ask(0, [10], op=Op.PREFETCH, tag=1)
            prefetched(server, 4)
        stays.ask(0, [3], op=Op.PREFETCH, tag=2)
        prefetched(server, 5)
        assert in_arena(stays, 0, [0, 1, 2, 3]) == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(4))
def test_prefetches_of_many_clients_keep_even_shares(tmp_path: Path, seed: int) -> None:
    """Each client's newest prefetches, as many as its share, are there whenever it comes to use them."""
    dice = np.random.default_rng(seed)
    world = make_world(tmp_path, layers=3, experts=100)
    share = 2
    with serving(world, slots=12 + 24, max_clients=3, quota=4) as server:
        assert server.stats()["prefetch_slots"] == 3 * share
        clients = [Client(server, world, f"number {number}") for number in range(3)]
        waiting: list[list[int]] = [[], [], []]
        unseen = [list(range(100)) for _ in clients]
        for _ in range(60):
            number = int(dice.integers(3))
            client, mine = clients[number], waiting[number]
            if mine and dice.random() < 0.4:
                assert in_arena(client, number, mine[-share:]) == sorted(mine[-share:])
                mine.clear()
            else:
                expert = unseen[number].pop()
                before = server.stats()["cache"]["prefetched"]
                client.ask(number, [expert], op=Op.PREFETCH, tag=expert)
                prefetched(server, before + 1)
                mine.append(expert)
        for client in clients:
            client.close()


def test_demand_goes_before_prefetch_and_takes_it_over(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=2, experts=20)
    with (
        serving(world, slots=40, max_clients=1, quota=8, io_depth=1) as server,
        client_of(server, world) as client,
    ):
        server.inject("stall", argument=STALL_MS)
        client.ask(0, list(range(8)), op=Op.PREFETCH)
        wait_until(lambda: server.stats()["reading"] == 8)
        client.ask(1, [5], tag=2)
        client.ask(0, [7], tag=2)  # the last of the prefetches
        wait_until(lambda: server.stats()["cache"]["joined"] == 1)
        for read in range(1, 4):  # what was being read, then what is waited for
            wait_until(lambda: server.stats()["faults"] == read)  # noqa: B023
            server.resume_stalls()
        assert {(answer.layer, answer.expert) for answer in client.take(2)} == {(1, 5), (0, 7)}
        wait_until(lambda: server.stats()["cache"]["prefetched"] == 1)  # by the other drive, maybe a moment later
        assert server.stats()["cache"]["joined"] == 1


def test_cancelled_prefetches_say_so(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=20)
    with (
        serving(world, slots=40, max_clients=1, quota=8, io_depth=1) as server,
        client_of(server, world) as client,
    ):
        server.inject("stall", times=1, argument=STALL_MS)
        client.ask(0, list(range(20)), op=Op.PREFETCH, tag=7)
        wait_until(lambda: server.stats()["roots"][0]["in_flight"] == 1)
        client.ask(0, [0], op=Op.CANCEL, tag=7)
        cancelled = client.take(19)
        assert {(answer.op, answer.status) for answer in cancelled} == {(Op.PREFETCH, Status.CANCELLED)}
        server.clear_faults()
        wait_until(lambda: server.stats()["slots"]["cached"] == 1)
        assert server.stats()["roots"][0]["reads"] == 1


def test_a_client_that_does_not_read_its_answers_waits_alone(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=4)
    with serving(world, entries=8, quota=2, slots=8, max_clients=2) as server:  # noqa: SIM117
        with client_of(server, world) as lazy, client_of(server, world) as brisk:
            assert lazy.ring.submit(1, Op.LEASE, 9, [0] * 8) == 8
            wait_until(lambda: lazy.ring.submit(1, Op.LEASE, 9, [0]) == 1)  # taken, as far as there is room
            brisk.give_back(brisk.lease(0, [0, 1]))
            for _ in range(9):
                assert lazy.take(1)[0].status == Status.NO_SUCH_EXPERT
            lazy.give_back(lazy.lease(0, [0, 1]))
            assert server.violations() == []


def test_draining_ends_what_is_under_way_and_grants_nothing_new(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client:
        server.inject("stall", times=1, argument=STALL_MS)
        client.ask(0, [0])
        wait_until(lambda: server.stats()["reading"] == 1)
        assert not server.drain(0.001)
        server.clear_faults()
        assert server.drain(30)
        client.check(client.take(1)[0])
        client.ask(0, [0])
        assert client.take(1)[0].status == Status.CLOSING


def test_closing_wakes_clients(server: NativeServer, world: World) -> None:
    client = Client(server, world)
    (lease,) = client.lease(0, [0])
    view = client.ring.payload(lease.offset, lease.payload_bytes)
    woken: list[str] = []
    thread = threading.Thread(target=lambda: woken.append(client.ring.wait(60)))
    thread.start()
    server.close()
    thread.join(60)
    assert woken == ["closed"]
    assert client.ring.closed_by_daemon
    client.ring.close()
    assert view.tobytes() == world.payloads[0, 0]  # mapped as long as somebody looks at it
    with pytest.raises(ValueError, match="closed"):
        client.ring.poll()
    client.grant.close()


def test_waiting_has_an_end(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client:
        assert client.ring.wait(0) == "timeout"
        assert client.ring.wait(0.02) == "timeout"


def test_settings_that_contradict_each_other_are_refused_with_numbers() -> None:
    good = {"slot_bytes": 4096, "slots": 8, "max_clients": 2, "quota": 4}
    for change, said in (
        ({"quota": 5}, "2 clients with 5 leases each need more than the 8 slots"),
        ({"slot_bytes": 4095}, "whole pages"),
        ({"slots": 0}, "slots must be"),
        ({"max_clients": 65}, "max_clients must be"),
        ({"quota": 600, "slots": 4000}, "half the ring's entries"),
        ({"policy": "magic"}, "no policy is called magic"),
        ({"policy": "pin-lru", "pins": ((0, 0),)}, "1 pins, but only 0 slots"),
        ({"entries": 1000}, "power of two"),
    ):
        with pytest.raises(ValueError, match=said):
            NativeServer(ServerSettings(**{**good, **change}))  # type: ignore[arg-type]


def test_an_arena_that_cannot_be_had_is_refused_with_numbers() -> None:
    with pytest.raises(UnsupportedError, match=r"1048576 slots of 1073741824 bytes"):
        NativeServer(ServerSettings(slot_bytes=1 << 30, slots=1 << 20, max_clients=1, quota=1))


def test_layers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=2)
    with NativeServer(ServerSettings(slot_bytes=4 * 4096, slots=4, max_clients=1, quota=1)) as server:
        for root, path in world.paths:
            server.add_file(root, path, direct=False)
        records, counts = world.records[0], world.pieces[0]
        with pytest.raises(ValueError, match=r"needs a slot of at least 36864 bytes, they have 16384"):
            server.set_layer(0, world.payload_bytes, counts, records)
    with NativeServer(ServerSettings(slot_bytes=9 * 4096, slots=4, max_clients=1, quota=1)) as server:
        for root, path in world.paths:
            server.add_file(root, path, direct=False)
        with pytest.raises(ValueError, match="do not make up"):
            server.set_layer(0, world.payload_bytes + 1, counts, records)
        with pytest.raises(ValueError, match="do not add up"):
            server.set_layer(0, world.payload_bytes, [1, 2], records)
        with pytest.raises(ValueError, match="48 bytes"):
            server.set_layer(0, world.payload_bytes, counts, records[:-1])
        with pytest.raises(ValueError, match="no such file"):
            server.set_layer(0, world.payload_bytes, counts, b"\x09" + records[1:])
    assert slot_bytes_for(world.payload_bytes) >= 10 * 4096


def test_a_pin_under_way_ends_with_its_client_whoever_else_waits(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=4)
    with serving(world, slots=12, max_clients=2, quota=2) as server, client_of(server, world) as other:
        server.inject("stall", argument=STALL_MS)
        with client_of(server, world) as client:
            client.ask(0, [1], op=Op.PIN)
            wait_until(lambda: server.stats()["pinned"] == 1)
            other.ask(0, [1])
            wait_until(lambda: server.stats()["cache"]["joined"] == 1)
        assert server.stats()["pinned"] == 0
        server.clear_faults()
        other.take(1)


def test_an_unpin_calls_off_a_pin_that_is_under_way(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=4)
    with (
        serving(world, slots=12, max_clients=2, quota=2) as server,
        client_of(server, world) as other,
        client_of(server, world) as client,
    ):
        server.inject("stall", argument=STALL_MS)
        client.ask(0, [1], op=Op.PIN, tag=7)
        wait_until(lambda: server.stats()["pinned"] == 1)
        other.ask(0, [1])
        client.ask(0, [1], op=Op.UNPIN)
        (answer,) = client.take(1)
        assert (answer.tag, answer.op, answer.status) == (7, Op.PIN, Status.CANCELLED)
        assert server.stats()["pinned"] == 0
        server.clear_faults()
        other.check(other.take(1)[0])


def test_completions_in_runs_say_the_same_as_one_by_one(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=2, experts=6)
    with serving(world, slots=40, max_clients=2, quota=12) as server, client_of(server, world) as client:
        client.give_back(client.lease(0, [0, 1]))
        client.ask(0, [1, 99, 0], tag=5)
        client.ask(1, [2], tag=6)
        client.ask(0, [0], tag=7, op=Op.PIN)
        runs: list[Grants] = []
        others: list[Completion] = []
        while sum(map(len, runs)) < 3 or len(others) < 2:
            assert client.ring.wait(60) == "completions"
            granted, rest = client.ring.take()
            runs += granted
            others += rest
        found = {(run.tag, run.source, expert) for run in runs for expert, _, _ in run.slots()}
        assert found == {(5, Source.ARENA, 0), (5, Source.ARENA, 1), (6, Source.READ, 2)}
        assert {(c.tag, c.op, c.status, c.expert) for c in others} == {
            (5, Op.LEASE, Status.NO_SUCH_EXPERT, 99),
            (7, Op.PIN, Status.OK, 0),
        }
        views: dict[tuple[int, int], Payload] = {}
        back: list[tuple[str, str, int, int]] = []
        for run in runs:
            layer = 1 if run.tag == 6 else 0
            assert run.payload_bytes == len(run) * world.payload_bytes

            def lend(run: Grants, awaited: set[int]) -> list[Lease]:
                return run.lend(
                    awaited, views, client.ring.payload, lambda *given: back.append(given), "request", "session"
                )

            with pytest.raises(AssertionError, match=f"granted layer {layer}, expert .*, which nobody asked for"):
                lend(run, {5})
            awaited = {0, 1, 2, 5}
            leases = lend(run, awaited)
            assert awaited == {0, 1, 2, 5} - {lease.expert for lease in leases}
            for lease, (expert, slot, generation) in zip(leases, run.slots(), strict=True):
                assert (lease.layer, lease.expert) == (layer, expert)
                assert lease.payload.tobytes() == world.payloads[layer, expert]
                lease.release()
                assert back.pop() == ("request", "session", slot, generation)
                assert client.ring.release([slot], [generation]) == 1
        assert back == []
        wait_until(lambda: server.stats()["clients"][0]["leases"] == 0)
        assert server.stats()["stale_releases"] == 0


def test_a_payload_seen_before_is_the_same_view(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client:
        views: dict[tuple[int, int], Payload] = {}

        def view(offset: int, payload_bytes: int) -> Payload:
            return views.setdefault((offset, payload_bytes), client.ring.payload(offset, payload_bytes))

        seen = []
        for _ in range(2):
            client.ask(0, [3])
            assert client.ring.wait(60) == "completions"
            ((run,), ()) = client.ring.take()
            seen += run.lend({3}, views, view, lambda *_: None, 1, 2)
            ((_, slot, generation),) = run.slots()
            client.ring.release([slot], [generation])
        assert seen[0].payload is seen[1].payload
        assert len(views) == 1
