"""`FileSource`: experts from files, without a daemon. The source that an engine uses by default.

Owns the buffers (slots), the cache over them, the open files and a pool of reading threads. Everything below
is guarded by one lock, held only for bookkeeping; reads, digests and moves run outside of it.

A slot is free, being read (in a flight), held by leases, or kept by the cache. Invariants:

* A slot that is being read belongs to its flight until every piece of it has ended, also after an error or
  when nobody wants the expert any more, so no late read can land in somebody else's expert.
* Only a slot whose pieces were all read, and checked where that was asked for, is ever held or kept.
* Two requests for one expert share one flight, and one slot.
* A ticket is the right to hold one expert. There are as many tickets as slots, and whoever reads or holds has
  one, so a read that has a ticket always finds a slot that is free or only kept.

A request is admitted with tickets for all of its experts, or for `working_slots` of them; more reads start as
leases come back. A caller that holds them all and asks for more is lent tickets at the cost of the cache, and
gets a BudgetError when `patience_s` pass without one. Requests are admitted in the order they came.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from k3.container.errors import K3Error
from k3.container.keys import ExpertKey
from k3.container.source import ModelSource
from k3.store.fetch import ATTEMPTS, Fetched, Piece, buffer_bytes, join, located, place, read_piece
from k3.store.handles import OpenFile, OpenFiles, default_open_files, open_file
from k3.store.request_stream import RequestStream
from k3.store.slots import Resident, SlotTable
from k3.store.source import BudgetError, Lease, SourceStats, checked_request, poisoned_on_release

Verify = Literal["always", "first", "never"]

WORKING_SLOTS = 32
"""Experts that can be held without any cache: two layers of the 16 that a token of the real model picks."""

DEFAULT_THREADS = 8
"""Reads in flight: bench/io_engines.py shows what a drive gains from more."""

HEARTBEAT_S = 1.0
"""How often a waiting thread looks for what wakes nobody: a forgotten stream, a crashed reading thread."""


@dataclass(slots=True)
class _Flight:
    """An expert being read into a slot, and the requests that wait for it."""

    key: ExpertKey
    slot: int
    pieces: tuple[Piece, ...]
    pieces_left: int
    waiters: list[_Request]
    error: Exception | None = None


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
    largest expert of the model plus a few pages. `verify` says which reads are compared with their digests:
    all, the first of each expert, or none. `max_open_files` None means a quarter of what the process may have.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        cache_bytes: int = 0,
        working_slots: int = WORKING_SLOTS,
        direct: bool = True,
        verify: Verify = "always",
        threads: int = DEFAULT_THREADS,
        max_open_files: int | None = None,
        patience_s: float = 60.0,
        debug: bool = False,
        opener: OpenFile = open_file,
    ) -> None:
        if cache_bytes < 0 or working_slots < 1 or threads < 1:
            raise ValueError(f"{cache_bytes=}, {working_slots=}, {threads=} make no source")
        if verify not in ("always", "first", "never"):
            raise ValueError(f"verify must be always, first or never, not {verify!r}")
        self._model = model
        self._verify = verify
        self._patience_s = patience_s
        self._debug = debug
        self._layouts = {layer: model.expert_layout(layer) for layer in model.expert_layers()}
        self._counts = {layer: model.expert_count(layer) for layer in self._layouts}
        slot_bytes = max(map(buffer_bytes, self._layouts.values()), default=1)
        self._slots = SlotTable(slot_bytes, working_slots, cache_bytes // slot_bytes, self._counts, debug=debug)
        self._working_slots = working_slots
        self._tickets = len(self._slots)
        self._flights: dict[ExpertKey, _Flight] = {}
        self._verified: set[ExpertKey] = set()
        self._admission: deque[object] = deque()
        self.abandoned: deque[_Request] = deque()
        self._files = OpenFiles(max_open_files or default_open_files(), direct=direct, opener=opener)
        self._changed = threading.Condition(threading.Lock())
        self._counters = SourceStats(slots=len(self._slots), slot_bytes=slot_bytes)
        self._closed = False
        self._crash: BaseException | None = None
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="k3-store")

    def lease(self, layer: int, experts: Sequence[int]) -> RequestStream[_Request]:
        """See `ExpertSource.lease`. Waits for its turn when other requests hold the slots."""
        ids = checked_request(layer, experts, self._counts)
        keys = deque(ExpertKey(layer, expert) for expert in ids)
        request = _Request(keys)
        with self._changed:
            request.tickets = self._admit(min(len(ids), self._working_slots))
            self._advance(request)
        return RequestStream(self, request)

    def stats(self) -> SourceStats:
        """See `ExpertSource.stats`."""
        with self._changed:
            return replace(
                self._counters,
                evictions=self._slots.evictions,
                open_files=len(self._files),
                direct=self._files.direct(),
            )

    def close(self) -> None:
        """See `ExpertSource.close`. Waits for the reads that are in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)
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
            self._count(wait_ns=time.monotonic_ns() - began_ns)
            self._changed.notify_all()
        return count

    def _wait_for_ticket(self, began_ns: int, count: int) -> None:
        """Wait until something changes; BudgetError when `patience_s` since `began_ns` are over."""
        self._collect()
        self._check_open()
        left_s = self._patience_s - (time.monotonic_ns() - began_ns) / 1e9
        if left_s <= 0:
            total = len(self._slots)
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

    # Reading. All of these are called under the lock, except _run.

    def _advance(self, request: _Request) -> None:
        """Start as much of a stream as it has tickets for."""
        while request.unstarted and request.tickets and not self._closed:
            key = request.unstarted.popleft()
            resident, flight = self._slots.hold(key), self._flights.get(key)
            if resident is not None:
                request.ready.append(resident)
                self._count(hits=1)
            elif flight is not None:
                flight.waiters.append(request)
                request.in_flight += 1
                self._count(joined=1)
            else:
                try:
                    self._take_off(key, request)
                except K3Error as error:
                    request.unstarted.clear()
                    request.ready.append(error)
                    break
                request.in_flight += 1
                self._count(misses=1)
            request.tickets -= 1
        self._changed.notify_all()

    def _take_off(self, key: ExpertKey, request: _Request) -> None:
        """Give a new flight a slot and its pieces to the reading threads."""
        extents = self._model.expert_extents(key.layer, key.expert)
        pieces = place(key, extents, self._layouts[key.layer], self._slots.slot_bytes)
        flight = _Flight(key, self._slots.take_slot(), pieces, len(pieces), [request])
        self._flights[key] = flight
        check = self._verify == "always" or (self._verify == "first" and key not in self._verified)
        for piece in pieces:
            self._pool.submit(self._run, flight, piece, check).add_done_callback(self._note_crash)

    def _run(self, flight: _Flight, piece: Piece, check: bool) -> None:
        """Read one piece; the flight's last one lands it. Runs in a reading thread."""
        buffer = self._slots.buffer(flight.slot)
        outcome: Fetched | Exception
        began_ns = time.monotonic_ns()
        try:
            outcome = read_piece(self._files, flight.key, piece, buffer, check=check)
        except Exception as error:  # whatever it is, it belongs to the thread that waits for the expert
            outcome = error
        read_ns = time.monotonic_ns() - began_ns
        with self._changed:
            self._count_piece(piece, outcome, read_ns)
            if isinstance(outcome, Exception):
                flight.error = flight.error or outcome
            flight.pieces_left -= 1
            if flight.pieces_left:
                return
        begin, end = join(flight.pieces, buffer) if flight.error is None else (0, 0)
        with self._changed:
            if check and flight.error is None:
                self._verified.add(flight.key)
            self._land(flight, begin, end)
            self._changed.notify_all()

    def _note_crash(self, future: Future[None]) -> None:
        """A reading thread met a mistake of ours in the bookkeeping: let every waiting thread raise it.

        Takes no lock: with the bookkeeping wrong, a late notice is better than a deadlock.
        """
        if not future.cancelled():
            self._crash = future.exception() or self._crash

    def _land(self, flight: _Flight, begin: int, end: int) -> None:
        """Give an expert that was read, or the error, to everybody who waits for it."""
        del self._flights[flight.key]
        resident = None
        if flight.error is None:
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

    # Handing out and giving back

    def take(self, request: _Request) -> Lease:
        """Wait for a stream's next expert. StopIteration after the last one, or its error."""
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
            item = request.ready.popleft()
            self._count(wait_ns=time.monotonic_ns() - began_ns)
        if isinstance(item, Exception):
            raise item
        payload = item.payload
        on_release: Callable[[], None] = partial(self._release, request, item)
        if self._debug:
            payload, on_release = poisoned_on_release(payload, on_release)
        return Lease(item.key.layer, item.key.expert, payload, on_release)

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

    def _collect(self) -> None:
        """End the requests whose streams were forgotten without being closed. Under the lock."""
        while self.abandoned:
            self._end(self.abandoned.popleft())

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

    def _count(self, **more: int) -> None:
        now = self._counters
        self._counters = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})

    def _count_piece(self, piece: Piece, outcome: Fetched | Exception, read_ns: int) -> None:
        stored_bytes = piece.extent.stored_bytes
        if isinstance(outcome, Fetched):
            self._count(
                reads=outcome.reads,
                retries=outcome.reads - 1,
                read_bytes=outcome.read_bytes,
                read_ns=read_ns,
                checked_bytes=outcome.checked_bytes,
                unchecked_bytes=stored_bytes - outcome.checked_bytes,
            )
        else:
            self._count(reads=ATTEMPTS, retries=ATTEMPTS - 1, read_bytes=ATTEMPTS * stored_bytes, read_ns=read_ns)


def _copy_of(error: Exception, key: ExpertKey) -> Exception:
    """An error for one more thread to raise: two must not share one traceback."""
    return located(error, key) if isinstance(error, K3Error) else error
