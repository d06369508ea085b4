"""Holds up: nobody can hurt the daemon or its clients through the socket, and who goes leaves nothing behind."""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base import checksum
from k3.base.errors import ConfigError, ContainerError, DaemonError, DamageError, UnsupportedError
from k3.container.catalog import CatalogReader
from k3.store.client.daemon_source import DaemonSource
from k3.store.client.socket_link import Link, ask_status, connect
from k3.store.daemon import control_loop as daemon_module
from k3.store.daemon.model_service import ServeSettings, Service
from k3.store.protocol import wire
from k3.store.protocol.peer import SPARE_CONNECTIONS
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, answers, daemon_inside, daemon_outside, serve_command, start
from tests.support.faults import STALL_MS
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("container")
    return build_container(place / "home", [place / "a"], [1, 2])


@pytest.fixture(scope="module")
def daemon(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with daemon_inside(tmp_path_factory.mktemp("s") / "s", built.directories, quota=10, max_clients=4) as inside:
        yield inside


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def hello(path: Path) -> tuple[socket.socket, wire.Welcome, list[int]]:
    """Return a welcomed connection with its bare descriptors."""
    connection = connect(path)
    wire.send(connection, wire.Hello(1, "bare"))
    welcome, descriptors = wire.receive_with_descriptors(connection)
    assert isinstance(welcome, wire.Welcome)
    return connection, welcome, descriptors


def idle(daemon: Inside) -> bool:
    """Nobody attached, nothing held."""
    stats = daemon.server.stats()
    return bool(stats["clients"] == [] and stats["slots"]["held"] == stats["slots"]["filling"] == 0)


# What a client is given


@pytest.mark.parametrize("name", ["arena", "dense", "model"])
def test_shared_memory_cannot_be_written_by_a_client(daemon: Inside, name: str) -> None:
    connection, welcome, descriptors = hello(daemon.socket)
    descriptor = descriptors[wire.DESCRIPTORS.index(name)]
    size = os.fstat(descriptor).st_size
    assert size >= getattr(welcome, f"{name}_bytes") > 0
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    for fd in (descriptor, again):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ).close()
    wire.close_all([*descriptors, again])
    connection.close()


def test_the_ring_cannot_be_resized(daemon: Inside) -> None:
    connection, _, descriptors = hello(daemon.socket)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptors[1], 0)
    wire.close_all(descriptors)
    connection.close()


def test_the_socket_is_the_owners_alone(daemon: Inside) -> None:
    assert daemon.socket.stat().st_mode & 0o777 == 0o600


# Control messages


@pytest.mark.parametrize(
    "data",
    [
        b"x", b"{}", b'{"type":"hello","version":9,"name":"a"}', b'{"type":"goodbye","reason":"you first"}',
        b"\0" * 60_000, b"x" * 100_000, b'{"type":"status","status":{}}',
    ],
)  # fmt: skip
def test_what_is_not_understood_is_answered_and_ended(daemon: Inside, data: bytes) -> None:
    with connect(daemon.socket) as connection:
        connection.send(data)
        answer = wire.receive(connection)
        assert isinstance(answer, wire.Refusal)
        assert answer.error == "WireError"
        assert wire.receive(connection) is None


def test_a_second_hello_ends_the_connection(daemon: Inside) -> None:
    connection, _, descriptors = hello(daemon.socket)
    wire.close_all(descriptors)
    wire.send(connection, wire.Hello(1, "again"))
    assert isinstance(wire.receive(connection), wire.Refusal)
    connection.close()
    wait_until(lambda: idle(daemon))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.binary(max_size=200)
        | st.sampled_from([b'{"type":"hello","version":1,"name":"f"}', b'{"type":"status"}', b"", b"{"]),
        max_size=5,
    )
)
def test_fuzzed_control_messages_hurt_nobody_else(daemon: Inside, packets: list[bytes]) -> None:
    with connect(daemon.socket) as connection:
        for packet in packets:
            try:
                connection.send(packet)
            except OSError:
                break
    assert daemon.status()["version"] == 1


def test_status_can_be_asked_any_number_of_times_on_one_connection(daemon: Inside) -> None:
    with connect(daemon.socket) as connection:
        for _ in range(20):
            wire.send(connection, wire.StatusRequest())
            answer = wire.receive(connection)
            assert isinstance(answer, wire.Status)
            assert answer.status["clients"] == []


