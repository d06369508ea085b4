"""Holds up: whatever one peer sends, takes or removes, the daemon goes on for everybody else."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from k3.base.errors import DaemonError, SocketError
from k3.store.client.daemon_source import DaemonSource
from k3.store.client.socket_link import Link, ask_status, connect
from k3.store.daemon import control_loop as daemon_module
from k3.store.daemon import listener as listener_module
from k3.store.daemon.closer import Closer, Next, look
from k3.store.daemon.systemd import Notifier, Supervisor
from k3.store.protocol import wire
from k3.store.protocol.peer import Peer, refuse_descriptors
from k3.store.protocol.socket_file import ClaimedSocket, claim
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, answers, daemon_inside, daemon_outside, messages, serve_command
from tests.support.faults import STALL_MS
from tests.support.lingering import lingering
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("container")
    return build_container(place / "home", [place / "a"], [1, 2])


@pytest.fixture
def daemon(built: Built, tmp_path: Path) -> Iterator[Inside]:
    with daemon_inside(tmp_path / "s", built.directories, quota=10, max_clients=4) as inside:
        yield inside


def lease_all(source: DaemonSource) -> int:
    total = 0
    for lease in source.lease(1, range(5)):
        with lease:
            total += len(lease.payload)
    return total


def last_word(connection: socket.socket) -> wire.Message | None:
    """Return the message before the end, which a packet that the daemon did not take turns into a reset once."""
    try:
        return wire.receive(connection)
    except ConnectionResetError:
        return wire.receive(connection)


# Descriptors that nobody asked for


def test_the_kernel_refuses_descriptors(daemon: Inside) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        if not refuse_descriptors(probe):
            pytest.skip("this kernel has no SO_PASSRIGHTS")
    with connect(daemon.socket) as connection:
        with pytest.raises(PermissionError):
            socket.send_fds(connection, [b'{"type":"status"}'], [0])
        wire.send(connection, wire.StatusRequest())
        assert isinstance(wire.receive(connection), wire.Status)


def test_descriptors_that_take_long_to_close_hold_nobody_up(
    built: Built, tmp_path: Path, looks: threading.Event
) -> None:
    """The way of a kernel that cannot refuse them."""
    with (
        daemon_inside(tmp_path / "s", built.directories, loop={"refuses_descriptors": False}) as inside,
        lingering() as (item,),
    ):
        looks.clear()
        with connect(inside.socket) as connection:
            item.sent_over(connection, b'{"type":"status"}')
            looks.set()
            answer = last_word(connection)
            assert isinstance(answer, wire.Refusal)
            assert "descriptors beside a message" in answer.problem
            assert last_word(connection) is None
        assert inside.status()["closing_connections"] == 1
        source = DaemonSource(inside.socket)
        assert lease_all(source)
        item.release()
        wait_until(lambda: inside.status()["closing_connections"] == 0)
        source.close()


def test_when_every_closing_thread_sleeps_clients_go_on(
    built: Built, tmp_path: Path, looks: threading.Event
) -> None:
    with (
        daemon_inside(tmp_path / "s", built.directories, loop={"refuses_descriptors": False}) as inside,
        lingering() as (item,),
    ):
        inside.daemon._closer = Closer(threads_max=1)
        source = DaemonSource(inside.socket)
        looks.clear()
        with connect(inside.socket) as connection:
            item.sent_over(connection, b"x")
            looks.set()
            assert isinstance(last_word(connection), wire.Refusal)
        wait_until(lambda: inside.daemon._closer.is_full)
        with connect(inside.socket) as late:
            wire.send(late, wire.StatusRequest())
            assert lease_all(source)
            late.setblocking(False)
            with pytest.raises(BlockingIOError):
                wire.receive(late)
            item.release()
            late.settimeout(30)
            assert isinstance(wire.receive(late), wire.Status)
        source.close()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event: the loop takes packets only while it is set. A sender can close its descriptors first."""
    may_look = threading.Event()
    may_look.set()

    def look_later(connection: socket.socket) -> Next:
        assert may_look.wait(30)
        return look(connection)

    monkeypatch.setattr(daemon_module, "look", look_later)
    return may_look


