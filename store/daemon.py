"""The daemon's control loop: who may connect, what they are told, and when everything ends.

One thread, one selector: the listening socket, every connection, the server's event descriptor (clients whose ring
was invalid) and a pipe that signals write to. Expert bytes never pass here. A connection owns its client: when it
ends, for whatever reason, the client is removed from the server before anything else is looked at.

Everything a stranger can do is bounded: connections, the time to say hello, the size of a message; a connection
that does not read its answers is dropped, never waited for.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from k3.container.errors import DaemonError, K3Error, WireError
from k3.store import wire
from k3.store.notify import Notifier
from k3.store.service import Service
from k3.store.socket_file import ClaimedSocket

BACKLOG = 64
SPARE_CONNECTIONS = 16
"""Connections beyond the clients: those that ask for a status, or have not said hello yet."""

HELLO_S = 10.0
TICK_S = 1.0
ACCEPT_PAUSE_S = 0.2
SO_PEERGROUPS = 59
_UCRED = struct.Struct("iII")
_GROUPS_BYTES = 1024  # as much as Python asks for: 256 groups

_log = logging.getLogger("k3.store")


@dataclass(eq=False, slots=True)
class _Connection:
    """One connected peer; `client` is its number in the server once it was welcomed."""

    socket: socket.socket
    pid: int
    uid: int
    since_s: float
    name: str = ""
    client: int | None = None


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """How the loop behaves. `group` may connect besides the daemon's own user and root.

    `with_signals` False leaves SIGTERM and SIGINT alone, for a loop outside of the main thread.
    """

    group: int | None = None
    drain_s: float = 5.0
    ping_interval_s: float | None = None
    with_signals: bool = True


class Daemon:
    """Serves until a signal says stop. Made and run by the main thread."""

    def __init__(
        self, service: Service, claimed: ClaimedSocket, notifier: Notifier, options: DaemonOptions
    ) -> None:
        self._service = service
        self._claimed = claimed
        self._notifier = notifier
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._accepting = False
        self._resume_accepting_s = 0.0
        self._next_tick_s = self._next_ping_s = 0.0
        self._stop_because = ""
        self._reasons: list[str] = []
        self._hears_stop, self._says_stop = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT (or `stop`), then drain and let go of every client."""
        with self._signals() if self._options.with_signals else contextlib.nullcontext():
            try:
                listener = self._claimed.socket
                listener.setblocking(False)
                listener.listen(BACKLOG)
                self._selector.register(self._hears_stop, selectors.EVENT_READ, self._hear_stop)
                self._selector.register(self._service.events_fd, selectors.EVENT_READ, self._drop_violators)
                self._accept_more(True)
                self._notifier.ready(self._service.one_line())
                _log.info("serving on %s: %s", self._claimed.path, self._service.one_line())
                while not self._stop_because:
                    self._turn()
                self._end()
            finally:
                self._close_all("closing")
                self._selector.close()
                os.close(self._hears_stop)
                os.close(self._says_stop)

    def stop(self, reason: str) -> None:
        """End after the current turn. From any thread or a signal handler, while `run` runs."""
        if not self._stop_because:
            self._reasons.append(reason)
            with contextlib.suppress(BlockingIOError):
                os.write(self._says_stop, b"x")

    # One turn

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout_s()):
            if key.fd in self._selector.get_map():  # an earlier event of this turn may have closed it
                key.data()
        now_s = time.monotonic()
        if not self._accepting and now_s >= self._resume_accepting_s:
            self._accept_more(True)
        if self._options.ping_interval_s is not None and now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self._options.ping_interval_s
            self._notifier.watchdog()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._tick(now_s)

    def _timeout_s(self) -> float:
        events_s = [self._next_tick_s]
        if self._options.ping_interval_s is not None:
            events_s.append(self._next_ping_s)
        if not self._accepting:
            events_s.append(self._resume_accepting_s)
        return max(0.0, min(events_s) - time.monotonic())

    def _tick(self, now_s: float) -> None:
        self._service.sample()
        self._notifier.status(self._service.one_line())
        for connection in list(self._connections):
            if connection.client is None and now_s - connection.since_s > HELLO_S:
                self._refuse(connection, WireError(f"no hello within {HELLO_S:g} s"))

    # Connections

    def _accept_more(self, accepting: bool) -> None:
        """Listen to new connections, or stop listening for a moment."""
        if accepting and not self._accepting:
            self._selector.register(self._claimed.socket, selectors.EVENT_READ, self._accept)
        elif not accepting and self._accepting:
            self._selector.unregister(self._claimed.socket)
            self._resume_accepting_s = time.monotonic() + ACCEPT_PAUSE_S
        self._accepting = accepting

    def _accept(self) -> None:
        try:
            peer, _ = self._claimed.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            _log.warning("cannot accept a connection: %s", error.strerror)
            self._accept_more(False)  # else this would spin until somebody leaves
            return
        peer.setblocking(False)
        pid, uid, gid = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        connection = _Connection(peer, pid, uid, time.monotonic())
        self._connections.add(connection)
        self._selector.register(peer, selectors.EVENT_READ, lambda: self._hear(connection))
        if not self._may_connect(peer, uid, gid):
            advice = "Run it as the daemon's user, or start the daemon with --group"
            self._refuse(connection, DaemonError(f"user {uid} may not use this daemon", advice=advice))
        elif len(self._connections) > self._service.max_clients + SPARE_CONNECTIONS:
            self._refuse(
                connection, DaemonError("too many connections", advice="Try again, or raise --max-clients")
            )

    def _may_connect(self, peer: socket.socket, uid: int, gid: int) -> bool:
        if uid in (0, os.geteuid()):
            return True
        group = self._options.group
        return group is not None and (gid == group or group in _groups_of(peer))

    def _hear(self, connection: _Connection) -> None:
        """Take one message from a peer and answer it; the peer's end ends its leases at once."""
        try:
            message = wire.receive(connection.socket)
        except BlockingIOError:
            return
        except OSError:
            message = None
        except WireError as error:
            self._refuse(connection, error)
            return
        if message is None:
            self._forget(connection)
            return
        try:
            self._answer(connection, message)
        except K3Error as error:
            self._refuse(connection, error)
        except OSError as error:  # gone, or does not read what it asked for
            _log.info("client %s dropped: %s", connection.name or connection.pid, error.strerror)
            self._forget(connection)

    def _answer(self, connection: _Connection, message: wire.Message) -> None:
        if isinstance(message, wire.StatusRequest):
            wire.send(connection.socket, wire.Status(self.status()))
        elif isinstance(message, wire.Hello) and connection.client is None:
            self._welcome(connection, message)
        elif isinstance(message, wire.Hello):
            raise WireError("a second hello on one connection")
        else:
            raise WireError("a message that only a daemon sends")

    def _welcome(self, connection: _Connection, hello: wire.Hello) -> None:
        """Give the peer a ring. DaemonError when there are as many clients as may be."""
        connection.name = hello.name
        welcome, invitation = self._service.add_client(hello.name)
        connection.client = welcome.client
        try:
            wire.send(connection.socket, welcome, invitation.descriptors)
        finally:
            invitation.grant.close()
        _log.info("client %d is %s (process %d)", welcome.client, hello.name, connection.pid)

    def _refuse(self, connection: _Connection, error: K3Error) -> None:
        """Say why, then end the connection."""
        _log.warning("connection of process %d refused: %s", connection.pid, error)
        text = wire.Refusal(type(error).__name__, error.problem[: wire.TEXT_CHARACTERS_MAX], error.advice or "")
        with contextlib.suppress(OSError):
            wire.send(connection.socket, text)
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        """Free everything that a connection held, first of all its leases."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        if connection.client is not None:
            self._service.remove_client(connection.client)
            _log.info("client %d (%s) has gone", connection.client, connection.name)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _drop_violators(self) -> None:
        """End the clients whose ring was invalid."""
        bad = set(self._service.violations())
        for connection in list(self._connections):
            if connection.client in bad:
                _log.warning("client %s broke the ring's rules and is dropped", connection.client)
                with contextlib.suppress(OSError):
                    wire.send(connection.socket, wire.Goodbye("its ring was invalid"))
                self._forget(connection)

    # Status

    def status(self) -> dict[str, Any]:
        """The object that `k3-store status --json` prints."""
        status = self._service.status()
        peers = {
            connection.client: connection for connection in self._connections if connection.client is not None
        }
        for client in status["clients"]:
            peer = peers.get(client["client"])
            client["pid"] = None if peer is None else peer.pid
            client["uid"] = None if peer is None else peer.uid
            client["connected_s"] = None if peer is None else round(time.monotonic() - peer.since_s, 3)
        return {**status, "socket": str(self._claimed.path), "pid": os.getpid()}

    # The end

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the loop while inside; what they did before is put back."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(signal.Signals(number).name)

    def _hear_stop(self) -> None:
        # Only here does the loop learn of it: it cannot end, and close the pipe, before `stop` has written.
        os.read(self._hears_stop, 4096)
        self._stop_because = self._reasons[0]

    def _end(self) -> None:
        """Grant nothing new, let reads under way finish, for at most `drain_s`."""
        _log.info("%s: ending", self._stop_because)
        self._notifier.stopping(f"{self._stop_because}: letting reads finish")
        self._accept_more(False)
        self._claimed.withdraw()
        if not self._service.drain(self._options.drain_s):
            _log.warning("reads were still under way after %g s", self._options.drain_s)

    def _close_all(self, reason: str) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                wire.send(connection.socket, wire.Goodbye(reason))
            self._forget(connection)


def _groups_of(peer: socket.socket) -> tuple[int, ...]:
    """A peer's supplementary groups; none where the kernel does not say."""
    try:
        data = peer.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return ()
    return struct.unpack(f"{len(data) // 4}I", data)
