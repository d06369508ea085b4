"""Ends of sockets and of descriptors without a drive behind them, which no error can hold up.

The kernel has let go of a descriptor whatever close() returns. An error means that bytes may be lost that were
written to a file; none of these has any.
"""

from __future__ import annotations

import contextlib
import os
import socket


def close_socket(one: socket.socket) -> None:
    """Close a socket. A second call does nothing. May take as long as the kernel takes."""
    with contextlib.suppress(OSError):
        one.close()


def close_descriptor(descriptor: int) -> None:
    """Close the descriptor of a memfd, a pipe, or a lock file."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
