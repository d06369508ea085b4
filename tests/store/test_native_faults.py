"""Holds up: what a bad drive does ends in right bytes or in an error with file, offset and errno."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from k3.store.protocol.native import FaultKind, NativeServer, Verify
from k3.store.protocol.ring_layout import Op, Source, Status
from tests.support.faults import STALL_MS
from tests.support.native_rig import Client, World, client_of, make_world, serving
from tests.support.waiting import wait_until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path, roots=2)


def test_an_error_that_happens_once_is_read_again(world: World) -> None:
    with serving(world) as server, client_of(server, world) as client:
        server.inject("error", file=1, times=1, argument=errno.EIO)
        client.lease(0, [0])
        roots = server.stats()["roots"]
        assert [(root["errors"], root["re_reads"]) for root in roots] == [(0, 0), (1, 1)]


def test_a_flip_that_happens_once_is_read_again(world: World) -> None:
    with serving(world) as server, client_of(server, world) as client:
        server.inject("flip", file=0, times=1, seed=3)
        client.lease(0, [0])
        roots = server.stats()["roots"]
        assert [(root["errors"], root["re_reads"]) for root in roots] == [(1, 1), (0, 0)]


def test_an_error_that_stays_is_told_with_its_place(world: World) -> None:
    file, offset, stored_bytes = world.places[1, 4][1]
    with serving(world) as server, client_of(server, world) as client, client_of(server, world) as other:
        server.inject("error", file=file, begin=offset, end=offset + stored_bytes, argument=errno.EIO)
        server.inject("stall", times=1, argument=50)
        client.ask(1, [4])
        other.ask(1, [4])
        for asked in (client, other):
            (answer,) = asked.take(1)
            assert answer.status == Status.IO_ERROR
            assert (answer.file, answer.file_offset, answer.error) == (file, offset, errno.EIO)
            assert (answer.layer, answer.expert) == (1, 4)
        stats = server.stats()
        assert (stats["slots"]["free"], stats["failed"]) == (16, 1)
        client.lease(1, [5])  # its neighbours are fine
        server.clear_faults()
        assert client.lease(1, [4])[0].source == Source.READ


def test_damage_is_told_with_its_place(world: World) -> None:
    file, offset, _ = world.places[2, 7][0]
    with open(world.paths[file][1], "r+b") as damaged:
        damaged.seek(offset + 5)
        byte = damaged.read(1)
        damaged.seek(offset + 5)
        damaged.write(bytes([byte[0] ^ 1]))
    with serving(world) as server, client_of(server, world) as client:
        client.ask(2, [7])
        (answer,) = client.take(1)
        assert (answer.status, answer.file, answer.file_offset) == (Status.DAMAGED, file, offset)
        assert server.stats()["slots"]["free"] == 16
    with serving(world, verify="never") as server, client_of(server, world) as client:
        client.ask(2, [7])
        assert client.take(1)[0].status == Status.OK  # as asked for: nothing was compared


def test_verify_first_checks_an_expert_once(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=3, payload_bytes=4096)
    with serving(world, verify="first", slots=1, max_clients=1, quota=1) as server:
        with client_of(server, world) as client:
            for expert in (0, 1, 0, 1, 2):
                client.give_back(client.lease(0, [expert]))
        assert server.stats()["checked_bytes"] == 3 * 4096


VERIFY: list[Verify] = ["always", "first", "never"]


@pytest.mark.parametrize("how", ["renamed over", "written over"])
@pytest.mark.parametrize("verify", VERIFY)
def test_other_bytes_in_a_file_that_was_checked_are_not_served(tmp_path: Path, verify: Verify, how: str) -> None:
    """Of the same size; also where nothing, or nothing more than once, is checked: those are other bytes."""
    world = make_world(tmp_path, layers=2, experts=4, payload_bytes=3 * 4096)
    path = world.paths[0][1]
    with (
        serving(world, verify=verify, slots=1, max_clients=1, quota=1, open_files=1) as server,
        client_of(server, world) as client,
    ):
        for expert in range(4):
            client.give_back(client.lease(0, [expert]))
        content = bytearray(path.read_bytes())
        for expert in (0, 1):
            content[world.places[0, expert][0][1] + 5000] ^= 1
        if how == "renamed over":
            other = path.with_name("other")
            other.write_bytes(content)
            other.rename(path)
            client.give_back(client.lease(1, [0]))  # so that the first file is closed
        else:
            path.write_bytes(content)
        client.give_back(client.lease(1, [1]))
        for expert in (0, 1, 0):
            client.ask(0, [expert])
            assert client.take(1)[0].status == Status.DAMAGED, expert
        for expert in (2, 3, 2, 3):  # these are as they were, and are said to be so
            client.give_back(client.lease(0, [expert]))


def test_a_replaced_file_is_checked_once_more_and_not_for_ever(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=3, payload_bytes=4096)
    path = world.paths[0][1]
    with (
        serving(world, verify="first", slots=1, max_clients=1, quota=1) as server,
        client_of(server, world) as client,
    ):
        for expert in (0, 1, 2, 0, 1, 2):
            client.give_back(client.lease(0, [expert]))
        path.write_bytes(path.read_bytes())
        for expert in (0, 1, 2) * 3:
            client.give_back(client.lease(0, [expert]))
        stats = server.stats()
        # The expert whose read found the change was compared then, and once more as of the new file.
        assert stats["checked_bytes"] == (2 * 3 + 1) * 4096
        assert (stats["roots"][0]["errors"], stats["roots"][0]["re_reads"]) == (0, 0)


def test_a_pipe_in_place_of_a_file_is_an_error_and_no_hang(world: World) -> None:
    path = world.paths[0][1]
    with serving(world, open_files=1) as server, client_of(server, world) as client:
        client.give_back(client.lease(1, [0]))
        path.unlink()
        os.mkfifo(path)
        client.ask(0, [0])
        (answer,) = client.take(1)
        assert (answer.status, answer.error) == (Status.IO_ERROR, errno.EINVAL)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("short_bytes", [1, 100, 4096, 5000])
def test_short_reads_are_gone_on_with(tmp_path: Path, direct: bool, short_bytes: int) -> None:
    world = make_world(tmp_path, layers=1, experts=2, payload_bytes=15_000, unaligned=2)
    with serving(world, direct=direct) as server, client_of(server, world) as client:
        server.inject("short", argument=short_bytes, probability=0.7 if short_bytes == 1 else 1, seed=1)
        client.lease(0, [0, 1])
        assert server.stats()["faults"] > 2


CHUNK = 4 << 20


@pytest.mark.parametrize("unaligned", [0, 2])
@pytest.mark.parametrize("late", range(4))
def test_a_chunk_that_comes_late_is_hashed_in_its_place(tmp_path: Path, unaligned: int, late: int) -> None:
    """Digests are taken as chunks arrive: whichever is overtaken, the digest of the whole comes out."""
    world = make_world(tmp_path, layers=1, experts=2, payload_bytes=3 * CHUNK + 9000, unaligned=unaligned)
    _, offset, _ = world.places[0, 0][0]
    with serving(world, io_depth=6) as server, client_of(server, world) as client:
        begin = offset + late * CHUNK
        server.inject("stall", begin=begin, end=begin + 1, times=1, argument=40)
        client.lease(0, [0, 1])
        stats = server.stats()
        assert stats["roots"][0]["errors"] == 0
        assert stats["checked_bytes"] == sum(place[2] for e in (0, 1) for place in world.places[0, e])


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", ["error", "flip"])
@pytest.mark.parametrize("bad", range(4))
def test_a_chunk_that_fails_while_others_are_hashed(tmp_path: Path, kind: FaultKind, bad: int, times: int) -> None:
    """The second try begins the digest anew, also when the first was half way through it."""
    world = make_world(tmp_path, layers=1, experts=1, payload_bytes=3 * CHUNK + 9000)
    file, offset, stored_bytes = world.places[0, 0][0]
    begin, end = offset + bad * CHUNK, min(offset + (bad + 1) * CHUNK, offset + stored_bytes)
    with serving(world, io_depth=4) as server, client_of(server, world) as client:
        server.inject("stall", begin=begin, end=end, times=1, argument=15)
        server.inject(kind, begin=begin, end=end, times=times, argument=errno.EIO, seed=bad)
        client.ask(0, [0])
        (answer,) = client.take(1)
        if times == 1:
            client.check(answer)
        else:
            failed = Status.IO_ERROR if kind == "error" else Status.DAMAGED
            place = begin if kind == "error" else offset
            assert (answer.status, answer.file, answer.file_offset) == (failed, file, place)
        assert server.stats()["roots"][0]["errors"] == times


def test_a_file_that_ends_early(world: World) -> None:
    file, offset, _ = world.places[0, 7][0]
    with serving(world) as server, client_of(server, world) as client:
        os.truncate(world.paths[file][1], offset + 100)
        client.ask(0, [7])
        (answer,) = client.take(1)
        assert (answer.status, answer.file, answer.error) == (Status.IO_ERROR, file, errno.ENODATA)


def test_a_file_that_was_replaced_by_a_sound_one_is_opened_again(world: World) -> None:
    path = world.paths[0][1]
    good = path.read_bytes()
    path.write_bytes(bytes(len(good)))
    with serving(world, open_files=1) as server, client_of(server, world) as client:
        client.ask(0, [0])
        assert client.take(1)[0].status == Status.DAMAGED
        path.rename(path.with_name("bad"))
        client.ask(0, [0])
        (answer,) = client.take(1)
        assert (answer.status, answer.error) == (Status.IO_ERROR, errno.ENOENT)
        path.write_bytes(good)
        client.lease(0, [0])


def test_more_files_than_descriptors(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=40, experts=2, payload_bytes=500)
    with serving(world, open_files=4, io_depth=2) as server, client_of(server, world) as client:
        for layer in range(40):
            client.give_back(client.lease(layer, [0, 1]))
            assert server.stats()["open_files"] <= 4


def test_a_stalled_drive_holds_up_only_what_lies_on_it(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=2, experts=4, roots=1)
    for number, (_, path) in enumerate(world.paths):  # one layer per drive
        world.paths[number] = (number, path)
    with serving(world) as server, client_of(server, world) as client:
        server.inject("stall", file=0, argument=STALL_MS)
        client.ask(0, [0], tag=1)
        client.ask(1, [0], tag=2)
        assert [answer.tag for answer in client.take(1)] == [2]
        assert server.stats()["reading"] == 1
        server.clear_faults()
        assert [answer.tag for answer in client.take(1)] == [1]


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_under_load(tmp_path: Path, seed: int) -> None:
    """Every answer is the right bytes or an error; afterwards nothing is held, filling or lost."""
    world = make_world(tmp_path, layers=3, experts=10, roots=2, payload_bytes=40_000)
    with serving(world, slots=12, max_clients=3, quota=3, io_depth=3) as server:
        server.inject("error", probability=0.1, argument=errno.EIO, seed=seed)
        server.inject("flip", probability=0.1)
        server.inject("short", probability=0.2, argument=5000)
        server.inject("stall", probability=0.05, argument=1)
        counts = {Status.OK: 0, Status.DAMAGED: 0, Status.IO_ERROR: 0}
        failures: list[BaseException] = []
        lock = threading.Lock()

        def work(number: int) -> None:
            try:
                random = np.random.default_rng([seed, number])
                with client_of(server, world) as client:
                    for _ in range(120):
                        experts = random.choice(10, int(random.integers(1, 4)), replace=False).tolist()
                        client.ask(int(random.integers(3)), experts)
                        for answer in client.take(len(experts)):
                            with lock:
                                counts[Status(answer.status)] += 1
                            if answer.status == Status.OK:
                                client.check(answer)
                                client.give_back([answer])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == [], f"seed {seed}"
        assert all(counts.values()), f"seed {seed}: {counts}"
        wait_until(lambda: server.stats()["reading"] == 0)
        stats = server.stats()
        assert (stats["slots"]["held"], stats["slots"]["filling"]) == (0, 0), f"seed {seed}"
        assert stats["slots"]["free"] + stats["slots"]["cached"] == 12


def test_a_limit_of_64_descriptors_and_64_kb_of_locked_memory(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from tests.support.native_rig import Client, make_world, serving
        from k3.base.errors import UnsupportedError

        world = make_world(Path(sys.argv[1]), layers=60, experts=2, payload_bytes=700)
        with serving(world, slots=140, max_clients=64) as server:
            clients = []
            try:
                while True:
                    clients.append(Client(server, world))
            except (UnsupportedError, OSError) as error:
                assert "Too many open files" in str(error), error
            assert 4 <= len(clients) < 64
            clients.pop().close()
            for layer in range(60):
                for client in clients[:2]:
                    client.give_back(client.lease(layer, [0, 1]))
    """)
    root = str(Path(__file__).parents[2])

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60,
        cwd=root, env={**os.environ, "PYTHONPATH": root}, preexec_fn=limit,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_a_throttled_drive_has_its_rate(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=10, payload_bytes=1 << 20)
    with (
        serving(world, quota=10, slots=10, max_clients=1, io_depth=4) as server,
        client_of(server, world) as client,
    ):
        server.throttle(0, 50_000_000)
        began = time.monotonic()
        client.ask(0, list(range(10)))
        client.take(10)
        took_s = time.monotonic() - began
        assert took_s >= 0.2  # 10 MiB at 50 MB/s


def test_no_descriptor_and_no_thread_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world(tmp_path, roots=3)

    def count() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/proc/self/task").iterdir()))

    def use() -> None:
        server: NativeServer
        with serving(world) as server:
            clients = [Client(server, world) for _ in range(3)]
            for client in clients:
                client.lease(0, [0, 1])
            clients[0].close()
            clients[1].ask(1, [0, 1, 2])
        for client in clients[1:]:
            client.close()

    use()
    before = count()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            use()
    assert count() == before
    assert caplog.records == []


def test_closing_in_the_middle_of_reads(tmp_path: Path) -> None:
    world = make_world(tmp_path, layers=1, experts=16, payload_bytes=300_000)
    with serving(world, slots=32, quota=16, max_clients=1) as server:
        client = Client(server, world)
        server.inject("stall", argument=5)
        client.ask(0, list(range(16)))
        client.take(2)
        client.ask(0, list(range(16)), op=Op.PREFETCH)
    client.close()
