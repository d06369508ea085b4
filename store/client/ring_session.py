"""`Session`: one connection of a `DaemonSource`: its free tickets, what goes into its ring, and its alarm bell.

Leases that come back are told to the daemon several at a time, since each telling may be a system call; what it
does not know yet counts against this client's quota only, and is told before anything new is asked for. Nothing
here waits for room: what finds none in the ring is left for the next try.

Guarded by the source's lock, except `wait`, which one thread at a time may be in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
from collections.abc import Sequence
from pathlib import Path

from k3.base.errno_advice import Operation, refusal
from k3.base.errors import DaemonError, DamageError, DriveError, ExpertError, K3Error
from k3.store.client.socket_link import Link
from k3.store.protocol.closing import close_descriptor, close_socket
from k3.store.protocol.native import Completion
from k3.store.protocol.ring_layout import Op, Status
from k3.store.source import BudgetError, Payload

RELEASES_TOGETHER = 16
FULL_RING_S = 0.002
"""How long to wait when the ring has no room: the daemon empties it in microseconds when it is there."""


class Session:
    """A welcomed link. `free` counts tickets: rights to one lease each, `quota` of them in all."""

    def __init__(self, link: Link, files: tuple[str, ...]) -> None:
        """`files` are the names of the numbers in completions."""
        self.link = link
        self.quota = self.free = link.welcome.quota
        self._files = files
        self.views: dict[tuple[int, int], Payload] = {}
        """Views of the arena, by beginning and length: slots are few, and leased again and again."""
        self._slots: list[int] = []
        self._generations: list[int] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ears = select.epoll()
        self._ears.register(link.socket, select.EPOLLIN)
        self._ears.register(self._bell, select.EPOLLIN)

    def lease(self, tag: int, layer: int, experts: Sequence[int]) -> int:
        """Ask for experts; for how many of them, the first ones, there was room."""
        return self.link.ring.submit(tag, Op.LEASE, layer, experts) if self.flush() else 0

    def view(self, offset: int, payload_bytes: int) -> Payload:
        """Return a view of the arena, the same one each time. Needs no lock."""
        return self.views.setdefault((offset, payload_bytes), self.link.arena[offset : offset + payload_bytes])

    def release(self, slot: int, generation: int) -> None:
        """Give a lease back; the daemon is told once there are several, or by `flush`."""
        self._slots.append(slot)
        self._generations.append(generation)
        if len(self._slots) >= RELEASES_TOGETHER:
            self.flush()

    def flush(self) -> bool:
        """Tell the daemon of every lease that came back; whether there was room for all of them."""
        if self._slots:
            done = self.link.ring.release(self._slots, self._generations)
            del self._slots[:done], self._generations[:done]
        return not self._slots

    def wait(self, timeout_s: float) -> None:
        """Sleep until there are completions, the connection ends, or `ring_bell`."""
        self.link.ring.wait(timeout_s, self._ears.fileno())

    def ring_bell(self) -> None:
        """Wake whoever is in `wait`."""
        os.eventfd_write(self._bell, 1)

    def ended(self) -> str | None:
        """Why the connection is over, None while it is not; silences the bell."""
        if not self._ears.poll(0):
            return None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return self.link.ended()

    def abandon(self) -> None:
        """Close a forked child's copies of the descriptors, so that the parent's end is the connection's."""
        close_socket(self.link.socket)
        self._ears.close()
        close_descriptor(self._bell)

    def close(self) -> None:
        """End the connection. Payloads stay readable."""
        self.link.close()
        self.views.clear()
        self._ears.close()
        close_descriptor(self._bell)

    def error_of(self, completion: Completion, socket_path: Path) -> K3Error:
        """Return the typed error for a completion that grants nothing."""
        status, layer, expert = completion.status, completion.layer, completion.expert
        if status in (Status.DAMAGED, Status.IO_ERROR):
            known = completion.file < len(self._files)
            path = self._files[completion.file] if known else f"file {completion.file}"
            offset = completion.file_offset
            if status == Status.DAMAGED:
                return DamageError(
                    "the expert's bytes differ from their digest, also when read a second time",
                    path=path, layer=layer, expert=expert, offset=offset,
                    advice="Find everything that is damaged with k3-verify --read-data all, then restore it",
                )  # fmt: skip
            found = refusal(Operation.READ, completion.error or errno.ENODATA)  # 0: the file ended early
            return DriveError(
                f"cannot read: {found.reason}", path=path, layer=layer, expert=expert, offset=offset,
                advice=found.advice,
            )  # fmt: skip
        if status == Status.NO_SUCH_EXPERT:
            return ExpertError("the daemon has no such expert", path=socket_path, layer=layer, expert=expert)
        if status == Status.BUSY and completion.op == Op.PIN:
            return BudgetError(
                "no more experts can be pinned: pins have used up their share of the slots",
                path=socket_path, layer=layer, expert=expert,
                advice="Unpin others, or give the daemon more cache or fewer --max-clients",
            )  # fmt: skip
        if status == Status.QUOTA:
            return BudgetError("the daemon counts more leases than its quota", layer=layer, expert=expert)
        return DaemonError(f"the daemon refused a lease with status {status}", layer=layer, expert=expert)