def test_a_peer_that_does_not_read_is_dropped_and_not_waited_for(
    daemon: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "HELLO_S", 1000.0)
    deaf = connect(daemon.socket)
    deaf.setblocking(False)
    with pytest.raises((BlockingIOError, BrokenPipeError, ConnectionResetError)):  # noqa: PT012
        for _ in range(100_000):
            wire.send(deaf, wire.StatusRequest())
    assert daemon.status()["version"] == 1
    hung_up = select.poll()
    hung_up.register(deaf, select.POLLHUP)
    assert hung_up.poll(30_000), "the peer is still waited for"
    deaf.close()


def test_silence_instead_of_a_hello_is_ended(daemon: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_module, "HELLO_S", 0.05)
    with connect(daemon.socket) as connection:
        connection.settimeout(60)
        answer = wire.receive(connection)
        assert isinstance(answer, wire.Refusal)
        assert "no hello" in answer.problem


def test_too_many_clients_are_told_so(daemon: Inside) -> None:
    links = [Link.open(daemon.socket, f"c{n}") for n in range(4)]
    with pytest.raises(DaemonError, match="4 clients are attached"):
        Link.open(daemon.socket, "one more")
    assert [client["name"] for client in daemon.status()["clients"]] == ["c0", "c1", "c2", "c3"]
    for link in links:
        link.close()
    wait_until(lambda: idle(daemon))
    Link.open(daemon.socket, "now").close()


def test_a_flood_of_connections_is_bounded(daemon: Inside) -> None:
    before = open_descriptors()
    flood = [connect(daemon.socket) for _ in range(40)]
    wait_until(lambda: len(daemon.daemon._connections) <= 4 + SPARE_CONNECTIONS)
    for connection in flood:
        connection.close()
    wait_until(lambda: open_descriptors() <= before)
    assert daemon.status()["clients"] == []


# Leaving


def test_gone_before_the_first_frame(daemon: Inside) -> None:
    daemon.status()
    wait_until(lambda: idle(daemon))
    before = open_descriptors()
    for number in range(200):
        connection = connect(daemon.socket)
        if number % 2:
            wire.send(connection, wire.Hello(1, "hasty"))
        connection.close()
    wait_until(lambda: idle(daemon) and open_descriptors() <= before)


def test_an_invalid_ring_ends_only_its_own_client(daemon: Inside, built: Built) -> None:
    connection, welcome, descriptors = hello(daemon.socket)
    ring = mmap.mmap(descriptors[1], welcome.ring_bytes)
    good = DaemonSource(daemon.socket)
    ring[64:68] = (5000).to_bytes(4, "little")  # more requests than there is room for
    os.eventfd_write(descriptors[4], 1)
    connection.settimeout(60)
    answer = wire.receive(connection)
    assert answer == wire.Goodbye("its ring was invalid")
    assert wire.receive(connection) is None
    for lease in good.lease(1, range(5)):
        with lease:
            assert lease.payload.tobytes() == next(
                data for key, data in built.payloads.items() if (key.layer, key.expert) == (1, lease.expert)
            )
    good.close()
    wire.close_all(descriptors)
    connection.close()
    wait_until(lambda: idle(daemon))


HOLDER = """
    import signal, sys
    from pathlib import Path
    from k3.store.client.daemon_source import DaemonSource
    source = DaemonSource(Path(sys.argv[1]), name="holder")
    held = list(source.lease(1, range(5))) + [next(source.lease(2, [0, 1, 2]))]
    print("holding", flush=True)
    signal.pause()
"""


def test_a_killed_client_frees_its_leases(daemon: Inside) -> None:
    wait_until(lambda: idle(daemon))
    for _ in range(3):
        holder = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HOLDER), str(daemon.socket)], stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        wait_until(lambda: daemon.status()["clients"][0]["waiting"] == 0)
        (client,) = daemon.status()["clients"]
        assert (client["name"], client["pid"], client["leases"]) == ("holder", holder.pid, 8)
        assert daemon.server.stats()["slots"]["held"] == 8
        holder.kill()
        holder.wait()
        wait_until(lambda: idle(daemon))
        holder.stdout.close()


# Starting and ending


