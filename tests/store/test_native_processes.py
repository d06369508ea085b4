"""Holds up: clients in processes of their own: right bytes, shared reads, nothing lost when they are killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from k3.store.protocol.native import ClientGrant, NativeServer
from tests.support.native_rig import World, client_of, make_world, serving
from tests.support.waiting import wait_until

CLIENT = textwrap.dedent("""
    import random, socket, sys
    import numpy, xxhash
    from k3.store.protocol.native import NativeRing
    from k3.store.protocol.ring_layout import Op

    # The descriptors come over a socket, as from the daemon: ring, arena, request and completion doorbell.
    link = socket.socket(fileno=int(sys.argv[1]))
    message, fds, _, _ = socket.recv_fds(link, 100, 4)
    arena_bytes, layers, experts, rounds, seed = map(int, message.split())
    digests = open(sys.argv[2], "rb").read()
    ring = NativeRing(fds[0], fds[1], arena_bytes, fds[2], fds[3])
    dice = random.Random(seed)
    for number in range(rounds):
        layer, wanted = dice.randrange(layers), dice.sample(range(experts), dice.randint(1, 4))
        assert ring.submit(number, Op.LEASE, layer, wanted) == len(wanted)
        left = set(wanted)
        while left:
            assert ring.wait(20, link.fileno()) == "completions"
            for answer in ring.poll():
                assert answer.status == 0, answer.status
                left.remove(answer.expert)
                view = ring.payload(answer.offset, answer.payload_bytes)
                at = 16 * (answer.layer * experts + answer.expert)
                assert xxhash.xxh3_128_digest(view) == digests[at : at + 16]
                ring.release([answer.slot], [answer.generation])
    print("done", flush=True)
""")


class Process:
    """A client process and the socket that gave it its descriptors."""

    def __init__(self, server: NativeServer, world: World, digests: Path, rounds: int, seed: int) -> None:
        self.server = server
        self.grant: ClientGrant = server.add_client(f"process {seed}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.child = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(theirs.fileno()), str(digests)],
            pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        theirs.close()
        layers, experts = len(world.pieces), len(world.pieces[0])
        message = f"{server.arena_bytes} {layers} {experts} {rounds} {seed}".encode()
        fds = [self.grant.ring_fd, server.arena_fd, self.grant.request_doorbell, self.grant.completion_doorbell]
        socket.send_fds(ours, [message], fds)
        self.grant.close()
        self.link = ours

    def finish(self) -> None:
        output, _ = self.child.communicate(timeout=60)
        assert output == "done\n"
        assert self.child.returncode == 0
        self.link.close()
        self.server.remove_client(self.grant.client)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, layers=3, experts=12, payload_bytes=50_000, roots=2)


@pytest.fixture
def digests(tmp_path: Path, world: World) -> Path:
    import xxhash

    path = tmp_path / "digests"
    path.write_bytes(b"".join(xxhash.xxh3_128_digest(world.payloads[key]) for key in sorted(world.payloads)))
    return path


@pytest.mark.parametrize("count", [1, 4])
def test_processes_read_right_bytes(world: World, digests: Path, count: int) -> None:
    with serving(world, slots=24, max_clients=4, quota=4) as server:
        children = [Process(server, world, digests, 300, seed) for seed in range(count)]
        for child in children:
            child.finish()
        stats = server.stats()
        assert (stats["slots"]["held"], stats["slots"]["filling"], stats["clients"]) == (0, 0, [])
        assert stats["stale_releases"] == 0


def test_four_clients_read_no_more_than_one(world: World, digests: Path) -> None:
    read_bytes = {}
    for count in (1, 4):
        with serving(world, slots=52, max_clients=4, quota=4) as server:
            for child in [Process(server, world, digests, 100, 5) for _ in range(count)]:
                child.finish()
            read_bytes[count] = sum(root["read_bytes"] for root in server.stats()["roots"])
    assert read_bytes[4] == read_bytes[1]


def has_leased(server: NativeServer, client: int, experts: int) -> bool:
    return any(entry["id"] == client and entry["granted"] >= experts for entry in server.stats()["clients"])


def test_clients_killed_at_any_moment_leave_nothing_behind(world: World, digests: Path) -> None:
    seed = 20
    dice = random.Random(seed)
    with serving(world, slots=24, max_clients=4, quota=4) as server, client_of(server, world) as survivor:
        children = [Process(server, world, digests, 10**9, number) for number in range(3)]
        for number in range(12):
            victim = children[number % 3]
            wait_until(partial(has_leased, server, victim.grant.client, dice.randint(1, 100)))
            victim.child.send_signal(signal.SIGKILL)
            assert victim.link.recv(1) == b""  # how the daemon learns of it
            server.remove_client(victim.grant.client)
            assert not any(c["id"] == victim.grant.client for c in server.stats()["clients"])
            victim.child.wait(60)
            victim.child.stdout.close()  # type: ignore[union-attr]
            victim.link.close()
            survivor.give_back(survivor.lease(number % 3, [number % 12, (number + 5) % 12]))
            if number < 9:
                children[number % 3] = Process(server, world, digests, 10**9, number + 3)
        wait_until(lambda: server.stats()["reading"] == 0)
        wait_until(lambda: server.stats()["slots"]["held"] == 0)
        assert server.violations() == [], f"seed {seed}"
        assert len(server.stats()["clients"]) == 1


def test_a_forked_child_does_not_hang_on_the_server_s_threads(world: World) -> None:
    with serving(world) as server:
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with client_of(server, world) as client:
            client.lease(0, [0])
