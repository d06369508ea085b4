"""Holds up: whatever a client writes into its ring, it hurts only itself; only the daemon writes the arena."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from k3.store.protocol import ring_layout as layout
from k3.store.protocol.native import (
    ClientGrant,
    NativeRing,
    NativeServer,
    ServerSettings,
    make_memfd,
    seal_all,
    seal_future_write,
)
from k3.store.protocol.ring_layout import Op, Status
from tests.support.native_rig import RECORD, Client, World, client_of, make_world, serving
from tests.support.waiting import wait_until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)


@pytest.fixture
def server(world: World) -> Iterator[NativeServer]:
    with serving(world, slots=32, quota=4) as running:
        yield running


class Raw:
    """A ring written by hand, as a hostile client would."""

    def __init__(self, server: NativeServer) -> None:
        self.server = server
        self.grant: ClientGrant = server.add_client("hostile")
        self.memory = mmap.mmap(self.grant.ring_fd, layout.ring_bytes(layout.DEFAULT_ENTRIES))
        self.tail = 0

    def word(self, at: int) -> int:
        return int.from_bytes(self.memory[at : at + 4], "little")

    def set_word(self, at: int, value: int) -> None:
        self.memory[at : at + 4] = (value % 2**32).to_bytes(4, "little")

    def put(self, entry: bytes) -> None:
        at = layout.REQUESTS_AT + self.tail % layout.DEFAULT_ENTRIES * layout.REQUEST.size
        self.memory[at : at + len(entry)] = entry
        self.tail += 1

    def ring(self) -> None:
        self.set_word(layout.REQUEST_TAIL_AT, self.tail)
        self.shout()

    def shout(self) -> None:
        os.write(self.grant.request_doorbell, (1).to_bytes(8, "little"))

    @property
    def closed(self) -> bool:
        return self.word(layout.STATE_AT) == layout.RingState.CLOSED

    def close(self) -> None:
        self.memory.close()
        self.grant.close()
        self.server.remove_client(self.grant.client)


@pytest.fixture
def raw(server: NativeServer) -> Iterator[Raw]:
    hostile = Raw(server)
    yield hostile
    hostile.close()


def test_a_sound_request_written_by_hand_is_granted(raw: Raw, world: World) -> None:
    raw.put(layout.REQUEST.pack(7, Op.LEASE, 0, 3, 0, 0))
    raw.ring()
    wait_until(lambda: raw.word(layout.COMPLETION_TAIL_AT) == 1)
    at = layout.completions_at(layout.DEFAULT_ENTRIES)
    fields = layout.COMPLETION.unpack(raw.memory[at : at + layout.COMPLETION.size])
    assert fields[:6] == (7, Op.LEASE, Status.OK, layout.Source.READ, 0, 3)
    assert fields[10] == world.payload_bytes


@pytest.mark.parametrize(
    "entry",
    [
        layout.REQUEST.pack(1, 0, 0, 0, 0, 0),
        layout.REQUEST.pack(1, 7, 0, 0, 0, 0),
        layout.REQUEST.pack(1, 255, 0, 0, 0, 0),
        layout.REQUEST.pack(1, Op.LEASE, 0, 0, 1, 0),
        layout.REQUEST.pack(1, Op.LEASE, 0, 0, 0, 1),
        layout.REQUEST.pack(1, Op.RELEASE, 0, 32, 0, 0),
        layout.REQUEST.pack(1, Op.RELEASE, 0, 2**32 - 1, 0, 0),
        b"\0" * 8 + b"\1\1\0\0" + b"\0" * 20,
    ],
)
def test_an_entry_that_makes_no_sense_ends_the_client(
    server: NativeServer, raw: Raw, world: World, entry: bytes
) -> None:
    with client_of(server, world) as other:
        held = other.lease(0, [0])
        raw.put(layout.REQUEST.pack(1, Op.LEASE, 1, 1, 0, 0))
        raw.put(entry)
        raw.ring()
        assert select.select([server.events_fd], [], [], 5)[0]
        assert server.violations() == [raw.grant.client]
        assert server.violations() == []
        assert not select.select([server.events_fd], [], [], 0)[0]
        assert raw.closed
        wait_until(lambda: server.stats()["slots"]["held"] == 1)  # its lease is gone, the other's is not
        other.check(held[0])
        last = raw.word(layout.COMPLETION_TAIL_AT) - 1
        at = layout.completions_at(layout.DEFAULT_ENTRIES) + last * layout.COMPLETION.size
        assert layout.COMPLETION.unpack(raw.memory[at : at + 64])[2] == Status.BAD_REQUEST


@pytest.mark.parametrize("tail", [1025, 2**31, 2**32 - 1])
def test_a_tail_out_of_bounds_ends_the_client(server: NativeServer, raw: Raw, tail: int) -> None:
    raw.set_word(layout.REQUEST_TAIL_AT, tail)
    raw.shout()
    wait_until(lambda: raw.closed)
    assert server.violations() == [raw.grant.client]
    assert raw.word(layout.REQUEST_HEAD_AT) == 0  # nothing was taken
    assert raw.word(layout.COMPLETION_TAIL_AT) == 0


@pytest.mark.parametrize("head", [1, 5, 2**31, 2**32 - 1025])
def test_a_completion_head_out_of_bounds_ends_the_client(server: NativeServer, raw: Raw, head: int) -> None:
    raw.set_word(layout.COMPLETION_HEAD_AT, head)
    raw.put(layout.REQUEST.pack(1, Op.LEASE, 9, 9, 0, 0))
    raw.ring()
    wait_until(lambda: raw.closed)
    assert server.violations() == [raw.grant.client]
    assert raw.word(layout.REQUEST_HEAD_AT) == 0


def test_words_of_the_daemon_mean_nothing_to_it(raw: Raw) -> None:
    """The daemon keeps its own copies of all that it writes."""
    for at in (layout.MAGIC_AT, layout.ENTRIES_AT, layout.REQUEST_HEAD_AT, layout.COMPLETION_TAIL_AT):
        raw.memory[at : at + 8] = b"\xff" * 8
    raw.put(layout.REQUEST.pack(1, Op.LEASE, 9, 9, 0, 0))
    raw.ring()
    wait_until(lambda: raw.word(layout.COMPLETION_TAIL_AT) == 1)
    assert raw.word(layout.REQUEST_HEAD_AT) == 1
    assert not raw.closed


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_in_rings_while_others_work(server: NativeServer, world: World, seed: int) -> None:
    """Hostile clients come and go, each writing noise of another kind; one honest client's leases stay right."""
    random = np.random.default_rng(seed)
    offenders: set[int] = set()
    stop = threading.Event()
    failures: list[BaseException] = []

    def honest() -> None:
        try:
            with client_of(server, world) as client:
                dice = np.random.default_rng(99)
                while not stop.is_set():
                    experts = dice.choice(8, 3, replace=False).tolist()
                    client.give_back(client.lease(int(dice.integers(3)), experts))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=honest)
    thread.start()
    size = layout.ring_bytes(layout.DEFAULT_ENTRIES)
    for _ in range(60):
        hostile = Raw(server)
        for _ in range(int(random.integers(1, 6))):
            kind = int(random.integers(4))
            if kind == 0:  # anything anywhere
                at = int(random.integers(size - 64))
                hostile.memory[at : at + 64] = random.bytes(64)
            elif kind == 1:  # any index
                hostile.set_word(64 * int(random.integers(1, 8)), int(random.integers(2**32)))
            elif kind == 2:  # plausible requests with numbers out of range
                for _ in range(int(random.integers(1, 50))):
                    op = int(random.integers(1, 7))
                    numbers = random.integers(0, 40, 2).tolist()
                    hostile.put(layout.REQUEST.pack(int(random.integers(9)), op, *numbers, 0, 0))
                hostile.ring()
            else:  # a whole ring of noise, announced
                hostile.memory[:] = random.bytes(size)
            hostile.shout()
        offenders.update(server.violations())
        hostile.close()
    stop.set()
    thread.join(60)
    assert failures == [], f"seed {seed}"
    assert offenders, f"seed {seed}: nobody was caught"
    wait_until(lambda: server.stats()["reading"] == 0)
    stats = server.stats()
    assert (stats["slots"]["held"], stats["slots"]["filling"], stats["pinned"]) == (0, 0, 0), f"seed {seed}"
    assert stats["clients"] == []