def test_a_second_daemon_is_refused_before_it_reads_anything(daemon: Inside, built: Built) -> None:
    ended = subprocess.run(
        serve_command(daemon.socket, built.directories), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 10
    assert "another k3-store" in ended.stderr
    assert str(os.getpid()) in ended.stderr
    assert daemon.status()["pid"] == os.getpid()


def test_a_stale_socket_is_taken_over_and_everything_is_gone_at_the_end(built: Built, tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = start(path, built.directories)
    first.kill()
    assert path.exists()
    with daemon_outside(path, built.directories) as second:
        source = DaemonSource(path)
        second.terminate()
        assert second.process.returncode == 0
        assert not path.exists()
        with pytest.raises(DaemonError):
            DaemonSource(path)
        source.close()


def test_what_is_not_a_socket_is_left_alone(built: Built, tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    ended = subprocess.run(serve_command(path, built.directories), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 10
    assert path.read_text() == "precious"


def test_a_long_socket_path_is_named(built: Built, tmp_path: Path) -> None:
    path = tmp_path / ("d" * 100) / "s"
    ended = subprocess.run(serve_command(path, built.directories), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 10
    assert "107 bytes" in ended.stderr
    assert str(path) in ended.stderr


def test_ending_is_bounded_also_when_a_drive_stands_still(built: Built, tmp_path: Path) -> None:
    with daemon_inside(tmp_path / "s", built.directories, drain_s=0.3) as inside:
        inside.server.inject("stall", argument=STALL_MS)
        source = DaemonSource(inside.socket, reconnect_s=0)
        stream = source.lease(1, [0])
        wait_until(lambda: inside.server.stats()["reading"] > 0)
        inside.daemon.stop("now")
        with pytest.raises(DaemonError, match="clos"):
            next(stream)
        assert inside.server.stats()["reading"] == 1  # the drive still does not answer
        source.close()


def test_reads_under_way_are_let_finish(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Service.drain

    def drive_answers_after_this(service: Service, timeout_s: float) -> bool:
        threading.Thread(target=service._server.clear_faults).start()
        return drain(service, timeout_s)

    monkeypatch.setattr(Service, "drain", drive_answers_after_this)
    with daemon_inside(tmp_path / "s", built.directories, drain_s=10) as inside:
        inside.server.inject("stall", argument=STALL_MS)
        source = DaemonSource(inside.socket, reconnect_s=0)
        stream = source.lease(1, [0])
        wait_until(lambda: inside.server.stats()["reading"] > 0)
        inside.daemon.stop("now")
        (lease,) = stream
        assert len(lease.payload) == 24480
        lease.release()
        source.close()


@pytest.mark.parametrize(
    ("directories", "code", "words"),
    [([], 5, "manifest.json"), (["no"], 5, "manifest.json"), (["home"], 4, " missing: ")],
)
def test_what_cannot_be_served(
    built: Built, tmp_path: Path, directories: list[str], code: int, words: str
) -> None:
    place = tmp_path / "moved"
    build_container(place / "home", [place / "a"], [1, 2])
    (place / "a").rename(place / "elsewhere")
    paths = [place / name for name in directories] or [tmp_path]
    ended = subprocess.run(serve_command(tmp_path / "s", paths), capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr
    assert not (tmp_path / "s").exists()


def test_a_drive_that_moved_is_found_by_its_uuid(tmp_path: Path) -> None:
    built = build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [0, 1, 2])
    (tmp_path / "a").rename(tmp_path / "x")
    (tmp_path / "b").rename(tmp_path / "a")
    with daemon_inside(tmp_path / "s", [tmp_path / "x", tmp_path / "a", built.home]) as inside:
        paths = [drive["path"] for drive in inside.status()["drives"]]
        assert paths == [str(tmp_path / "x"), str(tmp_path / "a")]


def test_two_containers_are_not_chosen_between(built: Built, tmp_path: Path) -> None:
    other = build_container(tmp_path / "other", seed=1)
    with pytest.raises(UnsupportedError, match="several containers"):
        Service.open(ServeSettings((built.home, other.home)), lambda what, done, total: None)


@pytest.mark.parametrize("name", ["dense.safetensors", "config.json", "generation_config.json"])
def test_damage_to_what_all_clients_share_is_found_before_anybody_connects(tmp_path: Path, name: str) -> None:
    built = build_container(tmp_path / "home")
    path = built.home / name
    data = bytearray(path.read_bytes())
    data[-4096 if name.startswith("dense") else 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError) as raised:
        Service.open(ServeSettings((built.home,)), lambda what, done, total: None)
    assert raised.value.path == str(path)


def with_small_file(home: Path, name: str, data: bytes) -> None:
    """Exchange a small file of a container as somebody would who makes containers: with its digest."""
    manifest = json.loads((home / "manifest.json").read_bytes())
    (home / name).write_bytes(data)
    for entry in manifest["text_files"]:
        if entry["path"] == name:
            entry |= {"bytes": len(data), "digest": checksum.digest(data).hex()}
    manifest["digest"] = checksum.ZERO_DIGEST_HEX
    blank = (json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode()
    sealed = blank.replace(checksum.ZERO_DIGEST_HEX.encode(), checksum.digest(blank).hex().encode())
    (home / "manifest.json").write_bytes(sealed)


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b"[]", b"", b"{" * 100_000, b'{"text_config": 5}'])
def test_a_configuration_that_every_client_would_refuse_is_not_served(tmp_path: Path, data: bytes) -> None:
    home = build_container(tmp_path / "home").home
    with_small_file(home, "config.json", data)
    with pytest.raises(ConfigError) as raised:
        Service.open(ServeSettings((home,)), lambda what, done, total: None)
    assert raised.value.path == str(home / "config.json")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda layer, expert, extents: (layer + 7, expert, extents), "of a layer that it does not have"),
        (lambda layer, expert, extents: (layer, expert + 1, extents), "lacks an expert"),
        (
            lambda layer, expert, extents: (layer, expert, [replace(extents[0], file=99)]),
            "in a file that has none",
        ),
        (lambda layer, expert, extents: (layer, expert, [replace(extents[0], offset=1 << 50)]), "does not fit"),
    ],
)
def test_a_catalog_that_contradicts_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], problem: str
) -> None:
    """Its digest is right: it was made so."""
    home = build_container(tmp_path / "home").home
    experts = CatalogReader.experts
    monkeypatch.setattr(CatalogReader, "experts", lambda reader: (change(*entry) for entry in experts(reader)))
    with pytest.raises(ContainerError, match=problem) as raised:
        Service.open(ServeSettings((home,)), lambda what, done, total: None)
    assert raised.value.path == str(home / "catalog.mdb")
    assert raised.value.exit_code == 1


