"""Holds up: systemd is told what it needs to know, in its words, and its absence changes nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3.base.errors import SocketError
from k3.store.daemon.systemd import Notifier, Supervisor


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind(str(tmp_path / "notify"))
        ours.settimeout(60)
        yield ours


def test_the_life_of_a_daemon(systemd: socket.socket) -> None:
    notifier = Notifier(Supervisor(systemd.getsockname()))
    notifier.extend(1.5)
    notifier.ready("serving\n3 drives")
    notifier.watchdog()
    notifier.status("x" * 500)
    notifier.stopping("draining")
    notifier.close()
    notifier.close()
    notifier.status("nobody hears this")
    said = [systemd.recv(4096).decode() for _ in range(5)]
    assert said[0] == "EXTEND_TIMEOUT_USEC=1500000"
    assert said[1].split("\n") == ["READY=1", "STATUS=serving 3 drives", f"MAINPID={os.getpid()}"]
    assert said[2] == "WATCHDOG=1"
    assert said[3] == "STATUS=" + "x" * 200
    assert said[4] == "STOPPING=1\nSTATUS=draining"


def test_an_abstract_address() -> None:
    name = f"@k3-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind("\0" + name[1:])
        ours.settimeout(60)
        notifier = Notifier(Supervisor(name))
        notifier.watchdog()
        notifier.close()
        assert ours.recv(100) == b"WATCHDOG=1"


def test_without_systemd_nothing_happens(tmp_path: Path) -> None:
    for address in (None, str(tmp_path / "gone")):
        notifier = Notifier(Supervisor(address))
        notifier.ready("x")
        notifier.close()


def test_a_full_socket_holds_nobody_up(systemd: socket.socket) -> None:
    notifier = Notifier(Supervisor(systemd.getsockname()))
    for _ in range(10_000):
        notifier.watchdog()
    notifier.close()


def test_what_the_environment_says() -> None:
    told = {
        "NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7",
        "LISTEN_FDS": "1", "LISTEN_PID": "7",
    }  # fmt: skip
    supervisor = Supervisor.from_environment(told, 7)
    assert supervisor == Supervisor("/n", 3_000_000, 1)
    assert supervisor.ping_interval_s == 1.5
    assert Supervisor.from_environment(told, 8) == Supervisor("/n", None, 0)  # meant for somebody else
    assert Supervisor.from_environment({}, 7) == Supervisor()
    assert Supervisor().ping_interval_s is None


@pytest.mark.parametrize("value", ["x", "-1", "1e6", "", "9" * 30])
def test_numbers_that_are_none(value: str) -> None:
    with pytest.raises(SocketError, match="is not a number"):
        Supervisor.from_environment({"WATCHDOG_USEC": value}, 7)
    with pytest.raises(SocketError, match="neither"):
        Notifier(Supervisor("relative"))
