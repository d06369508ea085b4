"""The daemon's control loop: who may connect, what they are told, and when everything ends.

One thread, one selector: the listening socket, every connection, the server's event descriptor (clients whose ring
was invalid) and a pipe that signals write to. Expert bytes never pass here. A connection owns its client: when it
ends, for whatever reason, the client is removed from the server before anything else is looked at.

Everything a stranger can do is bounded: connections, also those of one user, the time to say hello, the size of a
message; a connection that does not read its answers is dropped, never waited for, and so is one that sends
descriptors. A mistake of ours that comes up in the service of one connection ends that one only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from k3.base.errors import DaemonError, K3Error, SocketError, WireError
from k3.store.daemon.closer import Closer, Next, can_bring_descriptors, look
from k3.store.daemon.fault_log import Faults
from k3.store.daemon.listener import Listener
from k3.store.daemon.log_output import PeerLog
from k3.store.daemon.model_service import Service
from k3.store.daemon.systemd import Notifier
from k3.store.protocol import wire
from k3.store.protocol.closing import close_descriptor
from k3.store.protocol.peer import Census, Limits, Owner, Peer, overflow_ids, peer_of
from k3.store.protocol.socket_file import ClaimedSocket

HELLO_S = 10.0
TICK_S = 1.0
DRAIN_LOOK_S = 0.25
END_PATIENCE_S = 20.0
"""Time that a supervisor is asked for while reads are let finish, each time anew."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_log = logging.getLogger("k3.store")


@dataclass(eq=False, slots=True)
class _Connection:
    """One connected peer; `client` is its number in the server once it was welcomed."""

    socket: socket.socket
    peer: Peer
    since_s: float
    can_bring_descriptors: bool
    name: str = ""
    client: int | None = None


