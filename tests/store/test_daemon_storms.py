"""Holds up: with bad drives, little room, few descriptors and noise on its socket, a daemon stays right and whole.

After each: right bytes or a typed error for everybody, and no slot, descriptor or thread that was not there
before. Short versions run always; `pytest -m campaign tests/store/test_daemon_storms.py -s` runs the long ones and
says how often what happened.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3.base.errors import DaemonError, DamageError, DriveError, K3Error
from k3.model.keys import ExpertKey
from k3.store.client.daemon_source import DaemonSource
from k3.store.client.socket_link import connect
from k3.store.protocol import wire
from k3.store.protocol.native import FaultKind
from k3.store.protocol.ring_layout import REQUEST, REQUEST_TAIL_AT, REQUESTS_AT
from k3.store.source import BudgetError
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, daemon_inside, daemon_outside
from tests.support.waiting import let_others_run, wait_until

LAYERS = (1, 2)
EXPERTS = 24

FAULTS: list[tuple[FaultKind, int]] = [("error", errno.EIO), ("short", 4096), ("flip", 0), ("stall", 2)]
"""The kinds of fault with their arguments: an error number, bytes read, nothing, milliseconds."""

long = pytest.mark.campaign
campaign = [
    pytest.param(False, id="short"),
    pytest.param(True, id="long", marks=[long, pytest.mark.timeout(1800)]),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("container")
    return build_container(place / "home", [place / "a", place / "b"], [0, 1, 1], experts=EXPERTS)


@contextlib.contextmanager
def whole_afterwards(inside: Inside) -> Iterator[None]:
    """Nothing is left of what happens inside."""
    before = _belongings()
    yield
    inside.server.clear_faults()
    wait_until(lambda: inside.status()["clients"] == [])
    wait_until(lambda: inside.server.stats()["reading"] == 0)
    stats = inside.server.stats()
    assert (stats["slots"]["held"], stats["slots"]["filling"], stats["pinned"]) == (0, 0, 0)
    assert stats["slots"]["free"] + stats["slots"]["cached"] == inside.server.settings.slots
    wait_until(lambda: _belongings() <= before)


def _belongings() -> tuple[int, int]:
    """Descriptors and threads of this process, in which the daemon lives too."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208


def crowd(count: int, work: Callable[[int, Counter[str]], None]) -> Counter[str]:
    """Run `work` in threads; what they counted. The first failure is raised."""
    counts = [Counter[str]() for _ in range(count)]
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number, counts[number])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(counts, Counter[str]())


def told(name: str, seed: int, counts: Counter[str]) -> None:
    print(f"\n{name}, seed {seed}: {json.dumps(counts)}")


def check(built: Built, layer: int, expert: int, payload: Any) -> None:
    assert payload.tobytes() == built.payloads[ExpertKey(layer, expert)]


@pytest.mark.parametrize("is_long", campaign)
@pytest.mark.parametrize(
    "faults", [[fault] for fault in FAULTS] + [FAULTS], ids=[*(kind for kind, _ in FAULTS), "all"]
)
def test_one_of_two_drives_is_bad(
    built: Built, tmp_path: Path, faults: list[tuple[FaultKind, int]], is_long: bool
) -> None:
    seed, rounds = 11, 500 if is_long else 25
    settings: dict[str, Any] = {"quota": 2, "max_clients": 8, "cache_bytes": 17 * 28672}
    with daemon_inside(tmp_path / "s", built.directories, **settings) as inside, whole_afterwards(inside):
        probe = DaemonSource(inside.socket)
        assert probe._session is not None
        files = probe._session._files
        probe.close()
        bad = [number for number, path in enumerate(files) if Path(path).is_relative_to(built.directories[2])]
        assert 0 < len(bad) < len(files)
        for file in bad:
            for name, value in faults:
                inside.server.inject(name, file=file, probability=0.3, argument=value, seed=seed)

        def work(number: int, counts: Counter[str]) -> None:
            dice = random.Random(f"{seed} {number}")
            for _ in range(rounds):
                source = DaemonSource(inside.socket) if dice.random() < 0.05 or not sources[number] else None
                if source is not None:
                    if sources[number]:
                        sources[number].pop().close()
                    sources[number].append(source)
                layer = dice.choice(LAYERS)
                try:
                    for lease in sources[number][0].lease(layer, dice.sample(range(EXPERTS), dice.randint(1, 4))):
                        with lease:
                            check(built, layer, lease.expert, lease.payload)
                            counts["right"] += 1
                except (DriveError, DamageError) as error:
                    named.add(str(error.path))
                    counts[type(error).__name__] += 1

        sources: list[list[DaemonSource]] = [[] for _ in range(4)]
        named = set[str]()
        counts = crowd(4, work)
        for source in sources:
            source.pop().close()
        stats = inside.server.stats()
        good_drive, bad_drive = stats["roots"]
        assert named <= {files[file] for file in bad}
        assert good_drive["errors"] == good_drive["re_reads"] == 0
        assert good_drive["read_bytes"] > 0
        counts.update(faults=stats["faults"], re_reads=bad_drive["re_reads"], bad_drive_errors=bad_drive["errors"])
        assert stats["faults"] > 0
        told(f"{' and '.join(kind for kind, _ in faults)} on one of two drives", seed, counts)


