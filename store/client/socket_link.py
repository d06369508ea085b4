"""One connection to the daemon: the handshake, the mappings it gives, and noticing its end.

`Link.open` says hello, takes the six descriptors of the welcome, maps arena, dense and model read-only and gives
ring and doorbells to the native ring. The mappings outlive the link: bytes of a lease stay readable until the last
view of them is gone, also when the daemon is not there any more.

A link belongs to one thread at a time (its owner's lock); views of its mappings to anybody.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from k3.base.errno_advice import Operation, refusal
from k3.base.errors import DaemonError, WireError
from k3.base.safe_text import shown_text
from k3.store.protocol import wire
from k3.store.protocol.closing import close_socket
from k3.store.protocol.model_descriptor import ModelDescriptor, parse_descriptor
from k3.store.protocol.native import NativeRing, map_shared
from k3.store.protocol.socket_file import SOCKET_NAME, check_length
from k3.store.source import Payload

HANDSHAKE_S = 10.0
"""How long a daemon may take to answer; it answers at once unless it is about to end."""

QUEUE_PAUSE_S = 0.005

_GONE = (errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)


class Link:
    """A welcomed connection."""

    def __init__(self, connection: socket.socket, welcome: wire.Welcome, descriptors: list[int]) -> None:
        """Take over the connection and the descriptors, which are closed here once they are mapped."""
        arena, ring, dense, model, request_doorbell, completion_doorbell = descriptors
        self.socket = connection
        self.welcome = welcome
        self.dense = _mapped(dense, welcome.dense_bytes)
        self.model = _mapped(model, welcome.model_bytes)
        try:
            self.ring = NativeRing(ring, arena, welcome.arena_bytes, request_doorbell, completion_doorbell)
        except ValueError as error:
            raise WireError(f"what came with the welcome makes no ring: {error}") from error
        self.arena = self.ring.payload(0, welcome.arena_bytes)

    @classmethod
    def open(cls, path: Path, name: str, *, timeout_s: float = HANDSHAKE_S) -> Link:
        """Connect and be welcomed. DaemonError when there is no daemon or it refuses, saying which and why."""
        connection = connect(path, timeout_s)
        descriptors: list[int] = []
        try:
            answer, descriptors = _exchange(connection, wire.Hello(wire.VERSION, wire.clean_name(name)))
            if not isinstance(answer, wire.Welcome):
                raise refused(answer, path)
            if len(descriptors) != len(wire.DESCRIPTORS):
                raise WireError(f"a welcome came with {len(descriptors)} descriptors", path=path)
            connection.setblocking(False)
            return cls(connection, answer, descriptors)
        except OSError as error:
            close_socket(connection)
            raise unreachable(error, path) from error
        except BaseException:
            close_socket(connection)
            raise
        finally:
            wire.close_all(descriptors)

    @classmethod
    def await_daemon(cls, path: Path, name: str, deadline_s: float, is_wanted: Callable[[], bool]) -> Link | None:
        """Try `open` until it works, at least once. None when `time.monotonic()` is `deadline_s`, or not wanted.

        WireError when there is a daemon that cannot be understood.
        """
        pause_s = 0.01
        while is_wanted():
            try:
                return cls.open(path, name, timeout_s=max(1.0, deadline_s - time.monotonic()))
            except WireError:
                raise
            except DaemonError:
                if time.monotonic() + pause_s > deadline_s:
                    return None
            time.sleep(pause_s)
            pause_s = min(0.2, pause_s * 2)
        return None

    def descriptor(self) -> ModelDescriptor:
        """Return the model as the daemon describes it. WireError when it cannot be understood."""
        return parse_descriptor(self.model.tobytes(), self.welcome.dense_bytes)

    def ended(self) -> str | None:
        """Why the connection is over, None while it is not. Never waits."""
        try:
            message = wire.receive(self.socket)
        except BlockingIOError:
            return None
        except (OSError, WireError) as error:
            return str(error)
        if isinstance(message, wire.Refusal):
            return message.problem
        if isinstance(message, wire.Goodbye):
            return message.reason
        return "its connection ended" if message is None else None

    def close(self) -> None:
        """Give everything back to the daemon. Views of the mappings stay readable."""
        self.ring.close()
        close_socket(self.socket)


def connect(path: Path, timeout_s: float = HANDSHAKE_S) -> socket.socket:
    """Return a connected socket with a timeout. DaemonError when no process listens there."""
    check_length(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                connection.connect(os.fspath(path))
                return connection
            except BlockingIOError:  # the daemon's queue of connections is full just now
                if time.monotonic() > deadline_s:
                    raise TimeoutError from None
                time.sleep(QUEUE_PAUSE_S)
    except OSError as error:
        close_socket(connection)
        raise unreachable(error, path) from error


def ask_status(path: Path, timeout_s: float = HANDSHAKE_S) -> dict[str, Any]:
    """Return the daemon's status, the object of `k3-store status --json`. DaemonError when it cannot be asked."""
    with connect(path, timeout_s) as connection:
        try:
            answer, descriptors = _exchange(connection, wire.StatusRequest())
        except OSError as error:
            raise unreachable(error, path) from error
    try:
        if isinstance(answer, wire.LongStatus):
            answer = wire.long_status(answer, descriptors)
    finally:
        wire.close_all(descriptors)
    if not isinstance(answer, wire.Status):
        raise refused(answer, path)
    return dict(answer.status)