def test_a_client_that_makes_its_doorbells_block_stops_nobody(server: NativeServer, world: World) -> None:
    hostile = Raw(server)
    for fd in (hostile.grant.request_doorbell, hostile.grant.completion_doorbell):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    os.write(hostile.grant.request_doorbell, (2**64 - 2).to_bytes(8, "little"))
    hostile.set_word(layout.CLIENT_ASLEEP_AT, 1)
    with client_of(server, world) as other:
        for _ in range(100):  # the daemon rings after each, and nobody ever reads the doorbell
            for _ in range(100):
                hostile.put(layout.REQUEST.pack(1, Op.LEASE, 9, 9, 0, 0))
            hostile.set_word(layout.REQUEST_TAIL_AT, hostile.tail)
            other.give_back(other.lease(0, [0]))  # wakes the daemon, which sees the tail too
            wait_until(lambda: hostile.word(layout.REQUEST_HEAD_AT) == hostile.tail)
            hostile.set_word(layout.COMPLETION_HEAD_AT, hostile.tail)
    assert server.violations() == []
    hostile.close()


def test_a_flood_of_doorbells_starves_nobody(server: NativeServer, world: World) -> None:
    hostile = Raw(server)
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            hostile.shout()

    thread = threading.Thread(target=flood)
    thread.start()
    with client_of(server, world) as client:
        for _ in range(200):
            client.give_back(client.lease(0, [1, 2]))
    stop.set()
    thread.join(60)
    hostile.close()