@pytest.mark.parametrize("is_long", campaign)
def test_eight_clients_and_too_little_room(built: Built, tmp_path: Path, is_long: bool) -> None:
    """Each holds, pins and asks for more than it may have: typed errors, and the others never wait for ever."""
    seed, rounds = 12, 400 if is_long else 12
    settings: dict[str, Any] = {"quota": 2, "max_clients": 8, "cache_bytes": 19 * 28672}
    with daemon_inside(tmp_path / "s", built.directories, **settings) as inside, whole_afterwards(inside):

        def work(number: int, counts: Counter[str]) -> None:
            dice = random.Random(f"{seed} {number}")
            source = DaemonSource(inside.socket, patience_s=0.02)
            for _ in range(rounds):
                layer = dice.choice(LAYERS)
                held = []
                try:
                    if dice.random() < 0.3:
                        source.pin(layer, [dice.randrange(EXPERTS)])
                        counts["pinned"] += 1
                    for lease in source.lease(layer, dice.sample(range(EXPERTS), dice.randint(1, 4))):
                        check(built, layer, lease.expert, lease.payload)
                        counts["right"] += 1
                        held.append(lease)
                        if dice.random() < 0.5:
                            held.pop(0).release()
                except BudgetError:
                    counts["BudgetError"] += 1
                for lease in held:
                    check(built, layer, lease.expert, lease.payload)
                    lease.release()
                if dice.random() < 0.5:
                    source.unpin(layer, range(EXPERTS))
            source.close()

        counts = crowd(8, work)
        assert counts["BudgetError"] > 0
        assert counts["right"] > 0
        told("eight clients, too little room", seed, counts)


@pytest.mark.parametrize("is_long", campaign)
def test_clients_come_and_go_under_small_limits(built: Built, tmp_path: Path, is_long: bool) -> None:
    """64 descriptors and 64 KiB of locked memory."""
    rounds = 200 if is_long else 10

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    options = ("--max-clients", "3", "--quota", "2")
    counts = Counter[str]()
    with daemon_outside(tmp_path / "s", built.directories, *options, preexec_fn=limit) as daemon:

        def belongings() -> tuple[int, int]:
            place = Path(f"/proc/{daemon.process.pid}")
            return len(list((place / "fd").iterdir())), len(list((place / "task").iterdir()))

        DaemonSource(daemon.socket).close()
        wait_until(lambda: daemon.status()["clients"] == [])
        before = belongings()
        for number in range(rounds):
            sources = []
            for _ in range(4):
                try:
                    sources.append(DaemonSource(daemon.socket))
                    counts["welcomed"] += 1
                except DaemonError as error:
                    counts["refused" if "as many as may be" in error.problem else str(error)] += 1
            for source in sources:
                layer = LAYERS[number % 2]
                for lease in source.lease(layer, range(5)):
                    with lease:
                        check(built, layer, lease.expert, lease.payload)
                        counts["right"] += 1
                source.close()
            wait_until(lambda: daemon.status()["clients"] == [])
        assert counts["refused"] == rounds
        wait_until(lambda: belongings() <= before)
        assert daemon.status()["cache"]["states"]["held"] == 0
    told("64 descriptors, 64 KiB locked", 0, counts)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_long", campaign)