@dataclass(frozen=True, slots=True)
class DaemonOptions:
    """How the loop behaves. `group` may connect besides the daemon's own user and root.

    `with_signals` False leaves SIGTERM, SIGINT and SIGHUP alone, for a loop outside of the main thread.
    `refuses_descriptors` False takes the way of kernels before Linux 6.16, which cannot.
    """

    group: int | None = None
    clients_per_user: int | None = None
    refuses_descriptors: bool = True
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
        self._owner = Owner(os.geteuid(), options.group, *overflow_ids())
        self._census = Census.empty(Limits(service.max_clients, options.clients_per_user), self._owner)
        self._closer = Closer()
        self._faults = Faults()
        self._peer_log = PeerLog()
        self._listener = Listener(
            claimed, self._selector, self._enter, lambda: not self._closer.is_full,
            refuses_descriptors=options.refuses_descriptors,
        )  # fmt: skip
        self._failure: SocketError | None = None
        self._next_tick_s = self._next_ping_s = 0.0
        self._stop_because = ""
        self._reasons: list[str] = []
        self._hears_stop, self._says_stop = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or SIGHUP (or `stop`), then drain and let go of every client.

        SocketError when others took the socket's path away, it is not to be had again, and nobody is attached.
        """
        with self._signals() if self._options.with_signals else contextlib.nullcontext():
            try:
                self._selector.register(self._hears_stop, selectors.EVENT_READ, self._hear_stop)
                self._selector.register(self._service.events_fd, selectors.EVENT_READ, self._drop_violators)
                self._listener.open()
                self._notifier.ready(self._service.one_line())
                _log.info("serving on %s: %s", self._claimed.path, self._service.one_line())
                while not self._stop_because:
                    self._turn()
                self._end()
                if self._failure is not None:
                    raise self._failure
            finally:
                self._close_all("closing")
                self._selector.close()
                close_descriptor(self._hears_stop)
                close_descriptor(self._says_stop)

    def stop(self, reason: str) -> None:
        """End after the current turn; called again, wait for no read. From any thread or a signal handler."""
        self._reasons.append(reason)
        if not self._stop_because:
            with contextlib.suppress(BlockingIOError):
                os.write(self._says_stop, b"x")

    # One turn

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout_s()):
            if key.fd in self._selector.get_map():  # an earlier event of this turn may have closed it
                key.data()
        now_s = time.monotonic()
        self._listener.turn(now_s)
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
        if self._listener.resumes_at_s is not None:
            events_s.append(self._listener.resumes_at_s)
        return max(0.0, min(events_s) - time.monotonic())

    def _tick(self, now_s: float) -> None:
        try:
            self._service.sample()
            self._notifier.status(self._service.one_line())
        except Exception as error:  # what is said of the daemon must not be what ends it
            self._faults.note("a look at the counters", error)
        for connection in list(self._connections):
            if connection.client is None and now_s - connection.since_s > HELLO_S:
                self._guarded(connection, self._refuse_silent)
        self._peer_log.turn(now_s)
        try:
            lost = self._listener.look_after_path()
        except Exception as error:  # clients that are there need no path
            self._faults.note("a look at the socket's path", error)
            return
        if lost is not None and not self._census.clients.total() and self._failure is None:
            self._failure = lost  # unreachable, and of use to nobody
            self.stop("the socket's path is lost")

    # Connections

    def _guarded(self, connection: _Connection, act: Callable[[_Connection], None]) -> None:
        """Do something for one connection. Whatever goes wrong there ends that connection and nobody else's."""
        try:
            act(connection)
        except OSError as error:  # the system refuses this one something: memory, a watch, its owner's name
            self._peer_log.log(
                logging.WARNING, "process %d cannot be served: %s", connection.peer.pid, error.strerror or error
            )
            self._let_go(connection)
        except Exception as error:  # a mistake of ours: everybody else's leases must outlive it
            self._faults.note(f"the service of process {connection.peer.pid}", error)
            self._let_go(connection)

    def _let_go(self, connection: _Connection) -> None:
        try:
            self._forget(connection)
        except Exception as error:  # the same mistake may be in the way
            self._faults.note(f"the end of process {connection.peer.pid}", error)

    def _enter(self, accepted: socket.socket) -> None:
        """Somebody has connected: find out who, and whether there is a place."""
        connection = _Connection(accepted, Peer(0, -1, -1), time.monotonic(), True)
        self._connections.add(connection)
        self._guarded(connection, self._greet)

    def _greet(self, connection: _Connection) -> None:
        accepted = connection.socket
        accepted.setblocking(False)
        connection.can_bring_descriptors = can_bring_descriptors(accepted)
        peer = peer_of(accepted)
        problem = self._census.connection_problem(peer)
        connection.peer = peer
        self._census.connections[peer.uid] += 1
        self._selector.register(accepted, selectors.EVENT_READ, lambda: self._guarded(connection, self._hear))
        if not self._owner.admits(peer):
            advice = "Run it as the daemon's user, or start the daemon with --group"
            self._refuse(connection, DaemonError(f"user {peer.uid} may not use this daemon", advice=advice))
        elif problem is not None:
            self._refuse(connection, DaemonError(problem, advice="Try again, or raise --max-clients"))

    def _refuse_silent(self, connection: _Connection) -> None:
        self._refuse(connection, WireError(f"no hello within {HELLO_S:g} s"))

    def _hear(self, connection: _Connection) -> None:
        """Take one message from a peer and answer it; the peer's end ends its leases at once."""
        try:
            if connection.can_bring_descriptors and look(connection.socket) is Next.WITH_DESCRIPTORS:
                self._refuse(connection, WireError("descriptors beside a message that has none"))
                return
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
            self._peer_log.log(
                logging.INFO, "client %s dropped: %s", connection.name or connection.peer.pid, error.strerror
            )
            self._forget(connection)

    def _answer(self, connection: _Connection, message: wire.Message) -> None:
        if isinstance(message, wire.StatusRequest):
            wire.send_status(connection.socket, self.status())
        elif isinstance(message, wire.Hello) and connection.client is None:
            self._welcome(connection, message)
        elif isinstance(message, wire.Hello):
            raise WireError("a second hello on one connection")
        else:
            raise WireError("a message that only a daemon sends")

    def _welcome(self, connection: _Connection, hello: wire.Hello) -> None:
        """Give the peer a ring. DaemonError when there are as many clients as may be."""
        connection.name = hello.name
        problem = self._census.client_problem(connection.peer)
        if problem is not None:
            raise DaemonError(problem, advice="Wait for one to end, or raise --max-clients")
        welcome, invitation = self._service.add_client(hello.name)
        connection.client = welcome.client
        self._census.clients[connection.peer.uid] += 1
        try:
            wire.send(connection.socket, welcome, invitation.descriptors)
        finally:
            invitation.grant.close()
        self._peer_log.log(
            logging.INFO, "client %d is %s (process %d)", welcome.client, hello.name, connection.peer.pid
        )

    def _refuse(self, connection: _Connection, error: K3Error) -> None:
        """Say why, then end the connection."""
        self._peer_log.log(logging.WARNING, "connection of process %d refused: %s", connection.peer.pid, error)
        with contextlib.suppress(OSError):
            wire.send(connection.socket, wire.refusal(error))
        self._forget(connection)

    def _forget(self, connection: _Connection) -> None:
        """Free everything that a connection held, first of all its leases."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        try:
            if connection.client is not None:
                self._census.clients[connection.peer.uid] -= 1
                self._service.remove_client(connection.client)
                self._peer_log.log(logging.INFO, "client %d (%s) has gone", connection.client, connection.name)
        finally:
            if connection.socket in self._selector.get_map():
                self._census.connections[connection.peer.uid] -= 1
                self._selector.unregister(connection.socket)
            self._closer.close(connection.socket, with_descriptors=connection.can_bring_descriptors)

    def _drop_violators(self) -> None:
        """End the clients whose ring was invalid."""
        bad = set(self._service.violations())
        for connection in list(self._connections):
            if connection.client in bad:
                self._guarded(connection, self._drop_violator)

    def _drop_violator(self, connection: _Connection) -> None:
        self._peer_log.log(logging.WARNING, "client %s broke the ring's rules and is dropped", connection.client)
        with contextlib.suppress(OSError):
            wire.send(connection.socket, wire.Goodbye("its ring was invalid"))
        self._forget(connection)

    # Status

    def status(self) -> dict[str, Any]:
        """Return the object that `k3-store status --json` prints. May be called from any thread."""
        status = self._service.status()
        # A copy by one call of C: the loop's thread may change the set while another thread walks through it.
        connections = list(self._connections)
        peers = {connection.client: connection for connection in connections if connection.client is not None}
        for client in status["clients"]:
            peer = peers.get(client["client"])
            client["pid"] = None if peer is None else peer.peer.pid
            client["uid"] = None if peer is None else peer.peer.uid
            client["connected_s"] = None if peer is None else round(time.monotonic() - peer.since_s, 3)
        return {
            **status, "socket": str(self._claimed.path), "pid": os.getpid(),
            "internal_errors": self._faults.count, "closing_connections": self._closer.pending,
        }  # fmt: skip

    # The end

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP stop the loop while inside; what they did before is put back.

        One that is ignored stays so: that is how nohup keeps a program when its terminal goes.
        """
        before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
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
        """Grant nothing new, let reads finish, for at most `drain_s`, or until told to stop once more."""
        _log.info("%s: ending", self._stop_because)
        self._notifier.stopping(f"{self._stop_because}: letting reads finish")
        self._listener.withdraw()
        told = len(self._reasons)
        began_s = time.monotonic()
        left_s = self._options.drain_s
        # In short pieces: a signal handler runs between two of them, and the supervisor hears that we live.
        while not self._service.drain(min(DRAIN_LOOK_S, left_s)):
            waited_s = time.monotonic() - began_s
            left_s = max(0.0, self._options.drain_s - waited_s)
            if len(self._reasons) > told:
                _log.warning("%s again: reads are still under way after %.1f s", self._reasons[-1], waited_s)
                return
            if left_s == 0:
                _log.warning("reads were still under way after %g s", self._options.drain_s)
                return
            self._notifier.extend(END_PATIENCE_S)
            self._notifier.watchdog()

    def _close_all(self, reason: str) -> None:
        for connection in list(self._connections):
            self._guarded(connection, lambda peer: self._say_goodbye(peer, reason))

    def _say_goodbye(self, connection: _Connection, reason: str) -> None:
        with contextlib.suppress(OSError):
            wire.send(connection.socket, wire.Goodbye(reason))
        self._forget(connection)
