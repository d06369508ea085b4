"""`Dispatch`: the requests of a `DaemonSource`, their tickets, and the ring that they go through.

Whoever waits first reads the ring for everybody (the *pump*); the others sleep until it hands them something.
There is no thread of its own, so a single-threaded engine pays for no switch.

Every method is called with `changed` held; only the pump lets it go while it waits. Invariants:

* A ticket is the right to one lease of one session. A session (one connection) has as many as its quota; a ticket
  is free, with a request that has not used it, with an expert that is awaited, or with a lease.
* Only the pump reads completions, and only while it has the role is the ring waited on or closed.
* When a session ends, its leases stay readable (the memory is ours and a daemon that ends writes no more) and
  releasing them does nothing; experts that were awaited go back to their requests.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from k3.model.keys import ExpertKey
from k3.store.client.connection import Connection
from k3.store.client.daemon_request import Request
from k3.store.client.pins import Pins
from k3.store.client.ring_session import FULL_RING_S, Session
from k3.store.protocol.native import Completion, Grants
from k3.store.protocol.ring_layout import Op, Source, Status
from k3.store.source import BudgetError

HEARTBEAT_S = 1.0
"""How often a waiting thread looks for what wakes nobody: a forgotten stream."""


class Dispatch:
    """See the module's text. `counts` are those of `SourceStats`."""

    def __init__(self, path: Path, changed: threading.Condition, daemon: Connection, patience_s: float) -> None:
        self.changed = changed
        self.daemon = daemon
        self.pins = Pins()
        self.counts: Counter[str] = Counter()
        self.is_pumping = False
        self.is_inherited = False
        """Set in a forked child, whose calls end before the lock: another thread may have held it."""
        self.abandoned: deque[Request] = deque()
        self.patience_s = patience_s
        self._path = path
        self._requests: dict[int, Request] = {}
        self._tags = 0
        self._admission: deque[object] = deque()
        self._ticket_waiters = 0

    def next_tag(self) -> int:
        """Return a tag that no request had before."""
        self._tags += 1
        return self._tags

    def begin(self, layer: int, experts: Iterable[int]) -> Request:
        """Return a new request, of which as many experts are asked for as it has tickets.

        Waits for its turn. BudgetError as `ExpertSource`.
        """
        request = Request(layer, self.next_tag(), deque(experts))
        self._requests[request.tag] = request
        try:
            request.tickets = self._admit(len(request.unstarted))
            self.advance(request)
        except BaseException:
            self.end(request)
            raise
        return request

    def close(self) -> Session | None:
        """Forget everything, once nobody is in the ring any more; the session is the caller's to close."""
        self.daemon.is_closed = True
        self.changed.notify_all()
        if self.daemon.session is not None:
            self.daemon.session.ring_bell()
        while self.is_pumping or self.daemon.is_searching:
            self.changed.wait()
        for request in self._requests.values():
            request.ready.clear()
        self._requests.clear()
        session, self.daemon.session = self.daemon.session, None
        return session

    def look_again(self) -> None:
        """No daemon: see `Connection.look_again`. `changed` is let go meanwhile."""
        self.daemon.look_again()
        if self.daemon.session is not None:
            self.pins.flush(self.daemon.session)

    def _lose(self, session: Session, reason: str) -> None:
        """End a session: experts that were awaited go back to their requests."""
        assert session is self.daemon.session
        assert not self.is_pumping
        self.daemon.lose(reason)
        for request in list(self._requests.values()):
            request.unstarted.extendleft(request.awaited)
            request.awaited.clear()
            request.tickets = 0
            request.busy_since_ns = None
            if request.closed:
                self._forget(request)
        self.pins.lost()
        self.changed.notify_all()

    # Tickets

    def _admit(self, wanted: int) -> int:
        """Wait for this request's turn and for its tickets, at most the quota; take them. 0 without a session."""
        session = self.daemon.session
        if session is not None and not self._admission and session.free >= wanted and not self.abandoned:
            session.free -= wanted  # nobody is before us
            return wanted
        turn = object()
        self._admission.append(turn)
        began_ns = time.monotonic_ns()
        try:
            while True:
                self.collect()
                self.check_open()
                session = self.daemon.session
                if session is None:
                    return 0
                count = min(wanted, session.quota)
                if self._admission[0] is turn and session.free >= count:
                    session.free -= count
                    return count
                self.wait_for_ticket(began_ns, count)
        finally:
            self._admission.remove(turn)
            self.counts["wait_ns"] += time.monotonic_ns() - began_ns
            if self._admission:
                self.changed.notify_all()

    def wait_for_ticket(self, began_ns: int, count: int) -> None:
        """Wait until something changes; BudgetError when `patience_s` since `began_ns` are over."""
        left_s = self.patience_s - (time.monotonic_ns() - began_ns) / 1e9
        if left_s <= 0:
            raise self.out_of_budget(count)
        self._ticket_waiters += 1
        try:
            self.pump(min(left_s, HEARTBEAT_S))
        finally:
            self._ticket_waiters -= 1

    def out_of_budget(self, count: int) -> BudgetError:
        """Return the error for a request that has waited too long for leases to be given back."""
        session = self.daemon.session
        quota = 0 if session is None else session.quota
        held = quota - (0 if session is None else session.free)
        return BudgetError(
            f"{count} more experts asked for while {held} of a quota of {quota} leases are held "
            f"({self.daemon.slot_bytes} bytes each), for {self.patience_s:g} s",
            path=self._path,
            advice="Give leases back while taking new ones, or give the daemon more cache or fewer --max-clients",
        )

    def _free_ticket(self, session: Session, request: Request) -> None:
        """Give a ticket back: to its request if that can use it, else to all requests."""
        if session is not self.daemon.session:
            return
        if request.unstarted and not request.closed and request.delegate is None:
            request.tickets += 1
            self.advance(request)
            return
        session.free += 1
        if self._ticket_waiters:
            if self.is_pumping:
                session.ring_bell()
            self.changed.notify_all()

    # The ring

    def advance(self, request: Request) -> None:
        """Ask for as much of a request as it has tickets for."""
        session = self.daemon.session
        if session is None or self.daemon.is_closed or not request.tickets or not request.unstarted:
            return
        count = min(request.tickets, len(request.unstarted))
        if count == len(request.unstarted):
            asked = list(request.unstarted)
            request.unstarted.clear()
        else:
            asked = [request.unstarted.popleft() for _ in range(count)]
        request.awaited.update(asked)
        request.tickets -= count
        done = session.lease(request.tag, request.layer, asked)
        if done < count:  # the ring is full just now
            self._ask_later(request, asked[done:])

    def _ask_later(self, request: Request, experts: Sequence[int]) -> None:
        """Ask again soon for experts that the daemon cannot take now, until the request's time is up."""
        request.awaited.difference_update(experts)
        request.unstarted.extend(experts)
        request.tickets += len(experts)
        request.busy_since_ns = request.busy_since_ns or time.monotonic_ns()

    def pump(self, timeout_s: float) -> None:
        """Wait until something arrived for anybody, or something changed, or the time is over."""
        session = self.daemon.session
        if self.is_pumping or session is None:
            self.changed.wait(timeout_s)
            return
        if self.drain(session):
            self.changed.notify_all()
            return
        self.pins.flush(session)
        if not session.flush():
            timeout_s = min(timeout_s, FULL_RING_S)
        self.is_pumping = True
        self.changed.release()
        try:
            session.wait(timeout_s)
        finally:
            self.changed.acquire()
            self.is_pumping = False
            self.changed.notify_all()  # of what is drained here, too: all of it under one hold of the lock
        if not self.drain(session):
            self.notice_end()

    def notice_end(self) -> None:
        """Whoever waits on the ring notices that the session is over; nobody waits for what is not awaited."""
        session = self.daemon.session
        if session is not None and not self.is_pumping:
            reason = session.ended()
            if reason is not None:
                self._lose(session, reason)

    def drain(self, session: Session) -> bool:
        """Hand on completions that are there, as many as are taken at once; whether there was one.

        Others who wait are for the caller to notify.
        """
        granted, others = session.link.ring.take()
        if not granted and not others:
            return False
        for grants in granted:
            self._granted(session, grants)
        for completion in others:
            self._complete(session, completion)
        return True

    def _complete(self, session: Session, completion: Completion) -> None:
        """One answer of the daemon that grants no lease."""
        if session is not self.daemon.session:
            return
        if completion.op == Op.PIN:
            self._pin_answered(session, completion)
        if completion.op != Op.LEASE:
            return
        request = self._requests.get(completion.tag)
        if request is None or completion.expert not in request.awaited:
            raise AssertionError(f"the daemon answered what nobody asked: {completion}")
        request.awaited.remove(completion.expert)
        if completion.status == Status.CLOSING:
            request.awaited.add(completion.expert)
            self._lose(session, "it is closing")
            return
        if completion.status == Status.BUSY and not request.closed:
            self._ask_later(request, [completion.expert])
        else:
            if not request.closed:
                self.counts["misses"] += 1
                request.errors.append(session.error_of(completion, self._path))
            self._free_ticket(session, request)
        if request.closed and not request.awaited:
            self._forget(request)

    def _pin_answered(self, session: Session, completion: Completion) -> None:
        if completion.status == Status.CLOSING:
            self._lose(session, "it is closing")
            return
        key = ExpertKey(completion.layer, completion.expert)
        is_held = completion.status == Status.OK
        error = None if is_held else session.error_of(completion, self._path)
        self.pins.answered(completion.tag, key, error)
        self.pins.flush(session)

    def _granted(self, session: Session, grants: Grants) -> None:
        """Leases of one request: to it, or back if nobody wants them any more."""
        request = self._requests.get(grants.tag)
        if request is None or (
            request.closed and not request.awaited.issuperset(expert for expert, _, _ in grants.slots())
        ):
            raise AssertionError(
                f"the daemon granted what nobody asked for with tag {grants.tag}: {grants.slots()}"
            )
        if request.closed:
            for expert, slot, generation in grants.slots():
                request.awaited.discard(expert)
                session.release(slot, generation)
                self._free_ticket(session, request)
            session.flush()
            if not request.awaited:
                self._forget(request)
            return
        request.busy_since_ns = None
        request.ready.extend(
            grants.lend(request.awaited, session.views, session.view, self.release, request, session)
        )
        count, source, leases = self.counts, grants.source, len(grants)
        if source == Source.ARENA:
            count["hits"] += leases
        elif source == Source.JOINED:
            count["joined"] += leases
        else:
            count["misses"] += leases
            count["reads"] += leases
            count["read_bytes"] += grants.payload_bytes

    def release(self, request: Request, session: Session, slot: int, generation: int) -> None:
        """Give a lease back: its slot to the daemon, its ticket to its request or to all requests."""
        if self.is_inherited:
            return
        with self.changed:
            if session is self.daemon.session:
                session.release(slot, generation)
                self._free_ticket(session, request)
                if session.free == session.quota:  # nothing is held or awaited: do not sit on what came back
                    session.flush()

    def end(self, request: Request) -> None:
        """No more is wanted of a request; what is awaited is given back when it comes."""
        if request.closed:
            return
        request.closed = True
        request.unstarted.clear()
        session = self.daemon.session
        while request.ready:
            _, lender, slot, generation = request.ready.popleft().withdraw()
            if lender is session and session is not None:
                session.release(slot, generation)
                self._free_ticket(session, request)
        request.errors.clear()
        while request.tickets and session is not None:
            request.tickets -= 1
            self._free_ticket(session, request)
        if not request.awaited:
            self._forget(request)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.tag, None)
        if not self._requests and self.daemon.session is not None:
            self.daemon.session.flush()

    def collect(self) -> None:
        """End the requests whose streams were forgotten without being closed."""
        while self.abandoned:
            self.end(self.abandoned.popleft())

    def check_open(self) -> None:
        """ValueError once the source is closed."""
        if self.daemon.is_closed:
            raise ValueError("the source was closed")