def test_too_little_memory_is_refused_with_numbers(built: Built, tmp_path: Path) -> None:
    command = serve_command(tmp_path / "s", built.directories, "--reserve-gb", "1e6")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 9
    assert "MemAvailable" in ended.stderr
    assert "1000000.000 GB" in ended.stderr


# Limits of the process


def limited(what: int, soft: int, hard: int) -> Any:
    import resource

    return lambda: resource.setrlimit(what, (soft, hard))


def take_all(path: Path, built: Built) -> None:
    source = DaemonSource(path)
    for layer in (1, 2):
        for lease in source.lease(layer, range(5)):
            with lease:
                assert lease.payload.tobytes() == next(
                    data
                    for key, data in built.payloads.items()
                    if (key.layer, key.expert) == (layer, lease.expert)
                )
    source.close()


def test_64_descriptors_are_enough_for_few_clients(built: Built, tmp_path: Path) -> None:
    import resource

    limit = limited(resource.RLIMIT_NOFILE, 64, 64)
    with daemon_outside(tmp_path / "s", built.directories, "--max-clients", "4", preexec_fn=limit):
        take_all(tmp_path / "s", built)
    command = serve_command(tmp_path / "s", built.directories, "--max-clients", "8")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit)
    assert ended.returncode == 9
    assert "may have 64 (ulimit -n)" in ended.stderr


def test_the_soft_limit_is_raised(built: Built, tmp_path: Path) -> None:
    import resource

    limit = limited(resource.RLIMIT_NOFILE, 64, 1024)
    with daemon_outside(tmp_path / "s", built.directories, "--max-clients", "16", preexec_fn=limit):
        links = [Link.open(tmp_path / "s", "x") for _ in range(16)]
        for link in links:
            link.close()


def test_64_kb_of_locked_memory_are_enough(built: Built, tmp_path: Path) -> None:
    import resource

    limit = limited(resource.RLIMIT_MEMLOCK, 65536, 65536)
    with daemon_outside(tmp_path / "s", built.directories, preexec_fn=limit):
        take_all(tmp_path / "s", built)


@pytest.mark.skipif(os.geteuid() != 0, reason="a private /dev/shm takes root")
def test_dev_shm_of_1_mb_does_not_matter(built: Built, tmp_path: Path) -> None:
    inner = " ".join(serve_command(tmp_path / "s", built.directories))
    script = f"mount -t tmpfs -o size=1m none /dev/shm && exec {inner}"
    process = subprocess.Popen(["unshare", "-m", "sh", "-c", script], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or answers(tmp_path / "s"))
        if process.poll() is not None:
            pytest.skip("mounts are not allowed here")
        take_all(tmp_path / "s", built)
    finally:
        process.kill()
        process.communicate()


# Who may connect

