"""`FileSource`: experts from files, without a daemon. The source that an engine uses by default.

Owns the buffers (slots), the cache over them, the open files and a pool of reading threads. Everything below
is guarded by one lock, held only for bookkeeping; reads, digests and moves run outside of it.

A slot is free, being read (in a flight), held by leases, kept by the cache, or ahead (prefetched). Invariants:

* A slot that is being read belongs to its flight until every piece of it has ended, also after an error or
  when nobody wants the expert any more, so no late read can land in somebody else's expert.
* Only a slot whose pieces were all read, and checked where that was asked for, is ever held or kept.
* Two requests for one expert share one flight, and one slot.
* A ticket is the right to hold one expert. There are as many tickets as slots that are not for prefetches, and
  whoever reads or holds has one, so a read that has a ticket always finds a slot that nobody holds or reads into.
* Guesses (flights of prefetches, and what they brought in that nobody has asked for) are at most `prefetch_slots`
  and have no ticket. A guess is begun only by a thread that finds nothing else to read, and only into a free slot.

A request is admitted with tickets for all of its experts, or for `working_slots` of them; more reads start as
leases come back. A caller that holds them all and asks for more is lent tickets at the cost of the cache, and
gets a BudgetError when `patience_s` pass without one. Requests are admitted in the order they came.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from k3.base.errors import K3Error
from k3.base.huge_pages import HugePages, huge_pages
from k3.base.pages import PAGE_BYTES
from k3.model.keys import ExpertKey
from k3.model.model_source import ModelSource
from k3.store.local.fetch import PART_BYTES, Fetched, buffer_bytes, finish_piece, join, located, place, read_part
from k3.store.local.flights import Flight, FlightQueue, Job, PieceState
from k3.store.local.open_files import OpenFile, OpenFiles, default_open_files, open_file
from k3.store.local.read_threads import ReadThreads
from k3.store.local.request_stream import RequestStream
from k3.store.local.slots import Resident, SlotTable
from k3.store.source import BudgetError, Lease, SourceStats, checked_request, poisoned_on_release

Verify = Literal["always", "first", "never"]

WORKING_SLOTS = 16
"""Experts that can be held without any cache: as many as a token of the real model picks in a layer."""

DEFAULT_THREADS = 8
"""Reads in flight: bench/io_engines.py shows what a drive gains from more."""

_COUNTED = (
    "hits", "joined", "misses", "retries", "reads", "read_bytes", "read_ns", "prefetched", "prefetch_hits",
    "wait_ns", "checked_bytes", "unchecked_bytes",
)  # fmt: skip

HEARTBEAT_S = 1.0
"""How often a waiting thread looks for what wakes nobody: a forgotten stream, a crashed reading thread."""


@dataclass(slots=True)
class _Request:
    """What one stream has still to come; `tickets` are those not in use by a flight or a lease."""

    unstarted: deque[ExpertKey]
    ready: deque[Resident | Exception] = field(default_factory=deque)
    in_flight: int = 0
    tickets: int = 0
    closed: bool = False


class FileSource:
    """An `ExpertSource` that reads the extents of any `ModelSource`.

    RAM is (`working_slots` + `cache_bytes` // slot) slots, allocated here and never again; a slot holds the
    largest expert of `layers` (None: all that the model has) plus a few pages. `prefetch_slots` more are for
    prefetches; with none, they are let go. `verify` says which reads are compared with their digests: all, the
    first of each expert, or none. Drives are asked for `part_bytes` at a time. `max_open_files` None means a
    quarter of what the process may have.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        layers: Collection[int] | None = None,
        cache_bytes: int = 0,
        working_slots: int = WORKING_SLOTS,
        prefetch_slots: int = 0,
        direct: bool = True,
        verify: Verify = "always",
        threads: int = DEFAULT_THREADS,
        part_bytes: int = PART_BYTES,
        max_open_files: int | None = None,
        patience_s: float = 60.0,
        debug: bool = False,
        opener: OpenFile = open_file,
    ) -> None:
        if cache_bytes < 0 or working_slots < 1 or prefetch_slots < 0 or threads < 1:
            raise ValueError(f"{cache_bytes=}, {working_slots=}, {prefetch_slots=}, {threads=} make no source")
        if part_bytes < 1 or part_bytes % PAGE_BYTES:
            raise ValueError(f"part_bytes must be whole pages, not {part_bytes}")
        if verify not in ("always", "first", "never"):
            raise ValueError(f"verify must be always, first or never, not {verify!r}")
        self._model = model
        self._verify = verify
        self._patience_s = patience_s
        self._debug = debug
        served = [layer for layer in model.expert_layers() if layers is None or layer in layers]
        self._layouts = {layer: model.expert_layout(layer) for layer in served}
        self._counts = {layer: model.expert_count(layer) for layer in self._layouts}
        slot_bytes = max(map(buffer_bytes, self._layouts.values()), default=1)
        self._slots = SlotTable(
            slot_bytes,
            working_slots,
            cache_bytes // slot_bytes,
            self._counts,
            ahead_slots=prefetch_slots,
            debug=debug,
        )
        self._working_slots = working_slots
        self._prefetch_slots = prefetch_slots
        self._part_bytes = part_bytes
        self._tickets = self._all_tickets = len(self._slots) - prefetch_slots
        self._flights: dict[ExpertKey, Flight[_Request]] = {}
        self._queue: FlightQueue[_Request] = FlightQueue(max(1, threads - 1))
        self._hints: deque[tuple[object, ExpertKey]] = deque()  # prefetches that were not begun
        self._guesses = 0  # flights that nobody waits for
        self._verified: set[ExpertKey] = set()
        self._admission: deque[object] = deque()
        self.abandoned: deque[_Request] = deque()
        self._files = OpenFiles(max_open_files or default_open_files(), direct=direct, opener=opener)
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._counters = dict.fromkeys(_COUNTED, 0)
        self._closed = False
        self._crash: BaseException | None = None
        self._threads: ReadThreads[Job[_Request]] = ReadThreads(
            threads, lock, self._next_job, self._read, self._note_crash
        )

    def lease(self, layer: int, experts: Sequence[int]) -> RequestStream[_Request]:
        """See `ExpertSource.lease`. Waits for its turn when other requests hold the slots."""
        ids = checked_request(layer, experts, self._counts)
        keys = deque(ExpertKey(layer, expert) for expert in ids)
        request = _Request(keys)
        with self._changed:
            request.tickets = self._admit(min(len(ids), self._working_slots))
            self._advance(request)
        return RequestStream(self, request)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """See `ExpertSource.prefetch`. Of all hints, the latest `prefetch_slots` experts count."""
        ids = checked_request(layer, experts, self._counts)
        hint = object()
        with self._changed:
            self._check_open()
            if not self._prefetch_slots or not ids:
                return lambda: None
            for expert in ids[: self._prefetch_slots]:
                key = ExpertKey(layer, expert)
                flight = self._flights.get(key)
                if flight is not None and flight.guess is not None:
                    flight.guess = hint  # an earlier hint's, which may be taken back: go on for this one
                elif flight is None and not self._slots.renew_ahead(key) and key not in self._slots:
                    self._hints.append((hint, key))
            while len(self._hints) > self._prefetch_slots:
                self._hints.popleft()
            self._threads.wake(len(self._hints))
        return partial(self._take_back, hint)

    def stats(self) -> SourceStats:
        """See `ExpertSource.stats`."""
        with self._changed:
            return SourceStats(
                evictions=self._slots.evictions,
                slots=len(self._slots),
                slot_bytes=self._slots.slot_bytes,
                open_files=len(self._files),
                direct=self._files.direct(),
                **self._counters,
            )

    def huge_pages(self) -> HugePages:
        """See `ExpertSource.huge_pages`."""
        return huge_pages([self._slots.region])

    def close(self) -> None:
        """See `ExpertSource.close`. Waits for the reads that are in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.stop()
        self._files.close()

    # Tickets

    def _admit(self, count: int) -> int:
        """Wait for this request's turn and for `count` tickets; take them. Under the lock."""
        turn = object()
        self._admission.append(turn)
        began_ns = time.monotonic_ns()
        try:
            while self._admission[0] is not turn or self._tickets < count:
                self._wait_for_ticket(began_ns, count)
            self._check_open()
            self._tickets -= count
        finally:
            self._admission.remove(turn)
            self._counters["wait_ns"] += time.monotonic_ns() - began_ns
            self._changed.notify_all()
        return count

    def _wait_for_ticket(self, began_ns: int, count: int) -> None:
        """Wait until something changes; BudgetError when `patience_s` since `began_ns` are over."""
        if self._collect():
            return  # what was given back just now may be enough, and nobody will notify of it again
        self._check_open()
        left_s = self._patience_s - (time.monotonic_ns() - began_ns) / 1e9
        if left_s <= 0:
            total = self._all_tickets
            raise BudgetError(
                f"{count} more experts asked for while {total - self._tickets} of {total} slots are held "
                f"({self._slots.slot_bytes} bytes each), for {self._patience_s:g} s",
                advice="Give leases back while taking new ones, or allow more cache",
            )
        self._changed.wait(min(left_s, HEARTBEAT_S))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the source was closed")
        if self._crash is not None:
            raise RuntimeError("a reading thread of this source failed") from self._crash

    # Reading. All of these are called under the lock, except _read.

    def _advance(self, request: _Request) -> None:
        """Start as much of a stream as it has tickets for."""
        counters, new_parts = self._counters, 0
        while request.unstarted and request.tickets and not self._closed:
            key = request.unstarted.popleft()
            if self._slots.is_ahead(key):
                counters["prefetch_hits"] += 1
            resident, flight = self._slots.hold(key), self._flights.get(key)
            if resident is not None:
                request.ready.append(resident)
                counters["hits"] += 1
            elif flight is not None:
                if flight.guess is not None:
                    new_parts += self._promote(flight)
                flight.waiters.append(request)
                request.in_flight += 1
                counters["joined"] += 1
            else:
                try:
                    flight = self._take_off(key, None)
                except K3Error as error:
                    request.unstarted.clear()
                    request.ready.append(error)
                    break
                flight.waiters.append(request)
                new_parts += len(flight.unread)
                request.in_flight += 1
                counters["misses"] += 1
            request.tickets -= 1
        if new_parts:
            self._threads.wake(new_parts)
        self._changed.notify_all()

    def _take_off(self, key: ExpertKey, hint: object | None) -> Flight[_Request]:
        """Give a new flight a slot and line it up. ExpertError when its extents do not make up an expert."""
        extents = self._model.expert_extents(key.layer, key.expert)
        pieces = place(key, extents, self._layouts[key.layer], self._slots.slot_bytes)
        check = self._verify == "always" or (self._verify == "first" and key not in self._verified)
        flight: Flight[_Request] = Flight(
            key, self._slots.take_slot(), pieces, self._part_bytes, check=check, guess=hint
        )
        self._flights[key] = flight
        self._queue.add(flight)
        return flight

    def _next_job(self) -> Job[_Request] | None:
        """What a thread reads next; without anything else to do, it begins a guess."""
        if self._closed:
            return None
        while self._hints and self._queue.may_guess() and self._begin_guess():
            pass
        return self._queue.next()

    def _read(self, job: Job[_Request]) -> None:
        """Read one part; a flight's last one lands it. Runs in a reading thread."""
        flight, state, buffer = job.flight, job.state, self._slots.buffer(job.flight.slot)
        error: Exception | None = None
        began_ns = time.monotonic_ns()
        try:
            read_part(self._files, job.part, buffer)
        except Exception as found:  # whatever it is, it belongs to the thread that waits for the expert
            error = found
        with self._changed:
            self._counters["read_bytes"] += job.part.nbytes
            self._counters["read_ns"] += time.monotonic_ns() - began_ns
            state.error = state.error or error
            state.parts_left -= 1
            if state.parts_left:
                self._done(job)
                return
        outcome: Fetched | Exception
        began_ns = time.monotonic_ns()
        try:
            outcome = finish_piece(
                self._files, flight.key, state.piece, buffer, check=flight.check, error=state.error
            )
        except Exception as found:
            outcome = found
        with self._changed:
            self._count_piece(state, outcome, time.monotonic_ns() - began_ns)
            if isinstance(outcome, Exception):
                flight.error = flight.error or outcome
            flight.pieces_left -= 1
            if flight.pieces_left:
                self._done(job)
                return
        begin, end = (0, 0)
        if flight.error is None:
            begin, end = join([state.piece for state in flight.pieces], buffer)
        with self._changed:
            if flight.check and flight.error is None:
                self._verified.add(flight.key)
            self._land(flight, begin, end)
            self._done(job)
            self._changed.notify_all()

    def _done(self, job: Job[_Request]) -> None:
        """A thread is through with a part of a flight."""
        if self._queue.done(job):
            self._forget(job.flight)

    def _note_crash(self, error: BaseException) -> None:
        """A reading thread met a mistake of ours in the bookkeeping: let every waiting thread raise it.

        Takes no lock: with the bookkeeping wrong, a late notice is better than a deadlock.
        """
        self._crash = error

    def _land(self, flight: Flight[_Request], begin: int, end: int) -> None:
        """Give an expert that was read, or the error, to everybody who waits for it."""
        del self._flights[flight.key]
        resident = None
        if flight.guess is not None:
            self._guesses -= 1
            if flight.error is None:
                self._slots.settle_ahead(flight.key, flight.slot, begin, end)
            else:  # a request for it will meet the error
                self._slots.give_up(flight.slot)
        elif flight.error is None:
            resident = self._slots.settle(flight.key, flight.slot, begin, end, len(flight.waiters))
        else:
            self._slots.give_up(flight.slot)
        for request in flight.waiters:
            request.in_flight -= 1
            if resident is not None:
                request.ready.append(resident)
            else:
                assert flight.error is not None
                request.tickets += 1
                request.ready.append(_copy_of(flight.error, flight.key))
            if request.closed:
                self._give_back(request)

    # Guesses. All of these are called under the lock, except _take_back.

    def _begin_guess(self) -> bool:
        """Begin the oldest hint that is still of use. False when no room can be made for it now."""
        hint, key = self._hints[0]
        if key in self._slots or key in self._flights:
            self._hints.popleft()
            return True
        if self._guesses == self._prefetch_slots:
            return False
        if self._guesses + self._slots.ahead == self._prefetch_slots:
            self._slots.drop_ahead()
        if not self._slots.has_free:
            return False
        self._hints.popleft()
        try:
            self._take_off(key, hint)
        except K3Error:  # a request for it will meet the error
            return True
        self._guesses += 1
        self._counters["prefetched"] += 1
        return True

    def _promote(self, flight: Flight[_Request]) -> int:
        """Somebody asks for what was a guess. Returns how many parts of it are still to be begun."""
        self._counters["prefetch_hits"] += 1
        self._guesses -= 1
        return self._queue.promote(flight)

    def _take_back(self, hint: object) -> None:
        """Leave what a hint named and nobody asked for. Not under the lock."""
        with self._changed:
            self._hints = deque(pair for pair in self._hints if pair[0] is not hint)
            for flight in [flight for flight in self._flights.values() if flight.guess is hint]:
                if flight.unread and not flight.is_dropped and self._queue.drop(flight):
                    self._forget(flight)

    def _forget(self, flight: Flight[_Request]) -> None:
        """A guess was dropped, and no thread is at it any more."""
        del self._flights[flight.key]
        self._guesses -= 1
        self._slots.give_up(flight.slot)

    # Handing out and giving back

    def take(self, request: _Request) -> Lease:
        """Wait for a stream's next expert. StopIteration after the last one, or its error."""
        # Only this thread takes from what is ready: no need for the lock.
        item = request.ready.popleft() if request.ready and not self._closed else self._next_item(request)
        if isinstance(item, Exception):
            raise item
        payload = item.payload
        on_release: Callable[[], None] = partial(self._release, request, item)
        if self._debug:
            payload, on_release = poisoned_on_release(payload, on_release)
        return Lease(item.key.layer, item.key.expert, payload, on_release)

    def _next_item(self, request: _Request) -> Resident | Exception:
        """Wait for what a stream hands out next. StopIteration after the last."""
        began_ns = time.monotonic_ns()
        with self._changed:
            while self._is_waiting(request):
                if request.in_flight:
                    self._changed.wait(HEARTBEAT_S)
                elif self._tickets:  # the caller holds all that it was admitted with: lend one more
                    self._tickets -= 1
                    request.tickets += 1
                    self._advance(request)
                else:
                    self._wait_for_ticket(began_ns, 1)
            if not request.ready:
                raise StopIteration
            self._counters["wait_ns"] += time.monotonic_ns() - began_ns
            return request.ready.popleft()

    def _is_waiting(self, request: _Request) -> bool:
        """Whether a stream has nothing to hand out yet but will have. ValueError when the source was closed."""
        self._collect()
        self._check_open()
        return not request.closed and not request.ready and bool(request.in_flight or request.unstarted)

    def _release(self, request: _Request, resident: Resident) -> None:
        """A lease comes back: its expert to the cache, its ticket to its stream or to everybody."""
        with self._changed:
            self._slots.let_go(resident)
            if request.unstarted and not request.closed:
                request.tickets += 1
                self._advance(request)
            else:
                self._tickets += 1
            self._changed.notify_all()

    def give_up(self, request: _Request) -> None:
        """Give back what a stream has not handed out."""
        with self._changed:
            self._end(request)

    def _end(self, request: _Request) -> None:
        """No more is wanted of a request. Under the lock."""
        request.closed = True
        self._give_back(request)
        self._changed.notify_all()

    def _collect(self) -> bool:
        """End the requests whose streams were forgotten without being closed; True if there were any.

        Under the lock.
        """
        found = False
        while self.abandoned:
            self._end(self.abandoned.popleft())
            found = True
        return found

    def _give_back(self, request: _Request) -> None:
        """Take from a closed stream everything that was not handed out. Its flights follow when they land.

        Under the lock.
        """
        request.unstarted.clear()
        for item in request.ready:
            if isinstance(item, Resident):
                self._slots.let_go(item)
                request.tickets += 1
        request.ready.clear()
        self._tickets += request.tickets
        request.tickets = 0

    # Counting

    def _count_piece(self, state: PieceState, outcome: Fetched | Exception, finish_ns: int) -> None:
        """A piece is read: once in parts, and once more as a whole if that went wrong."""
        counters, stored_bytes = self._counters, state.piece.extent.stored_bytes
        counters["read_ns"] += finish_ns
        retries = 1
        if isinstance(outcome, Fetched):
            retries = outcome.retries
            counters["checked_bytes"] += outcome.checked_bytes
            counters["unchecked_bytes"] += stored_bytes - outcome.checked_bytes
        counters["reads"] += 1 + retries
        counters["retries"] += retries
        counters["read_bytes"] += retries * stored_bytes


def _copy_of(error: Exception, key: ExpertKey) -> Exception:
    """An error for one more thread to raise: two must not share one traceback."""
    return located(error, key) if isinstance(error, K3Error) else error
