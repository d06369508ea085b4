"""Experts on their way from the drives, and whose part is read next: what somebody waits for, then guesses.

A flight is one expert being read into one slot, part by part. Flights that are waited for are read in the order
in which they were asked for, each as fast as the drive goes. A guess (a prefetch that nobody has asked for yet)
is read only while nothing else is there to begin, and by a bounded number of threads, so that one is left for what
is asked for meanwhile (a single thread guesses too). Pure bookkeeping without a lock of its own: the source's
lock guards it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from k3.model.keys import ExpertKey
from k3.store.local.fetch import Part, Piece, split

R = TypeVar("R")


@dataclass(slots=True)
class PieceState:
    """How far one piece of a flight is."""

    piece: Piece
    parts_left: int
    error: Exception | None = None


class Flight(Generic[R]):
    """An expert being read into a slot, and the requests (R) that wait for it; a guess has none."""

    __slots__ = (
        "check", "error", "guess", "is_dropped", "key", "pieces", "pieces_left", "running", "slot", "unread",
        "waiters",
    )  # fmt: skip

    def __init__(
        self,
        key: ExpertKey,
        slot: int,
        pieces: Sequence[Piece],
        part_bytes: int,
        *,
        check: bool,
        guess: object | None,
    ) -> None:
        """`check` compares digests; `guess` is what the prefetch is known by, None when it is asked for."""
        self.key = key
        self.slot = slot
        self.check = check
        self.guess = guess
        self.waiters: list[R] = []
        self.unread: deque[tuple[PieceState, Part]] = deque()
        self.pieces: list[PieceState] = []
        for piece in pieces:
            parts = split(piece, part_bytes)
            state = PieceState(piece, len(parts))
            self.pieces.append(state)
            self.unread.extend((state, part) for part in parts)
        self.pieces_left = len(self.pieces)
        self.running = 0  # parts that some thread is at
        self.is_dropped = False  # no more of it is to be read
        self.error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Job(Generic[R]):
    """One part for a thread to read."""

    flight: Flight[R]
    state: PieceState
    part: Part
    is_guess: bool


class FlightQueue(Generic[R]):
    """The flights that still have parts to read. At most `guesses_at_once` parts of guesses are read at a time."""

    def __init__(self, guesses_at_once: int) -> None:
        self._guesses_at_once = guesses_at_once
        self._asked: deque[Flight[R]] = deque()
        self._guesses: deque[Flight[R]] = deque()
        self._guesses_running = 0

    def add(self, flight: Flight[R]) -> None:
        """Line a new flight up."""
        (self._asked if flight.guess is None else self._guesses).append(flight)

    def may_guess(self) -> bool:
        """Whether a thread that is free now would begin a new guess, were there one."""
        return not self._asked and not self._guesses and self._guesses_running < self._guesses_at_once

    def next(self) -> Job[R] | None:
        """The part that is read next; None when there is none, or only guesses and enough threads are at them."""
        if self._asked:
            return self._begin(self._asked, False)
        if self._guesses and self._guesses_running < self._guesses_at_once:
            self._guesses_running += 1
            return self._begin(self._guesses, True)
        return None

    def done(self, job: Job[R]) -> bool:
        """A thread is through with a part. True when that was the last of a flight that was dropped."""
        job.flight.running -= 1
        self._guesses_running -= job.is_guess
        return job.flight.is_dropped and not job.flight.running

    def promote(self, flight: Flight[R]) -> int:
        """Somebody waits for a guess now, also for one that was dropped and is still being read.

        Returns how many of its parts are still to be begun.
        """
        if flight.unread:
            if not flight.is_dropped:
                self._guesses.remove(flight)
            self._asked.append(flight)
        flight.guess, flight.is_dropped = None, False
        return len(flight.unread)

    def drop(self, flight: Flight[R]) -> bool:
        """Begin no more parts of a guess that has some left. True when none of it is being read either."""
        self._guesses.remove(flight)
        flight.is_dropped = True
        return not flight.running

    def _begin(self, line: deque[Flight[R]], is_guess: bool) -> Job[R]:
        flight = line[0]
        state, part = flight.unread.popleft()
        flight.running += 1
        if not flight.unread:
            line.popleft()
        return Job(flight, state, part, is_guess)
