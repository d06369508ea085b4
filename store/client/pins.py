"""`Pins`: the experts that one client wants kept in RAM, whatever happens to its connections.

A connection that ends takes its pins along; the next one is asked for them again. The daemon answers a pin when
the expert is in RAM, and takes pins and unpins in the order in which they were sent. Guarded by the source's lock;
never waits: what finds no room in the ring is left for the next `flush`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3.base.errors import K3Error
from k3.model.keys import ExpertKey
from k3.store.client.ring_session import Session
from k3.store.protocol.ring_layout import Op

_log = logging.getLogger("k3.store")


class PinState(enum.Enum):
    """Where a pin is. FAILED and DROPPED are ends: wanting the expert again makes a new pin."""

    WANTED = enum.auto()
    ASKED = enum.auto()
    HELD = enum.auto()
    FAILED = enum.auto()
    DROPPED = enum.auto()


@dataclass(eq=False, slots=True)
class Pin:
    """One expert that is wanted in RAM; `error` says why it FAILED."""

    key: ExpertKey
    state: PinState = PinState.WANTED
    tag: int = 0  # of the request that its answer belongs to
    was_held: bool = False
    error: K3Error | None = None


class Pins:
    """What is wanted, and what the daemon is still to be told."""

    def __init__(self) -> None:
        self._pins: dict[ExpertKey, Pin] = {}
        self._unpinned: list[ExpertKey] = []
        self._unasked = False
        self._tags = 0

    def want(self, layer: int, experts: Iterable[int]) -> list[Pin]:
        """Return the pins of these experts, new or already there. Call `flush` afterwards."""
        found = []
        for key in (ExpertKey(layer, expert) for expert in experts):
            if key not in self._pins:
                self._pins[key] = Pin(key)
                self._unasked = True
            found.append(self._pins[key])
        return found

    def drop(self, layer: int, experts: Iterable[int]) -> None:
        """Let experts go; those that are not wanted are passed over. `flush` afterwards."""
        for key in (ExpertKey(layer, expert) for expert in experts):
            pin = self._pins.pop(key, None)
            if pin is not None:
                if pin.state in (PinState.ASKED, PinState.HELD):
                    self._unpinned.append(key)
                pin.state = PinState.DROPPED

    def flush(self, session: Session) -> None:
        """Tell the daemon what it does not know yet."""
        while self._unpinned:
            key = self._unpinned[-1]
            if not session.link.ring.submit(0, Op.UNPIN, key.layer, [key.expert]):
                return
            self._unpinned.pop()
        if self._unasked:
            self._unasked = not all(
                self._ask(session, pin) for pin in self._pins.values() if pin.state is PinState.WANTED
            )

    def _ask(self, session: Session, pin: Pin) -> bool:
        self._tags += 1
        if not session.link.ring.submit(self._tags, Op.PIN, pin.key.layer, [pin.key.expert]):
            return False
        pin.state, pin.tag = PinState.ASKED, self._tags
        return True

    def answered(self, tag: int, key: ExpertKey, error: K3Error | None) -> None:
        """Take in that the daemon has pinned an expert, or with an `error` that it cannot."""
        pin = self._pins.get(key)
        if pin is None or pin.state is not PinState.ASKED or pin.tag != tag:
            return  # dropped since it was asked for, and the daemon was, or will be, told so
        if error is None:
            pin.state, pin.was_held = PinState.HELD, True
            return
        del self._pins[key]
        pin.state, pin.error = PinState.FAILED, error
        if pin.was_held:
            _log.warning("an expert that was pinned cannot be pinned again: %s", error)

    def lost(self) -> None:
        """Take in that the connection ended, and every pin with it."""
        self._unpinned.clear()
        for pin in self._pins.values():
            pin.state = PinState.WANTED
            self._unasked = True


def first_error(pins: Sequence[Pin]) -> K3Error | None:
    """Why the first of these that failed did."""
    return next((pin.error for pin in pins if pin.error is not None), None)


def are_settled(pins: Sequence[Pin]) -> bool:
    """Whether nothing is awaited for any of these."""
    return not any(pin.state in (PinState.WANTED, PinState.ASKED) for pin in pins)
