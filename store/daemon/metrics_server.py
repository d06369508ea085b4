"""`MetricsServer`: the small HTTP server that Prometheus scrapes, on the loopback interface or on a Unix socket.

One thread, one selector. The port is open to every user of the machine, so everything is bounded: connections (the
oldest makes room for a new one), the size of a request, and the time from connecting to the end of the answer. One
request per connection. Nothing here is in the control loop's way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from k3.base.errors import SocketError
from k3.store.daemon.fault_log import Faults
from k3.store.daemon.listener import Listener
from k3.store.daemon.metrics import StatusCollector
from k3.store.protocol.closing import close_socket
from k3.store.protocol.peer import Owner, overflow_ids, peer_of
from k3.store.protocol.socket_file import NO_FILE, ClaimedSocket, claim

LOOPBACK = "127.0.0.1"
CONNECTIONS_MAX = 8
DESCRIPTORS = CONNECTIONS_MAX + 6
"""Descriptors that metrics may take: the connections, the one before the oldest goes, and the server's own."""

REQUEST_BYTES_MAX = 8192
DEADLINE_S = 10.0
LOOK_S = 1.0
END_S = 5.0

_REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
    431: "Request Header Fields Too Large", 500: "Internal Server Error",
}  # fmt: skip

_log = logging.getLogger("k3.store")


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """A TCP port of the loopback interface, or the path of a Unix socket."""

    port: int | None = None
    path: Path | None = None
    group: int | None = None
    """Members of it may use the Unix socket, besides the daemon's own user and root."""