@contextlib.contextmanager
def reading_status(path: Path) -> Iterator[None]:
    """Turn what goes wrong while a status is looked at into a WireError: its daemon is of another release.

    A daemon goes on for weeks and its commands are replaced meanwhile; a status has what its release knew.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(
            f"the status of k3-store lacks what this command looks for ({type(error).__name__}: "
            f"{shown_text(str(error))})",
            path=path,
            advice="Start the daemon again from the release of this command; status --json shows what it says",
        ) from error


def _exchange(connection: socket.socket, message: wire.Message) -> tuple[wire.Message | None, list[int]]:
    """Send a message and take the answer with its descriptors.

    A daemon that refuses a connection may have said so and closed it before our message comes: sending, and the
    first try to receive, then fail although the reason is there to be read.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        wire.send(connection, message)
    try:
        return wire.receive_with_descriptors(connection)
    except ConnectionResetError:
        return wire.receive_with_descriptors(connection)


def unreachable(error: OSError, path: Path) -> DaemonError:
    """Return the typed error for a socket that cannot be used."""
    if isinstance(error, TimeoutError):
        return DaemonError(
            "k3-store does not answer", path=path, advice="It may be starting or overloaded; try again"
        )
    if error.errno == errno.ECONNREFUSED and path.is_dir():
        return DaemonError(
            "this is a directory, and no socket of k3-store",
            path=path,
            advice=f"Name the socket in it, for instance {path / SOCKET_NAME}",
        )
    if error.errno == errno.ECONNREFUSED and not path.is_socket():
        return DaemonError(
            "this is no socket of k3-store", path=path, advice="Start it (k3-store serve), or name its --socket"
        )
    if error.errno in _GONE:
        return DaemonError(
            "no k3-store serves on this socket",
            path=path,
            advice="Start it (k3-store serve), or name its --socket",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return DaemonError(
            "this user may not connect to k3-store", path=path, advice="Run it with --group, or as the same user"
        )
    found = refusal(Operation.CONNECT, error.errno, error.strerror or str(error))
    return DaemonError(f"k3-store cannot be reached: {found.reason}", path=path, advice=found.advice)


def refused(answer: wire.Message | None, path: Path) -> DaemonError:
    """Return the typed error for a refusal, for another answer than was asked for, or for none."""
    if isinstance(answer, wire.Refusal):
        return DaemonError(f"k3-store refused: {answer.problem}", path=path, advice=answer.advice or None)
    if isinstance(answer, wire.Goodbye):
        return DaemonError(f"k3-store ended the connection: {answer.reason}", path=path)
    if answer is None:
        return DaemonError("k3-store ended the connection without a word", path=path)
    return WireError("k3-store gave an answer that does not belong here", path=path)


def _mapped(descriptor: int, nbytes: int) -> Payload:
    """Return a read-only view of a memfd, which stays mapped as long as there are views.

    WireError when the memfd is smaller.
    """
    if os.fstat(descriptor).st_size < nbytes:
        raise WireError(f"a memfd of {os.fstat(descriptor).st_size} bytes was announced with {nbytes}")
    return map_shared(descriptor, nbytes)