def test_the_ring_cannot_be_resized(raw: Raw) -> None:
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(raw.grant.ring_fd, size)


def _writable_ways(fd: int) -> Iterator[str]:
    """Every way to write to a memfd that worked."""
    for name, flags in (("shared", mmap.MAP_SHARED), ("shared, write only", mmap.MAP_SHARED)):
        prot = mmap.PROT_WRITE if "only" in name else mmap.PROT_READ | mmap.PROT_WRITE
        try:
            mmap.mmap(fd, 4096, flags=flags, prot=prot).close()
            yield f"mmap {name}"
        except PermissionError:
            pass
    try:
        os.pwrite(fd, b"x", 0)
        yield "pwrite"
    except PermissionError:
        pass


def test_nobody_can_write_the_arena(server: NativeServer, world: World) -> None:
    fd = server.arena_fd
    with client_of(server, world) as client:
        (lease,) = client.lease(0, [0])
        assert list(_writable_ways(fd)) == []
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # opened for writing, and sealed all the same
        assert list(_writable_ways(again)) == []
        os.close(again)
        for length in (0, server.arena_bytes + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, length)
        libc = ctypes.CDLL(None, use_errno=True)
        punch = libc.fallocate(fd, 0x03, ctypes.c_int64(0), ctypes.c_int64(4096))
        assert (punch, ctypes.get_errno()) == (-1, errno.EPERM)
        with pytest.raises(PermissionError):  # no seal can be added to stop the daemon's own writes
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        # A read-only mapping cannot be made writable afterwards.
        view = mmap.mmap(fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        address = np.frombuffer(view, np.uint8).ctypes.data
        changed = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(4096), mmap.PROT_READ | mmap.PROT_WRITE)
        assert (changed, ctypes.get_errno()) == (-1, errno.EACCES)
        client.check(lease)


def test_memfds_are_sealed_as_promised() -> None:
    fd, _ = make_memfd("test", 8192)
    writable = mmap.mmap(fd, 8192)
    writable[:5] = b"hello"
    seal_future_write(fd)
    assert list(_writable_ways(fd)) == []
    writable[:5] = b"still"  # the mapping that was there goes on
    assert os.pread(fd, 5, 0) == b"still"
    writable.close()
    os.close(fd)
    fd, _ = make_memfd("test", 4096)
    os.pwrite(fd, b"model", 0)
    seal_all(fd)
    assert list(_writable_ways(fd)) == []
    os.close(fd)


def test_no_memfd_can_be_executed(server: NativeServer, raw: Raw) -> None:
    made, _ = make_memfd("test", 4096)
    for fd in (server.arena_fd, raw.grant.ring_fd, made):
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        assert seals & 0x20 or os.fstat(made).st_mode & 0o111, "F_SEAL_EXEC, where the kernel has it"
        if not seals & 0x20:
            pytest.skip("a kernel before Linux 6.3")
        assert os.fstat(fd).st_mode & 0o111 == 0
        with pytest.raises(PermissionError):
            os.fchmod(fd, 0o777)
    os.close(made)