@dataclass(eq=False, slots=True)
class _Visit:
    """One connection, its request so far, and what is left of the answer (None: the request is not whole yet)."""

    socket: socket.socket
    until_s: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class MetricsServer:
    """Serves until `close`. `port` is the one in use, also when 0 was asked for; None on a Unix socket."""

    def __init__(self, place: MetricsPlace, status: Callable[[], Mapping[str, Any]]) -> None:
        """Listen. SocketError when the port or the path cannot be had. The server's thread calls `status`."""
        self._registry = CollectorRegistry()
        self._registry.register(StatusCollector(status))
        self._visits: dict[_Visit, None] = {}  # the oldest first
        self._faults = Faults()
        self._owner: Owner | None = None
        if place.path is not None:
            self._owner = Owner(os.geteuid(), place.group, *overflow_ids())
            mode = 0o600 if place.group is None else 0o660
            self._claimed = claim(place.path, mode=mode, group=place.group, kind=socket.SOCK_STREAM)
        else:
            self._claimed = _bound_port(place.port or 0)
        self.port: int | None = None if place.path else self._claimed.socket.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(
            self._claimed, self._selector, self._enter, lambda: True, refuses_descriptors=True
        )
        self._next_look_s = 0.0
        try:
            self._listener.open()
        except OSError as error:
            self._claimed.close()
            raise _not_served(error, place.port) from error
        self._hears_end, self._says_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._hears_end, selectors.EVENT_READ)
        self._is_ending = False
        # A daemon thread: on a kernel without SO_PASSRIGHTS a user of the Unix socket can make it sleep.
        self._thread = threading.Thread(target=self._serve, name="k3-metrics", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """Connections at the moment."""
        return len(self._visits)

    def close(self) -> None:
        """Stop serving and wait for the thread, though not for one that somebody made sleep."""
        self._is_ending = True
        os.write(self._says_end, b"x")
        self._thread.join(END_S)
        self._claimed.close()

    # The server's thread

    def _serve(self) -> None:
        try:
            while not self._is_ending:
                for key, _ in self._selector.select(self._timeout_s()):
                    if key.data is not None and key.fd in self._selector.get_map():
                        key.data()
                self._look_at_the_clock(time.monotonic())
        except Exception as error:  # the daemon goes on without metrics
            self._faults.note("serving metrics, which end", error)
        finally:
            for visit in list(self._visits):
                self._end(visit)
            self._listener.withdraw()
            self._selector.close()

    def _timeout_s(self) -> float:
        times_s = [self._next_look_s, *(visit.until_s for visit in self._visits)]
        if self._listener.resumes_at_s is not None:
            times_s.append(self._listener.resumes_at_s)
        return max(0.0, min(times_s) - time.monotonic())

    def _look_at_the_clock(self, now_s: float) -> None:
        for visit in [visit for visit in self._visits if visit.until_s <= now_s]:
            self._end(visit)
        self._listener.turn(now_s)
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._listener.look_after_path()

    def _enter(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if self._is_ending or (self._owner is not None and not self._owner.admits(peer_of(connection))):
            close_socket(connection)
            return
        if len(self._visits) >= CONNECTIONS_MAX:
            self._end(next(iter(self._visits)))
        visit = _Visit(connection, time.monotonic() + DEADLINE_S)
        self._visits[visit] = None
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._go_on(visit))

    def _end(self, visit: _Visit) -> None:
        del self._visits[visit]
        self._selector.unregister(visit.socket)
        close_socket(visit.socket)

    def _go_on(self, visit: _Visit) -> None:
        """Read on, or write on; end the connection when its answer is out or the other side is gone."""
        try:
            is_done = self._write(visit) if visit.answer is not None else self._read(visit)
        except BlockingIOError:
            return
        except OSError:
            is_done = True
        if is_done and visit in self._visits:
            self._end(visit)

    def _read(self, visit: _Visit) -> bool:
        room = REQUEST_BYTES_MAX + 1 - len(visit.request)
        data = visit.socket.recv(room)
        visit.request += data
        if not data:
            return True
        is_whole = b"\r\n\r\n" in visit.request or b"\n\n" in visit.request
        if not is_whole and len(visit.request) <= REQUEST_BYTES_MAX:
            return False
        visit.answer = memoryview(self._answer(bytes(visit.request)) if is_whole else _page(431))
        self._selector.modify(visit.socket, selectors.EVENT_WRITE, lambda: self._go_on(visit))
        return False

    def _write(self, visit: _Visit) -> bool:
        assert visit.answer is not None
        visit.answer = visit.answer[visit.socket.send(visit.answer) :]
        if visit.answer:
            return False
        with contextlib.suppress(OSError):
            visit.socket.shutdown(socket.SHUT_WR)
        return True

    def _answer(self, request: bytes) -> bytes:
        lines = request.decode("latin-1").splitlines()
        words = lines[0].split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _page(400)
        if words[0] not in ("GET", "HEAD"):
            return _page(405, "Allow: GET, HEAD\r\n")
        if words[1].partition("?")[0] not in ("/", "/metrics"):
            return _page(404)
        fields = (line.partition(":") for line in lines[1:])
        accept = ",".join(value.strip() for name, _, value in fields if name.strip().lower() == "accept")
        encode, kind = choose_encoder(accept)
        try:
            body = encode(self._registry)
        except Exception as error:  # the next scrape may be a better one
            self._faults.note("a scrape of the metrics", error)
            return _page(500)
        return _page(200, f"Content-Type: {kind}\r\n", body, is_sent=words[0] == "GET")


def _bound_port(port: int) -> ClaimedSocket:
    """Return a socket bound to a port of the loopback interface. It has no file to be removed."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((LOOPBACK, port))
    except OSError as error:
        close_socket(bound)
        raise _not_served(error, port) from error
    return ClaimedSocket(bound, Path(f"{LOOPBACK}:{port}"), None, NO_FILE)


def _not_served(error: OSError, port: int | None) -> SocketError:
    place = f"{LOOPBACK}:{port}" if port is not None else "the socket"
    return SocketError(
        f"metrics cannot be served on {place}: {error.strerror or error}", advice="Choose another --metrics port"
    )


def _page(code: int, fields: str = "", body: bytes = b"", *, is_sent: bool = True) -> bytes:
    head = f"HTTP/1.1 {code} {_REASONS[code]}\r\n{fields}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode("latin-1") + (body if is_sent else b"")
