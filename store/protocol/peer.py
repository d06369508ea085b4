"""Users at the other end of a Unix socket: who may use the daemon, and how many connections each may have.

The kernel says who connected (SO_PEERCRED, SO_PEERGROUPS). A user or group that has no number in the daemon's user
namespace comes as the overflow id, 65534: such a number proves nothing, also when the daemon runs under it.

`peer_of`, `refuse_descriptors` and `overflow_ids` ask the system; the rest is pure.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SO_PEERGROUPS = 59
SO_PASSRIGHTS = 83
"""Linux 6.16. 0: whoever sends descriptors gets EPERM. Accepted connections have what the listener had."""

OVERFLOW_ID = 65534
SPARE_CONNECTIONS = 16
"""Connections beyond the clients: those that ask for a status, or have not said hello yet."""

SPARE_KEPT = 4
"""Of these, how many only the daemon's own user and root may use."""

SPARE_PER_USER = 8
"""Of these, how many one other user may have."""

_UCRED = struct.Struct("iII")
_GROUPS_BYTES = 1024  # as much as Python asks for: 256 groups


@dataclass(frozen=True, slots=True)
class Peer:
    """A process that connected, as it was at that moment."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Owner:
    """The daemon's user, and the group whose members may connect besides it and root."""

    uid: int
    group: int | None = None
    overflow_uid: int = OVERFLOW_ID
    overflow_gid: int = OVERFLOW_ID

    def is_privileged(self, peer: Peer) -> bool:
        """Return True for the daemon's own user and root."""
        return peer.uid == 0 or (peer.uid == self.uid and peer.uid != self.overflow_uid)

    def admits(self, peer: Peer) -> bool:
        """Return True for users who may use the daemon."""
        if self.is_privileged(peer):
            return True
        is_real = self.group is not None and self.group != self.overflow_gid
        return is_real and (peer.gid == self.group or self.group in peer.groups)


@dataclass(frozen=True, slots=True)
class Limits:
    """Connections and clients that may be there at once.

    Of several places, one is kept for the daemon's own user and root; `clients_per_user` None lets one other user
    have all the rest.
    """

    clients: int
    clients_per_user: int | None = None

    @property
    def connections(self) -> int:
        """Connections in all."""
        return self.clients + SPARE_CONNECTIONS

    @property
    def member_clients(self) -> int:
        """Clients of all users who are neither the daemon's own nor root."""
        return max(1, self.clients - 1)

    @property
    def user_clients(self) -> int:
        """Clients of one such user."""
        return min(self.member_clients, self.clients_per_user or self.clients)


@dataclass(slots=True)
class Census:
    """Connections and clients by user. Counts only; the caller says who comes and who goes."""

    limits: Limits
    owner: Owner
    connections: Counter[int]
    clients: Counter[int]

    @classmethod
    def empty(cls, limits: Limits, owner: Owner) -> Census:
        """Nobody is there yet."""
        return cls(limits, owner, Counter(), Counter())

    def connection_problem(self, peer: Peer) -> str | None:
        """Say why one more connection of this user is too many; None when it is not."""
        limits = self.limits
        if self.connections.total() >= limits.connections:
            return "too many connections"
        if self.owner.is_privileged(peer):
            return None
        if self._of_members(self.connections) >= limits.member_clients + SPARE_CONNECTIONS - SPARE_KEPT:
            return "too many connections of users other than the daemon's own"
        if self.connections[peer.uid] >= limits.user_clients + SPARE_PER_USER:
            return f"too many connections of user {peer.uid}"
        return None

    def client_problem(self, peer: Peer) -> str | None:
        """Say why one more client of this user is too many; None when it is not."""
        limits = self.limits
        if self.clients.total() >= limits.clients:
            return f"{self.clients.total()} clients are attached, as many as may be"
        if self.owner.is_privileged(peer):
            return None
        if self._of_members(self.clients) >= limits.member_clients:
            return f"{limits.member_clients} clients of other users are attached, as many as may be"
        if self.clients[peer.uid] >= limits.user_clients:
            return (
                f"{self.clients[peer.uid]} clients of user {peer.uid} are attached, as many as one user may have"
            )
        return None

    def _of_members(self, counts: Counter[int]) -> int:
        return sum(n for uid, n in counts.items() if not self.owner.is_privileged(Peer(0, uid, OVERFLOW_ID)))


def peer_of(connection: socket.socket) -> Peer:
    """Ask the kernel who connected."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # a kernel before 4.13, or more groups than there is room for: the first group must do
        return Peer(pid, uid, gid)
    return Peer(pid, uid, gid, struct.unpack(f"{len(data) // 4}I", data))


def refuse_descriptors(listening: socket.socket) -> bool:
    """Let nobody send descriptors to connections that are made from now on. False when the kernel cannot."""
    try:
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True


def overflow_ids() -> tuple[int, int]:
    """Return the user and group that stand for those that cannot be named."""
    return _overflow("overflowuid"), _overflow("overflowgid")


def _overflow(name: str) -> int:
    try:
        return int(Path("/proc/sys/kernel", name).read_text())
    except OSError:  # no /proc here: what the kernel has unless it was told otherwise
        return OVERFLOW_ID