def test_everything_starts_where_executable_memfds_are_refused(tmp_path: Path) -> None:
    """vm.memfd_noexec=2, which belongs to a process namespace."""
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        try:
            Path("/proc/sys/vm/memfd_noexec").write_text("2")
            os.memfd_create("refused", 0x10)  # MFD_EXEC
        except PermissionError as error:
            if error.filename:
                sys.exit(9)
        except OSError:
            sys.exit(9)
        else:
            sys.exit(9)
        from tests.support.native_rig import client_of, make_world, serving
        from k3.store.protocol.native import make_memfd
        world = make_world(Path(sys.argv[1]))
        make_memfd("test", 4096)
        with serving(world) as server, client_of(server, world) as client:
            client.lease(0, [0])
    """)
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, timeout=60, cwd=root, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    if result.returncode == 9 or "unshare" in result.stderr:
        pytest.skip("the setting cannot be had here")
    assert result.returncode == 0, result.stderr


def test_memory_that_is_taken_away_ends_its_client_and_not_the_daemon() -> None:
    """A ring without pages is touched as the daemon does it; unguarded, that is SIGBUS and the process's end."""
    script = textwrap.dedent("""
        import ctypes, os
        from k3.store import _store
        fd = os.memfd_create("ring", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 12288)
        assert not _store.touches_guarded(fd, 12288)
        os.ftruncate(fd, 4096)
        assert _store.touches_guarded(fd, 12288)
        assert os.fstat(fd).st_size == 4096
        print("guarded", flush=True)
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        ctypes.memset(libc.mmap(None, 12288, 3, 1, fd, ctypes.c_long(0)) + 8192, 1, 1)
    """)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout == "guarded\n", result.stderr
    assert result.returncode == -signal.SIGBUS, "elsewhere a bus error is what it was"


def test_a_time_that_is_none_is_refused(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client:
        for wait in (client.ring.wait, server.drain):
            with pytest.raises(ValueError, match="not NaN"):
                wait(math.nan)
        client.ask(0, [0])
        assert client.ring.wait(math.inf) == "completions"
        client.ring.poll()
        assert client.ring.wait(-math.inf) == "timeout"


@pytest.mark.parametrize(
    ("offset", "stored_bytes"), [(0, 2**50), (4096, 2**62), (2**62, 4096), (2**64 - 4096, 8192), (0, 2**64 - 1)]
)
def test_sizes_that_a_catalog_makes_up_are_refused_before_anything_is_planned(
    world: World, offset: int, stored_bytes: int
) -> None:
    settings = ServerSettings(slot_bytes=16 * 4096, slots=4, max_clients=1, quota=1)
    with NativeServer(settings) as server:
        root, path = world.paths[0]
        file = server.add_file(root, path, direct=False)
        before_bytes = resident_peak_bytes()
        record = RECORD.pack(file, 0, offset, 4096, stored_bytes, bytes(16))
        with pytest.raises(ValueError, match="do not lie in a file of"):
            server.set_layer(0, 4096, [1], record)
        assert resident_peak_bytes() - before_bytes < 64 << 20


def test_a_record_larger_than_a_slot_is_refused_also_where_its_file_is_as_large(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with open(path, "wb") as sparse:
        sparse.truncate(2**42)
    with NativeServer(ServerSettings(slot_bytes=16 * 4096, slots=4, max_clients=1, quota=1)) as server:
        file = server.add_file(0, path, direct=False)
        before_bytes = resident_peak_bytes()
        with pytest.raises(ValueError, match="needs a slot of at least 4398046511104 bytes, they have 65536"):
            server.set_layer(0, 4096, [1], RECORD.pack(file, 0, 0, 4096, 2**42, bytes(16)))
        assert resident_peak_bytes() - before_bytes < 64 << 20


def resident_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_what_is_no_ring_is_refused(server: NativeServer, world: World) -> None:
    with client_of(server, world) as client:
        grant = client.grant
        doorbells = (grant.request_doorbell, grant.completion_doorbell)
        for size, said in ((100, "too short"), (102400, "wrong magic")):
            fd, _ = make_memfd("no ring", size)
            with pytest.raises(ValueError, match=said):
                NativeRing(fd, server.arena_fd, server.arena_bytes, *doorbells)
            os.close(fd)
        fd, _ = make_memfd("short ring", 102400 - 4096)
        os.pwrite(fd, layout.MAGIC + (1024).to_bytes(4, "little"), 0)
        with pytest.raises(ValueError, match="1024 entries in 98304 bytes"):
            NativeRing(fd, server.arena_fd, server.arena_bytes, *doorbells)
        os.close(fd)
        with pytest.raises(ValueError, match="the arena has"):
            NativeRing(grant.ring_fd, server.arena_fd, server.arena_bytes + 4096, *doorbells)
        with pytest.raises(ValueError, match="op must be"):
            client.ring.submit(1, Op.RELEASE, 0, [0])


def test_records_are_what_the_catalog_has() -> None:
    assert RECORD.size == 48


def test_names_of_clients_are_only_names(server: NativeServer, world: World) -> None:
    client = Client(server, world, "x" * 64)
    assert server.stats()["clients"][0]["name"] == "x" * 64
    client.close()
