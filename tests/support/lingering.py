"""Descriptors whose close() blocks until they are released, such as a hostile client may send to a daemon."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

_LINGER = struct.Struct("ii")


class Lingering:
    """A TCP socket with unsent data and SO_LINGER of 60 s, so that closing it blocks until `release`."""

    def __init__(self) -> None:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            self.socket = socket.create_connection(listening.getsockname())
            self._other, _ = listening.accept()
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.socket.send(b"x" * 65536)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 60))

    def sent_over(self, connection: socket.socket, data: bytes) -> None:
        """Send the descriptor with a message and close it here, so that only the receiver has it."""
        socket.send_fds(connection, [data], [self.socket.fileno()])
        self.socket.close()

    def release(self) -> None:
        """Reset the connection, which ends a close() that blocks. A second call does nothing."""
        if self._other.fileno() < 0:
            return
        self._other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))
        self._other.close()


@contextlib.contextmanager
def lingering(count: int = 1) -> Iterator[list[Lingering]]:
    """Make `count` of them; release and close at the end of the block those that still are open."""
    made = [Lingering() for _ in range(count)]
    try:
        yield made
    finally:
        for item in made:
            item.release()
            item.socket.close()