STRANGER = """
    import os, sys
    from pathlib import Path
    from k3.base.errors import DaemonError
    from k3.store.client.daemon_source import DaemonSource
    os.setgroups([int(sys.argv[3])] if sys.argv[3] else [])
    os.setgid(int(sys.argv[2]))
    os.setuid(65534)
    try:
        source = DaemonSource(Path(sys.argv[1]))
        print(sum(lease.payload.size for lease in source.lease(1, [0, 1])))
    except DaemonError as error:
        print(error.problem)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="being somebody else takes root")
@pytest.mark.parametrize(
    ("group", "gid", "more", "said"),
    [
        (None, 65534, "", "this user may not connect"),
        ("4321", 65534, "", "this user may not connect"),
        ("4321", 4321, "", "48960"),
        ("4321", 65534, "4321", "48960"),
    ],
)
def test_strangers_and_members(
    built: Built, open_place: Path, group: str | None, gid: int, more: str, said: str
) -> None:
    options = [] if group is None else ["--group", group]
    with daemon_outside(open_place / "s", built.directories, *options):
        command = [sys.executable, "-c", textwrap.dedent(STRANGER), str(open_place / "s"), str(gid), more]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.stdout.strip().startswith(said), ended.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="being somebody else takes root")
def test_credentials_count_and_not_only_the_mode(built: Built, open_place: Path) -> None:
    with daemon_outside(open_place / "s", built.directories):
        (open_place / "s").chmod(0o666)  # somebody's mistake
        command = [sys.executable, "-c", textwrap.dedent(STRANGER), str(open_place / "s"), "65534", ""]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "user 65534 may not use this daemon" in ended.stdout, ended.stderr


# systemd


def test_under_systemd(built: Built, tmp_path: Path) -> None:
    """READY only once it can be used; watchdog pings; STOPPING; the socket is systemd's and stays."""
    path = tmp_path / "s"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(60)
        listener.bind(str(path))
        listener.listen()
        early = connect(path)  # waits in systemd's socket until there is a daemon
        wire.send(early, wire.StatusRequest())
        command = " ".join(serve_command(tmp_path / "unused", built.directories, "--log-json"))
        script = f"export LISTEN_PID=$$; exec 3<&{listener.fileno()}; exec {command}"
        environment = {
            **os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "LISTEN_FDS": "1", "WATCHDOG_USEC": "200000",
        }  # fmt: skip
        process = subprocess.Popen(
            ["bash", "-c", script],
            env=environment,
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said: list[str] = []
            while not any(text.startswith("READY=1") for text in said):
                said.append(notify.recv(4096).decode())
            assert f"MAINPID={process.pid}" in said[-1]
            assert any("EXTEND_TIMEOUT_USEC" in text for text in said)
            assert answers(path)
            early.settimeout(30)
            assert isinstance(wire.receive(early), wire.Status)
            early.close()
            pings = 0
            while pings < 5:
                pings += notify.recv(4096).decode() == "WATCHDOG=1"
            process.terminate()
            said = []
            while not any(text.startswith("STOPPING=1") for text in said):
                said.append(notify.recv(4096).decode())
            assert process.wait(30) == 0
            assert path.exists()
            assert not (tmp_path / "unused").exists()
        finally:
            process.kill()
            process.communicate()


def test_the_log_can_be_json(built: Built, tmp_path: Path) -> None:
    with daemon_outside(tmp_path / "s", built.directories) as outside:
        outside.terminate()
        wait_until(lambda: any("ended" in line for line in outside.log))
    lines = [json.loads(line) for line in outside.log]
    assert {"time", "level", "message", "pid"} <= lines[0].keys()
    text = " ".join(line["message"] for line in lines)
    for word in ("memory: ", "MemAvailable", "serving on", "SIGTERM"):
        assert word in text


def test_a_status_has_what_people_look_for(daemon: Inside, built: Built) -> None:
    take_all(daemon.socket, built)
    status = ask_status(daemon.socket)
    for drive in status["drives"]:
        assert {
            "path",
            "model",
            "device",
            "share",
            "queue",
            "errors",
            "re_reads",
            "read_times",
            "verify_failures",
            "direct",
            "read_bytes",
        } <= drive.keys()
        assert drive["read_bytes"] > 0
    assert [drive["share"] for drive in status["drives"]] == [0.3333, 0.6667]
    cache = status["cache"]
    assert cache["misses"] > 0
    assert {"hits", "coalesced", "evictions", "slots", "bytes"} <= cache.keys()
    assert any("MemAvailable" in term["term"] for term in status["budget"])