# Places of several users


def test_a_member_leaves_a_place_and_a_status_to_the_owner(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = 1001
    monkeypatch.setattr(daemon_module, "peer_of", lambda connection: Peer(os.getpid(), uid, 4242))
    loop = {"group": 4242}
    uid = os.geteuid()
    with daemon_inside(tmp_path / "s", built.directories, max_clients=3, loop=loop) as inside:
        uid = 1001
        links = [Link.open(inside.socket, f"hog{n}") for n in range(2)]
        with pytest.raises(DaemonError, match="2 clients of other users"):
            Link.open(inside.socket, "hog")
        idle = [connect(inside.socket) for _ in range(20)]
        with pytest.raises(DaemonError, match="too many connections of user 1001"):
            ask_status(inside.socket)
        uid = 1002
        idle.append(connect(inside.socket))
        uid = os.geteuid()
        assert [client["uid"] for client in inside.status()["clients"]] == [1001, 1001]
        Link.open(inside.socket, "own").close()
        for link in links:
            link.close()
        for connection in idle:
            connection.close()
        wait_until(lambda: inside.status()["clients"] == [])
        uid = 1001
        Link.open(inside.socket, "again").close()
        uid = os.geteuid()


# A status of any size


def test_a_status_of_64_clients_with_the_longest_names(built: Built, tmp_path: Path) -> None:
    name = "\U0001f600" * wire.NAME_CHARACTERS_MAX
    with daemon_inside(tmp_path / "s", built.directories, quota=1, max_clients=64) as inside:
        links = [Link.open(inside.socket, name) for _ in range(64)]
        try:
            assert [client["name"] for client in inside.status()["clients"]] == [name] * 64
        finally:
            for link in links:
                link.close()


def test_a_status_is_read_while_connections_come_and_go(daemon: Inside) -> None:
    """As the thread of the metrics does it."""
    failures: list[BaseException] = []
    is_over = threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                daemon.daemon.status()
        except BaseException as error:
            failures.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(300):
            for connection in [connect(daemon.socket) for _ in range(4)]:
                connection.close()
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        thread.join()
    assert not failures


# What the system refuses, and mistakes of our own


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOPROTOOPT, errno.ENOMEM, errno.ENOSPC])
def test_what_the_system_refuses_to_one_connection_ends_that_one(
    daemon: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    source = DaemonSource(daemon.socket)

    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("k3.store.daemon.control_loop.peer_of", refused)
        with pytest.raises(DaemonError):
            Link.open(daemon.socket, "unlucky")
    assert f"cannot be served: {os.strerror(number)}" in caplog.text
    assert daemon.status()["internal_errors"] == 0
    assert lease_all(source)
    source.close()


def test_a_fault_in_the_service_of_one_ends_that_one(
    daemon: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = DaemonSource(daemon.socket)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("nobody expected this")

    with caplog.at_level(logging.ERROR, "k3.store"):
        with monkeypatch.context() as patch:
            patch.setattr(daemon.service, "add_client", broken)
            for _ in range(2):
                with pytest.raises(DaemonError):
                    Link.open(daemon.socket, "unlucky")
        with monkeypatch.context() as patch:
            link = Link.open(daemon.socket, "unlucky too")
            patch.setattr(daemon.service, "remove_client", broken)
            link.close()
            wait_until(lambda: daemon.status()["internal_errors"] >= 3)
        with monkeypatch.context() as patch:
            patch.setattr(daemon.service, "one_line", broken)
            count = daemon.status()["internal_errors"]
            wait_until(lambda: daemon.status()["internal_errors"] > count)
    assert lease_all(source)
    told = [record for record in caplog.records if "a fault of k3-store itself" in record.message]
    assert len(told) >= 4
    assert sum(record.exc_info is not None for record in told) < len(told)
    assert "its traceback was logged before" in told[1].message
    source.close()
    wait_until(lambda: all(client["name"] != "k3" for client in daemon.status()["clients"]))


# A path that others may remove


def remove(*paths: Path) -> None:
    for path in paths:
        path.unlink()


@pytest.mark.parametrize("what", ["socket", "lock", "both"])
def test_a_daemon_whose_files_were_removed_makes_them_again(daemon: Inside, what: str) -> None:
    path, lock = daemon.socket, Path(f"{daemon.socket}.lock")
    source = DaemonSource(path)
    remove(*([path] if what != "lock" else []), *([lock] if what != "socket" else []))
    with pytest.raises(SocketError, match="another k3-store"):
        claim(path)
    wait_until(lambda: path.exists() and lock.exists() and answers(path))
    assert daemon.socket.stat().st_mode & 0o777 == 0o600
    with pytest.raises(SocketError, match="another k3-store"):
        claim(path)
    assert lease_all(source)
    DaemonSource(path).close()
    source.close()


def test_who_had_connected_before_the_files_went_is_served(daemon: Inside) -> None:
    with connect(daemon.socket) as early:
        remove(daemon.socket)
        wait_until(lambda: answers(daemon.socket))
        wire.send(early, wire.StatusRequest())
        early.settimeout(30)
        assert isinstance(wire.receive(early), wire.Status)


@pytest.mark.parametrize("obstacle", ["no directory", "a file"])
def test_a_path_that_is_lost_ends_the_daemon_once_nobody_is_attached(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    monkeypatch.setattr(daemon_module, "TICK_S", 0.02)
    monkeypatch.setattr(listener_module, "MISSES_MAX", 3)
    place = tmp_path / "d"
    place.mkdir()
    path, lock = place / "s", place / "s.lock"
    with (  # noqa: PT012 - the daemon ends with this error at the end of the block
        pytest.raises(SocketError, match=r"Make the directory|not a socket"),
        daemon_inside(path, built.directories) as inside,
    ):
        source = DaemonSource(path, reconnect_s=0)
        remove(path, lock)
        if obstacle == "a file":
            path.write_text("precious")
        else:
            place.rmdir()
        wait_until(lambda: inside.daemon._listener._misses > 5)
        assert lease_all(source)
        source.close()
        wait_until(lambda: bool(inside.daemon._stop_because))
        assert "path is lost" in inside.daemon._stop_because
    if obstacle == "a file":
        assert path.read_text() == "precious"


@pytest.mark.parametrize("name", ["lstat", "fstat"])
def test_a_path_that_cannot_be_looked_at_is_not_gone(
    daemon: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    real, claimed = getattr(os, name), daemon.daemon._listener._claimed

    def broken(what: object) -> os.stat_result:
        if what in (claimed.path, claimed.lock):
            raise OSError(errno.EIO, "Input/output error")
        return cast(os.stat_result, real(what))

    source, before = DaemonSource(daemon.socket), claimed.socket
    with monkeypatch.context() as patch:
        patch.setattr(os, name, broken)
        wait_until(lambda: "cannot look at" in caplog.text)
        assert lease_all(source)
    assert daemon.status()["internal_errors"] == 0
    assert "was made again" not in caplog.text
    assert daemon.daemon._listener._claimed.socket is before
    source.close()


def test_a_mistake_while_the_path_is_looked_at_ends_nothing(
    daemon: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise AssertionError("a mistake")

    source = DaemonSource(daemon.socket)
    with monkeypatch.context() as patch:
        patch.setattr(ClaimedSocket, "is_in_place", broken)
        wait_until(lambda: daemon.status()["internal_errors"] > 0)
    assert lease_all(source)
    source.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EPERM, errno.EPROTO, errno.EINVAL])
def test_a_connection_that_cannot_be_accepted_ends_nothing(
    daemon: Inside, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Whatever the reason: a security module may refuse a single one."""
    source = DaemonSource(daemon.socket)
    listener = daemon.daemon._listener
    real = listener._claimed.socket
    listener._claimed.socket = cast(socket.socket, Unwilling(real, number))
    connection = connect(daemon.socket)
    wait_until(lambda: f"cannot accept a connection: {os.strerror(number)}" in caplog.text)
    assert lease_all(source)
    listener._claimed.socket = real
    wire.send(connection, wire.StatusRequest())
    connection.settimeout(30)
    assert isinstance(wire.receive(connection), wire.Status)
    assert caplog.text.count("cannot accept") == 1, "once, however often it is tried"
    connection.close()
    source.close()


class Unwilling:
    """A listening socket that accepts nobody."""

    def __init__(self, real: socket.socket, number: int) -> None:
        self._real, self._number = real, number

    def accept(self) -> tuple[socket.socket, Any]:
        raise OSError(self._number, os.strerror(self._number))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


# Signals


def test_a_second_signal_waits_for_no_read(built: Built, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="k3.store")
    with daemon_inside(tmp_path / "s", built.directories, drain_s=3600) as inside:
        inside.server.inject("stall", argument=STALL_MS)
        source = DaemonSource(inside.socket, reconnect_s=0)
        stream = source.lease(1, [0])
        wait_until(lambda: inside.server.stats()["reading"] > 0)
        inside.daemon.stop("SIGTERM")
        wait_until(lambda: "SIGTERM: ending" in caplog.text)
        inside.daemon.stop("SIGINT")
        with pytest.raises(DaemonError, match="clos"):
            next(stream)
        assert inside.server.stats()["reading"] == 1
        assert "SIGINT again: reads are still under way" in caplog.text
        source.close()


def test_a_supervisor_hears_of_a_daemon_that_lets_reads_finish(built: Built, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(60)
        with daemon_inside(tmp_path / "s", built.directories, drain_s=3600) as inside:
            inside.server.inject("stall", argument=STALL_MS)
            source = DaemonSource(inside.socket, reconnect_s=0)
            stream = source.lease(1, [0])
            wait_until(lambda: inside.server.stats()["reading"] > 0)
            inside.daemon._notifier = Notifier(Supervisor(str(tmp_path / "notify")))
            inside.daemon.stop("SIGTERM")
            said: list[str] = []
            while said[-2:] != ["EXTEND_TIMEOUT_USEC=20000000", "WATCHDOG=1"]:
                said.append(notify.recv(4096).decode())
            assert any(text.startswith("STOPPING=1") for text in said)
            inside.server.clear_faults()
            for lease in stream:
                lease.release()
            source.close()
            inside.daemon._notifier.close()


def test_a_hangup_ends_it_with_a_word(built: Built, tmp_path: Path) -> None:
    with daemon_outside(tmp_path / "s", built.directories) as outside:
        outside.process.send_signal(signal.SIGHUP)
        assert outside.process.wait(60) == 0
        wait_until(lambda: "ended" in messages(outside))
        assert "SIGHUP: ending" in messages(outside)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_it_begins_leaves_nothing_behind(
    built: Built, tmp_path: Path, number: signal.Signals
) -> None:
    """Reading the dense tensors takes minutes: its socket is there by then, and nobody is served."""
    path = tmp_path / "s"
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import k3.store.daemon.model_service as m, signal\n"
        "m.find_home = lambda *_: print('begun', flush=True) or signal.pause()\n"
    )
    process = subprocess.Popen(
        serve_command(path, built.directories), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(hook)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert path.exists()
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert not path.exists()
    assert process.returncode == (130 if number == signal.SIGINT else 0), told
    assert "interrupted" in told if number == signal.SIGINT else f"{number.name}: ending before anybody" in told


def test_a_hangup_that_is_ignored_stays_so(built: Built, tmp_path: Path) -> None:
    """As nohup wants it."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with daemon_outside(tmp_path / "s", built.directories, preexec_fn=ignore) as outside:
        outside.process.send_signal(signal.SIGHUP)
        outside.process.send_signal(signal.SIGTERM)
        assert outside.process.wait(60) == 0
        wait_until(lambda: "ended" in messages(outside))
        assert "SIGTERM: ending" in messages(outside)


@pytest.mark.parametrize(
    ("kind", "words"), [("directory", "this is a directory"), ("file", "no socket of k3-store")]
)
def test_a_place_that_is_no_socket_is_called_so(tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / "x"
    if kind == "directory":
        path.mkdir()
    else:
        path.write_text("")
    with pytest.raises(DaemonError, match=words) as raised:
        ask_status(path)
    if kind == "directory":
        assert str(path / "k3-store.sock") in str(raised.value)