def test_noise_on_the_socket_and_in_rings(built: Built, tmp_path: Path, is_long: bool) -> None:
    """Strangers send and scribble anything at all; a good client beside them always has the right bytes."""
    seed, seconds = 13, 300.0 if is_long else 2.0
    settings: dict[str, Any] = {"quota": 2, "max_clients": 6, "cache_bytes": 13 * 28672}
    with daemon_inside(tmp_path / "s", built.directories, **settings) as inside, whole_afterwards(inside):
        until_s = time.monotonic() + seconds

        def work(number: int, counts: Counter[str]) -> None:
            dice = random.Random(f"{seed} {number}")
            if number == 0:
                source = DaemonSource(inside.socket)
                while time.monotonic() < until_s:
                    layer = dice.choice(LAYERS)
                    for lease in source.lease(layer, dice.sample(range(EXPERTS), 3)):
                        with lease:
                            check(built, layer, lease.expert, lease.payload)
                            counts["right"] += 1
                assert source.reconnects == 0
                source.close()
            while time.monotonic() < until_s:
                if dice.random() < 0.5:
                    babble(inside.socket, dice, counts)
                else:
                    scribble(inside.socket, dice, counts)

        counts = crowd(4, work)
        for what in ("right", "messages", "rings", "entries"):
            assert counts[what] > 0
        told("noise on the socket and in rings", seed, counts)


def babble(path: Path, dice: random.Random, counts: Counter[str]) -> None:
    """Send packets on a connection of their own: bytes, JSON of any shape, almost right messages."""
    with connect(path) as connection:
        for _ in range(dice.randint(1, 4)):
            choice = dice.randrange(4)
            if choice == 0:
                packet = dice.randbytes(dice.choice((1, 10, 300, 65536)))
            elif choice == 1:
                packet = json.dumps(_anything(dice, 3)).encode()
            else:
                fields: dict[str, Any] = {"type": "hello", "version": 1, "name": "noise"}
                fields[dice.choice(("type", "version", "name", "more"))] = _anything(dice, 1)
                packet = json.dumps(fields).encode()
                if choice == 3:
                    packet = packet[: dice.randrange(1, len(packet))]
            try:
                connection.send(packet)
                counts["messages"] += 1
                connection.settimeout(0.01)
                connection.recv(65536)
            except OSError:
                return


def _anything(dice: random.Random, depth: int) -> Any:
    plain = [None, True, -1, 0, 1, 2**63, 1e300, "", "hello", "status", "\x00", "x" * 65, "ü" * 40]
    if depth == 0 or dice.random() < 0.6:
        return dice.choice(plain)
    if dice.random() < 0.5:
        return [_anything(dice, depth - 1) for _ in range(dice.randrange(4))]
    return {str(dice.choice(plain)): _anything(dice, depth - 1) for _ in range(dice.randrange(4))}


def scribble(path: Path, dice: random.Random, counts: Counter[str]) -> None:
    """Connect a client, and write random bytes into its ring."""
    with connect(path) as connection:
        try:
            wire.send(connection, wire.Hello(wire.VERSION, "scribbler"))
            welcome, descriptors = wire.receive_with_descriptors(connection)
        except (OSError, K3Error):
            return
        if not isinstance(welcome, wire.Welcome):
            wire.close_all(descriptors)
            counts["refused"] += 1
            return
        try:
            with mmap.mmap(descriptors[1], welcome.ring_bytes) as ring:
                counts["rings"] += 1
                tail = 0
                for _ in range(dice.randint(1, 30)):
                    choice = dice.random()
                    if choice < 0.8:  # an entry that is right in most of its fields
                        entry = [
                            dice.getrandbits(64),
                            dice.randint(1, 6),
                            dice.choice(LAYERS),
                            dice.randrange(EXPERTS),
                        ]
                        entry += [0, 0]
                        if dice.random() < 0.2:
                            entry[dice.randrange(1, 6)] = dice.choice((0, 7, 255))
                        REQUEST.pack_into(ring, REQUESTS_AT + tail % 1024 * REQUEST.size, *entry)
                        tail += 1
                        counts["entries"] += 1
                    elif choice < 0.95:
                        at = dice.randrange(welcome.ring_bytes - 64)
                        ring[at : at + 64] = dice.randbytes(64)
                    else:
                        tail = dice.getrandbits(32)
                    ring[REQUEST_TAIL_AT : REQUEST_TAIL_AT + 4] = (tail % 2**32).to_bytes(4, "little")
                    os.eventfd_write(descriptors[4], 1)
                    if dice.random() < 0.1:
                        let_others_run()
        finally:
            wire.close_all(descriptors)
