"""Telling systemd how the daemon is (sd_notify) and taking the sockets it made (socket activation).

The protocol is a datagram of `KEY=value` lines to the socket named in NOTIFY_SOCKET, and descriptors from 3 on
announced by LISTEN_PID and LISTEN_FDS. The environment is given as a value; nothing here reads it. Without
NOTIFY_SOCKET every call does nothing. Used from the daemon's main thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from k3.base.errors import SocketError
from k3.store.protocol.closing import close_socket

FIRST_DESCRIPTOR = 3
_STATUS_CHARACTERS_MAX = 200


@dataclass(frozen=True, slots=True)
class Supervisor:
    """What systemd said when it started this process."""

    notify_socket: str | None = None
    watchdog_us: int | None = None
    listen_descriptors: int = 0

    @staticmethod
    def from_environment(environment: Mapping[str, str], pid: int) -> Supervisor:
        """Only what is meant for process `pid`. SocketError for numbers that are none."""
        watchdog_us = None
        if "WATCHDOG_USEC" in environment and environment.get("WATCHDOG_PID", str(pid)) == str(pid):
            watchdog_us = _number(environment, "WATCHDOG_USEC")
        descriptors = 0
        if "LISTEN_FDS" in environment and environment.get("LISTEN_PID") == str(pid):
            descriptors = _number(environment, "LISTEN_FDS")
        return Supervisor(environment.get("NOTIFY_SOCKET") or None, watchdog_us or None, descriptors)

    @property
    def ping_interval_s(self) -> float | None:
        """How often the watchdog wants to hear from us: twice as often as it would bark; None without one."""
        return None if self.watchdog_us is None else self.watchdog_us / 2e6


class Notifier:
    """Sends states. A supervisor that does not listen is no reason for a daemon to end."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._address = _address(supervisor.notify_socket)
        self._socket: socket.socket | None = None
        if self._address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        """Clients can connect from now on."""
        self._send(f"READY=1\nSTATUS={_line(status)}\nMAINPID={os.getpid()}")

    def status(self, status: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={_line(status)}")

    def extend(self, seconds: float) -> None:
        """Tell systemd that starting or stopping takes longer: it must not give up within the next `seconds`."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def watchdog(self) -> None:
        """Still alive."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        """Nobody new is served."""
        self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        if self._socket is not None:
            close_socket(self._socket)
            self._socket = None

    def _send(self, text: str) -> None:
        if self._socket is None or self._address is None:
            return
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError:
            return  # the supervisor's socket is gone or full; it will notice itself


def _address(name: str | None) -> str | bytes | None:
    """Return the address that NOTIFY_SOCKET names: a path, or an abstract name after an @."""
    if name is None:
        return None
    if name.startswith("@"):
        return b"\0" + os.fsencode(name[1:])
    if name.startswith("/"):
        return name
    raise SocketError(f"NOTIFY_SOCKET={name} is neither a path nor an abstract name")


def _line(text: str) -> str:
    return " ".join(text.split())[:_STATUS_CHARACTERS_MAX]


def _number(environment: Mapping[str, str], key: str) -> int:
    value = environment[key]
    if not value.isascii() or not value.isdecimal() or len(value) > 18:
        raise SocketError(f"{key}={value[:40]} is not a number")
    return int(value)
