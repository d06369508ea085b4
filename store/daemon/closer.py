"""Ends connections that sent file descriptors, without the control loop ever waiting for a stranger's file.

Descriptors that a peer sends belong to their packet until it is taken or thrown away; then the kernel closes what
nobody else has, in the thread that took or threw. Closing may sleep for as long as the peer likes (a TCP socket
with SO_LINGER and unacknowledged data). So the loop refuses descriptors where the kernel can (SO_PASSRIGHTS, Linux
6.16). Where it cannot, the loop looks at each packet before it takes it, and leaves a connection with descriptors
to a thread that may sleep.

`Closer` belongs to the control loop's thread.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections import deque

from k3.store.protocol.closing import close_socket
from k3.store.protocol.peer import SO_PASSRIGHTS

SO_PASSCRED = 16
THREADS_MAX = 8
CREDENTIALS_BYTES = socket.CMSG_SPACE(12)
"""Room for a packet's credentials and for nothing else."""


class Next(enum.Enum):
    """The packet that would be taken next from a connection."""

    NOTHING = enum.auto()
    END = enum.auto()
    PLAIN = enum.auto()
    WITH_DESCRIPTORS = enum.auto()


def can_bring_descriptors(connection: socket.socket) -> bool:
    """Return True for a connection that was made before, or without, `refuse_descriptors`.

    It is one that must be looked at before a packet is taken: `look` needs credentials beside each packet.
    """
    try:
        if connection.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) == 0:
            return False
    except OSError:
        pass  # a kernel that lets everybody send them
    connection.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
    return True


def look(connection: socket.socket) -> Next:
    """Say what is next on a connection of `can_bring_descriptors`, and leave it there. OSError as the socket says.

    A packet of no bytes looks like the end, but for its credentials.
    """
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
    try:
        data, ancillary, found, _ = connection.recvmsg(1, CREDENTIALS_BYTES, flags)
    except BlockingIOError:
        return Next.NOTHING
    if found & socket.MSG_CTRUNC:
        return Next.WITH_DESCRIPTORS
    return Next.PLAIN if data or ancillary else Next.END


class Closer:
    """Closes connections: most of them at once, those with descriptors unread in threads of their own."""

    def __init__(self, threads_max: int = THREADS_MAX) -> None:
        """At most `threads_max` threads close at a time; what is more waits its turn."""
        self._threads_max = threads_max
        self._lock = threading.Lock()
        self._waiting: deque[socket.socket] = deque()
        self._pending = 0  # those that wait, and those that a thread is at
        self._threads = 0

    @property
    def pending(self) -> int:
        """Connections that are not closed yet."""
        with self._lock:
            return self._pending

    @property
    def is_full(self) -> bool:
        """True when every thread is at a connection: nothing new should be let in."""
        with self._lock:
            return self._threads >= self._threads_max

    def close(self, connection: socket.socket, *, with_descriptors: bool) -> None:
        """End a connection and close it. `with_descriptors`: it is one of `can_bring_descriptors`. Never waits."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # nothing more can come; the peer sees the end now
        if not with_descriptors or _is_drained(connection):
            close_socket(connection)
            return
        with self._lock:
            self._waiting.append(connection)
            self._pending += 1
            if self._threads >= self._threads_max:
                return
            self._threads += 1
        # A daemon thread: whoever makes it sleep must not keep this process from ending.
        thread = threading.Thread(target=self._close_waiting, name="k3-closer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the next one takes this connection along
            with self._lock:
                self._threads -= 1

    def _close_waiting(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                connection = self._waiting.popleft()
            close_socket(connection)
            with self._lock:
                self._pending -= 1


def _is_drained(connection: socket.socket) -> bool:
    """Take what came without descriptors. False when there are some, or when it cannot be told."""
    try:
        while (found := look(connection)) is Next.PLAIN:
            connection.recv(1)
    except OSError:
        return False
    return found is not Next.WITH_DESCRIPTORS
