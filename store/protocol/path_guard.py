"""A second proof that a live daemon owns a socket's path, and one that nobody can remove: an abstract name.

A lock file can be deleted under the daemon that holds it; the next daemon then locks another file of that name.
A name in the abstract namespace of Unix sockets is the kernel's: it is taken as long as its process lives, and no
file system has it. Anybody may take any such name first, so one that is taken counts only if the kernel says that
it is this user's or root's. Anybody may also connect to such a name: nobody is ever accepted, and what was sent
there is thrown away at the end, where closing the descriptors in it may sleep (`daemon.closer`). Names are seen in
one network namespace only; the lock file is seen everywhere.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import socket
import threading
from pathlib import Path

from k3.base.errors import SocketError
from k3.store.protocol.closing import close_socket
from k3.store.protocol.peer import peer_of, refuse_descriptors

RELEASE_S = 2.0
"""Longest time that `release_guard` waits for the name to be free."""

_log = logging.getLogger("k3.store")


def guard_name(path: Path, uid: int) -> bytes:
    """Return the abstract name that stands for a socket's path and a user."""
    place = os.path.join(os.path.realpath(path.parent), path.name)
    return b"\0k3-store/%d/%s" % (uid, hashlib.sha256(os.fsencode(place)).hexdigest()[:32].encode())


def take_guard(path: Path) -> socket.socket | None:
    """Take the name of a path until the socket that is returned is closed.

    SocketError when a live daemon of this user (or root) has it. None, and a word in the log, when somebody else
    has it: then there is only the lock file.
    """
    name = guard_name(path, os.geteuid())
    guard = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        guard.bind(name)
        refuse_descriptors(guard)
        guard.listen(1)  # so that another daemon can ask the kernel whose it is; nobody is ever accepted
        return guard
    except OSError as error:
        close_socket(guard)
        if error.errno != errno.EADDRINUSE:
            raise SocketError(f"the socket's name cannot be taken: {error.strerror}", path=path) from error
    owner = _owner(name)
    if owner is not None:
        raise already_served(f" (process {owner})" if owner else "", path)
    _log.warning("another user's process has the name that guards %s; only the lock file does now", path)
    return None


def release_guard(guard: socket.socket) -> None:
    """Give the name back.

    On a kernel that cannot refuse descriptors somebody may have sent some that take as long to close as he likes:
    a thread closes, which ends with the process.
    """
    thread = threading.Thread(target=close_socket, args=(guard,), name="k3-guard", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads
        close_socket(guard)
        return
    thread.join(RELEASE_S)


def already_served(owner: str, path: Path) -> SocketError:
    """Return the error for a path that a live daemon has; `owner` names it if that is known."""
    return SocketError(
        f"another k3-store{owner} serves on this socket, or is just starting to",
        path=path,
        advice="Use that one, end it first, or choose another --socket",
    )


def _owner(name: bytes) -> int | None:
    """Return the id of the process that holds a name, if the kernel says that it is this user's or root's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except OSError:  # it does not listen, or too many ask: nothing is proven
            return None
        peer = peer_of(probe)
    return peer.pid if peer.uid in (0, os.geteuid()) else None
