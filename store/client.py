"""`DaemonSource`: experts leased from a k3-store daemon. One per process; any number of threads.

A request's experts are asked for at once, as far as the client's quota goes; more follow as leases come back.
Whoever waits first reads the ring for everybody (the *pump*); the others sleep until it hands them something.
There is no thread of its own, so a single-threaded engine pays for no switch.

Everything is guarded by one lock; only waiting on the ring, looking for a daemon, and the fallback happen outside
of it. Invariants:

* A ticket is the right to one lease of one session. A session (one connection) has as many as its quota; a ticket
  is free, with a request that has not used it, with an expert that is awaited, or with a lease.
* Only the pump reads completions, and only while it has the role is the ring waited on or closed.
* When a session ends, its leases stay readable (the memory is ours and a daemon that ends writes no more) and
  releasing them does nothing; experts that were awaited go back to their requests.

When the daemon goes, requests wait `reconnect_s` for one to return and lease again what had not arrived; 0 raises
DaemonError at once. With a `fallback`, they read from there at once, and every RETURN_S the daemon is tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from k3.container.errors import DaemonError, K3Error, WireError
from k3.container.keys import ExpertKey
from k3.store.link import Link
from k3.store.native import Completion
from k3.store.pins import Pins, are_settled, first_error
from k3.store.ring_layout import Op, Source, Status
from k3.store.session import FULL_RING_S, Session
from k3.store.source import (
    BudgetError,
    ExpertSource,
    Lease,
    LeaseStream,
    Payload,
    SourceStats,
    checked_request,
    poisoned_on_release,
)

HEARTBEAT_S = 1.0
"""How often a waiting thread looks for what wakes nobody: a forgotten stream."""

BUSY_RETRY_S = 0.01
RETURN_S = 1.0
RECONNECT_S = 30.0
_POLL_MAX = 256

_log = logging.getLogger("k3.store")


@dataclass(eq=False, slots=True)
class _Arrived:
    """An expert that is leased and waits to be handed out."""

    session: Session
    expert: int
    slot: int
    generation: int
    payload: Payload


@dataclass(eq=False, slots=True)
class _Request:
    """What one stream has still to come. `delegate` is the fallback's stream, once it took over."""

    layer: int
    tag: int
    unstarted: deque[int]
    awaited: set[int] = field(default_factory=set)
    ready: deque[_Arrived | Exception] = field(default_factory=deque)
    tickets: int = 0
    busy_since_ns: int | None = None
    closed: bool = False
    delegate: LeaseStream | None = None


class DaemonSource:
    """An `ExpertSource` over a daemon's socket. See the module's text."""

    def __init__(
        self,
        path: Path,
        *,
        name: str = "k3",
        link: Link | None = None,
        fallback: Callable[[], ExpertSource] | None = None,
        patience_s: float = 60.0,
        reconnect_s: float = RECONNECT_S,
        debug: bool = False,
    ) -> None:
        """Connect, unless `link` is given. DaemonError when no daemon is there, unless there is a fallback.

        `fallback` opens another source of the same experts when it is first needed; it is closed with this one.
        """
        self._path = path
        self._name = name
        self._open_fallback = fallback
        self._fallback: ExpertSource | None = None
        self._patience_s = patience_s
        self._reconnect_s = reconnect_s
        self._debug = debug
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._opening = threading.Lock()
        self._session: Session | None = None
        self._container: str | None = None
        self._counts: dict[int, int] | None = None
        self._requests: dict[int, _Request] = {}
        self._pins = Pins()
        self._tags = 0
        self._admission: deque[object] = deque()
        self._abandoned: deque[_Request] = deque()
        self._pumping = self._searching = self._closed = False
        self._ticket_waiters = 0
        self._counts_of: Counter[str] = Counter()
        self._slot_bytes = 0
        self._quota = 0
        self._lost_because = ""
        self._lost_at_s = self._tried_at_s = time.monotonic()
        self._fatal: DaemonError | None = None
        self.reconnects = 0
        try:
            self._welcome(link or Link.open(path, name))
        except DaemonError as error:
            if fallback is None:
                raise
            self._lost_because = error.problem

    def lease(self, layer: int, experts: Sequence[int]) -> DaemonStream:
        """See `ExpertSource.lease`. Waits for its turn when other requests hold the quota."""
        with self._changed:
            self._check_open()
            if self._session is None:
                self._look_again()
            counts = self._counts
        if counts is None:  # no daemon was ever there: the fallback knows the model
            return DaemonStream(self, self._delegated(_Request(layer, 0, deque(experts))))
        request = _Request(layer, 0, deque(checked_request(layer, experts, counts)))
        with self._changed:
            self._tags += 1
            request.tag = self._tags
            self._requests[request.tag] = request
            try:
                request.tickets = self._admit(len(request.unstarted))
                self._advance(request)
            except BaseException:
                self._end(request)
                raise
        if self._session is None and self._open_fallback is not None:
            self._delegated(request)
        return DaemonStream(self, request)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """Ask the daemon to read experts into its cache when it has nothing better to do: a hint, not awaited.

        Returns a function that cancels what has not begun. ValueError and ExpertError as for `lease`. Without a
        daemon it does nothing.
        """
        with self._changed:
            self._check_open()
            session = self._session
            if session is None or self._counts is None:
                return lambda: None
            ids = checked_request(layer, experts, self._counts)
            self._tags += 1
            tag = self._tags
            session.link.ring.submit(tag, Op.PREFETCH, layer, ids)  # what finds no room in the ring is let go

        def cancel() -> None:
            with self._changed:
                if session is self._session:
                    session.link.ring.submit(tag, Op.CANCEL, 0, [0])

        return cancel

    def pin(self, layer: int, experts: Sequence[int]) -> None:
        """Keep experts in the daemon's RAM until `unpin` or `close`; returns when all of them are there.

        A daemon that comes back is asked for them again as soon as anything is asked of it; one that cannot pin
        them any more is told of in the log. While the fallback stands in, nothing is awaited. All or nothing:
        BudgetError when pins have used up their share of the slots, DriveError and DamageError as for a lease;
        ValueError and ExpertError as for `lease`. DaemonError without a daemon, and when none was ever there.
        """
        with self._changed:
            self._check_open()
            if self._session is None:
                self._look_again()
            if self._counts is None:
                raise DaemonError("there is no daemon that could keep experts in RAM", path=self._path)
            ids = checked_request(layer, experts, self._counts)
            mine = self._pins.want(layer, ids)
            if self._session is not None:
                self._pins.flush(self._session)
            try:
                while not are_settled(mine):
                    self._check_open()
                    if self._session is None:
                        self._look_again()
                        if self._session is None and self._open_fallback is not None:
                            return
                    else:
                        self._pump(HEARTBEAT_S)
                failure = first_error(mine)
                if failure is not None:
                    raise failure
            except BaseException:
                self._unpin(layer, ids)
                raise

    def unpin(self, layer: int, experts: Sequence[int]) -> None:
        """Let pinned experts go again; those that are not pinned are passed over. Waits for nothing."""
        with self._changed:
            self._check_open()
            self._unpin(layer, experts)

    def _unpin(self, layer: int, experts: Sequence[int]) -> None:
        self._pins.drop(layer, experts)
        if self._session is not None:
            self._pins.flush(self._session)
        self._changed.notify_all()

    def stats(self) -> SourceStats:
        """See `ExpertSource.stats`. What the daemon read for others is not in it; the fallback's reads are."""
        with self._changed:
            counts: dict[str, Any] = dict(self._counts_of)
            mine = SourceStats(slots=self._quota, slot_bytes=self._slot_bytes, **counts)
            other = self._fallback
        if other is None:
            return mine
        more = other.stats()
        sums = {
            item.name: getattr(mine, item.name) + getattr(more, item.name)
            for item in fields(SourceStats)
            if item.name not in ("slots", "slot_bytes", "direct")
        }
        return replace(mine, **sums, direct=more.direct)

    def close(self) -> None:
        """See `ExpertSource.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._session is not None:
                self._session.ring_bell()
            while self._pumping or self._searching:
                self._changed.wait()
            session, self._session = self._session, None
            self._requests.clear()
            fallback = self._fallback
        if session is not None:
            session.close()
        if fallback is not None:
            fallback.close()

    @property
    def is_connected(self) -> bool:
        """Whether a daemon serves at the moment, as far as this source knows."""
        return self._session is not None

    # Sessions. Under the lock, except where it says otherwise.

    def _welcome(self, link: Link) -> None:
        """Begin a session. DaemonError when the daemon serves another model than before."""
        try:
            if self._container not in (None, link.welcome.container):
                self._fatal = DaemonError(
                    f"k3-store came back with container {link.welcome.container} instead of {self._container}",
                    path=self._path,
                    advice="Start this program again",
                )
                raise self._fatal
            if self._counts is None:
                layers = link.descriptor().layers
                self._counts = {number: layer.experts for number, layer in layers.items()}
            files = link.descriptor().files
        except BaseException:
            link.close()
            raise
        self._container = link.welcome.container
        self._session = Session(link, files)
        self._quota, self._slot_bytes = link.welcome.quota, link.welcome.slot_bytes
        self._pins.flush(self._session)

    def _lose(self, session: Session, reason: str) -> None:
        """The session is over: experts that were awaited go back to their requests."""
        assert session is self._session
        assert not self._pumping
        self._session = None
        self._lost_because = reason
        self._lost_at_s = self._tried_at_s = time.monotonic()
        for request in list(self._requests.values()):
            request.unstarted.extendleft(request.awaited)
            request.awaited.clear()
            request.tickets = 0
            request.busy_since_ns = None
            if request.closed:
                self._forget(request)
        self._pins.lost()
        session.close()
        if self._open_fallback is not None and not self._closed:
            _log.warning("k3-store went away (%s): reading from the files meanwhile", reason)
        self._changed.notify_all()

    def _look_again(self) -> None:
        """No daemon: wait for one, or with a fallback just look from time to time. DaemonError in the end."""
        if self._fatal is not None:
            raise _again(self._fatal)
        if self._searching:
            self._changed.wait(HEARTBEAT_S)
            return
        now_s = time.monotonic()
        if self._open_fallback is not None:
            if now_s - self._tried_at_s >= RETURN_S:
                self._tried_at_s = now_s
                self._search(0.0)
            return
        self._search(max(0.0, self._lost_at_s + self._reconnect_s - now_s) if self._reconnect_s else 0.0)
        if self._session is None and not self._closed:
            raise self._fatal or DaemonError(
                f"k3-store went away ({self._lost_because}) and was not back within {self._reconnect_s:g} s",
                path=self._path,
                advice="Start it again; or use --fallback file to read from the drives meanwhile",
            )

    def _search(self, patience_s: float) -> None:
        """Try to connect until it works or patience ends; at least once. The lock is let go meanwhile."""
        self._searching = True
        self._lock.release()
        link = None
        try:
            link = self._first_link(time.monotonic() + patience_s)
        finally:
            self._lock.acquire()
            self._searching = False
            self._changed.notify_all()
        if link is None:
            return
        if self._closed:
            link.close()
            return
        self._welcome(link)
        self.reconnects += 1
        if self._open_fallback is not None:
            _log.warning("k3-store is back")

    def _first_link(self, deadline_s: float) -> Link | None:
        """A link as soon as one can be had. Not under the lock."""
        pause_s = 0.01
        while not self._closed:
            try:
                return Link.open(self._path, self._name, timeout_s=max(1.0, deadline_s - time.monotonic()))
            except WireError:
                raise
            except DaemonError:
                if time.monotonic() + pause_s > deadline_s:
                    return None
            time.sleep(pause_s)
            pause_s = min(0.2, pause_s * 2)
        return None

    # The fallback. Not under the lock.

    def _delegated(self, request: _Request) -> _Request:
        """Let the fallback serve what a request has not got yet."""
        assert self._open_fallback is not None
        with self._opening:
            if self._fallback is None:
                self._fallback = self._open_fallback()
        with self._changed:
            missing = list(request.unstarted)
            request.unstarted.clear()
        request.delegate = self._fallback.lease(request.layer, missing)
        return request

    # Tickets. Under the lock.

    def _admit(self, wanted: int) -> int:
        """Wait for this request's turn and for its tickets, at most the quota; take them. 0 without a session."""
        turn = object()
        self._admission.append(turn)
        began_ns = time.monotonic_ns()
        try:
            while True:
                self._collect()
                self._check_open()
                session = self._session
                if session is None:
                    return 0
                count = min(wanted, session.quota)
                if self._admission[0] is turn and session.free >= count:
                    session.free -= count
                    return count
                self._wait_for_ticket(began_ns, count)
        finally:
            self._admission.remove(turn)
            self._counts_of["wait_ns"] += time.monotonic_ns() - began_ns
            if self._admission:
                self._changed.notify_all()

    def _wait_for_ticket(self, began_ns: int, count: int) -> None:
        """Wait until something changes; BudgetError when `patience_s` since `began_ns` are over."""
        left_s = self._patience_s - (time.monotonic_ns() - began_ns) / 1e9
        if left_s <= 0:
            raise self._out_of_budget(count)
        self._ticket_waiters += 1
        try:
            self._pump(min(left_s, HEARTBEAT_S))
        finally:
            self._ticket_waiters -= 1

    def _out_of_budget(self, count: int) -> BudgetError:
        session = self._session
        quota = 0 if session is None else session.quota
        held = quota - (0 if session is None else session.free)
        return BudgetError(
            f"{count} more experts asked for while {held} of a quota of {quota} leases are held "
            f"({self._slot_bytes} bytes each), for {self._patience_s:g} s",
            path=self._path,
            advice="Give leases back while taking new ones, or give the daemon more cache or fewer --max-clients",
        )

    def _free_ticket(self, session: Session, request: _Request) -> None:
        """A ticket comes back: to its request if that can use it, else to everybody."""
        if session is not self._session:
            return
        if request.unstarted and not request.closed and request.delegate is None:
            request.tickets += 1
            self._advance(request)
            return
        session.free += 1
        if self._ticket_waiters:
            if self._pumping:
                session.ring_bell()
            self._changed.notify_all()

    # The ring. Under the lock, except while the pump waits.

    def _advance(self, request: _Request) -> None:
        """Ask for as much of a request as it has tickets for."""
        session = self._session
        if session is None or self._closed or not request.tickets or not request.unstarted:
            return
        count = min(request.tickets, len(request.unstarted))
        asked = [request.unstarted.popleft() for _ in range(count)]
        request.awaited.update(asked)
        request.tickets -= count
        done = session.lease(request.tag, request.layer, asked)
        if done < count:  # the ring is full just now
            self._ask_later(request, asked[done:])

    def _ask_later(self, request: _Request, experts: Sequence[int]) -> None:
        """The daemon cannot take these now: try again soon, for as long as patience lasts."""
        request.awaited.difference_update(experts)
        request.unstarted.extend(experts)
        request.tickets += len(experts)
        request.busy_since_ns = request.busy_since_ns or time.monotonic_ns()

    def _pump(self, timeout_s: float) -> None:
        """Wait until something arrived for anybody, or something changed, or the time is over."""
        session = self._session
        if self._pumping or session is None:
            self._changed.wait(timeout_s)
            return
        if self._drain(session):
            return
        self._pins.flush(session)
        if not session.flush():
            timeout_s = min(timeout_s, FULL_RING_S)
        self._pumping = True
        self._lock.release()
        try:
            session.wait(timeout_s)
        finally:
            self._lock.acquire()
            self._pumping = False
            self._changed.notify_all()
        if not self._drain(session) and session is self._session:
            reason = session.ended()
            if reason is not None:
                self._lose(session, reason)

    def _drain(self, session: Session) -> bool:
        """Hand on every completion that is there; whether there was one."""
        found = False
        while session is self._session:
            completions = session.link.ring.poll(_POLL_MAX)
            if not completions:
                break
            found = True
            for completion in completions:
                self._complete(session, completion)
        if found:
            self._changed.notify_all()
        return found

    def _complete(self, session: Session, completion: Completion) -> None:
        """One answer of the daemon: to its request, or back if nobody wants it any more."""
        if session is not self._session:
            return
        if completion.op == Op.PIN:
            self._pin_answered(session, completion)
        if completion.op != Op.LEASE:
            return
        request = self._requests.get(completion.tag)
        if request is None or completion.expert not in request.awaited:
            raise AssertionError(f"the daemon answered what nobody asked: {completion}")
        request.awaited.remove(completion.expert)
        if completion.status == Status.OK:
            self._granted(session, request, completion)
        elif completion.status == Status.CLOSING:
            request.awaited.add(completion.expert)
            self._lose(session, "it is closing")
            return
        elif completion.status == Status.BUSY and not request.closed:
            self._ask_later(request, [completion.expert])
        else:
            if not request.closed:
                self._counts_of["misses"] += 1
                request.ready.append(session.error_of(completion, self._path))
            self._free_ticket(session, request)
        if request.closed and not request.awaited:
            self._forget(request)

    def _pin_answered(self, session: Session, completion: Completion) -> None:
        if completion.status == Status.CLOSING:
            self._lose(session, "it is closing")
            return
        key = ExpertKey(completion.layer, completion.expert)
        error: K3Error | None = None
        if completion.status == Status.BUSY:
            error = BudgetError(
                "no more experts can be pinned: pins have used up their share of the slots",
                path=self._path, layer=key.layer, expert=key.expert,
                advice="Unpin others, or give the daemon more cache or fewer --max-clients",
            )  # fmt: skip
        elif completion.status != Status.OK:
            error = session.error_of(completion, self._path)
        self._pins.answered(completion.tag, key, error)
        self._pins.flush(session)

    def _granted(self, session: Session, request: _Request, completion: Completion) -> None:
        request.busy_since_ns = None
        if request.closed:
            session.release(completion.slot, completion.generation, now=True)
            self._free_ticket(session, request)
            return
        payload = session.payload(completion)
        arrived = _Arrived(session, completion.expert, completion.slot, completion.generation, payload)
        request.ready.append(arrived)
        if completion.source == Source.ARENA:
            self._counts_of["hits"] += 1
        elif completion.source == Source.JOINED:
            self._counts_of["joined"] += 1
        else:
            self._counts_of["misses"] += 1
            self._counts_of["reads"] += 1
            self._counts_of["read_bytes"] += payload.size

    # Handing out and giving back

    def _take(self, request: _Request) -> Lease:
        """Wait for a stream's next expert. StopIteration after the last one, or its error."""
        item: _Arrived | Exception | None
        if request.ready and not self._closed:  # only this thread takes from it
            item = request.ready.popleft()
        else:
            began_ns = time.monotonic_ns()
            with self._changed:
                item = self._next_item(request, began_ns)
                self._counts_of["wait_ns"] += time.monotonic_ns() - began_ns
        if item is None:
            if request.unstarted:
                self._delegated(request)
            if request.delegate is None:
                raise StopIteration
            return next(request.delegate)
        if isinstance(item, Exception):
            raise item
        payload = item.payload
        on_release: Callable[[], None] = partial(self._release, request, item)
        if self._debug:
            payload, on_release = poisoned_on_release(payload, on_release)
        return Lease(request.layer, item.expert, payload, on_release)

    def _next_item(self, request: _Request, began_ns: int) -> _Arrived | Exception | None:
        """The next expert or error of a request; None when the daemon has nothing (more) for it."""
        while True:
            self._collect()
            self._check_open()
            if request.ready:
                return request.ready.popleft()
            if request.closed or request.delegate is not None:
                return None
            if not request.awaited and not request.unstarted:
                return None
            session = self._session
            if session is None:
                self._look_again()
                if self._session is None and self._open_fallback is not None:
                    return None
            elif request.awaited:
                self._pump(HEARTBEAT_S)
            elif request.tickets:  # asked already, and the daemon could not take it
                if time.monotonic_ns() - (request.busy_since_ns or began_ns) > self._patience_s * 1e9:
                    raise self._out_of_budget(len(request.unstarted))
                self._changed.wait(BUSY_RETRY_S)
                if not self._pumping and session is self._session:
                    self._drain(session)  # a daemon whose answers nobody reads takes nothing more
                self._advance(request)
            elif session.free:  # the caller holds all that it was admitted with, or the session is new: lend more
                more = min(session.free, len(request.unstarted))
                session.free -= more
                request.tickets += more
                self._advance(request)
            else:
                self._wait_for_ticket(began_ns, 1)

    def _release(self, request: _Request, item: _Arrived) -> None:
        """A lease comes back: its slot to the daemon, its ticket to its stream or to everybody."""
        with self._changed:
            if item.session is self._session:
                item.session.release(item.slot, item.generation, now=not self._requests)
                self._free_ticket(item.session, request)

    def _close(self, request: _Request) -> None:
        with self._changed:
            self._end(request)
        if request.delegate is not None:
            request.delegate.close()

    def _end(self, request: _Request) -> None:
        """No more is wanted of a request; what is awaited is given back when it comes. Under the lock."""
        if request.closed:
            return
        request.closed = True
        request.unstarted.clear()
        session = self._session
        for item in request.ready:
            if isinstance(item, _Arrived) and item.session is session and session is not None:
                session.release(item.slot, item.generation, now=False)
                self._free_ticket(session, request)
        request.ready.clear()
        while request.tickets and session is not None:
            request.tickets -= 1
            self._free_ticket(session, request)
        if not request.awaited:
            self._forget(request)

    def _forget(self, request: _Request) -> None:
        self._requests.pop(request.tag, None)
        if not self._requests and self._session is not None:
            self._session.flush()

    def _collect(self) -> None:
        """End the requests whose streams were forgotten without being closed. Under the lock."""
        while self._abandoned:
            self._end(self._abandoned.popleft())

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the source was closed")


class DaemonStream:
    """The leases of one request of a `DaemonSource`, as they arrive. Leaving a with block closes it."""

    def __init__(self, source: DaemonSource, request: _Request) -> None:
        self._source = source
        self._request = request

    def __iter__(self) -> Iterator[Lease]:
        return self

    def __next__(self) -> Lease:
        try:
            return self._source._take(self._request)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `LeaseStream.close`."""
        self._source._close(self._request)

    def __enter__(self) -> DaemonStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # May run anywhere, also inside the source's lock: only leave a note.
        self._source._abandoned.append(self._request)


def _again(error: DaemonError) -> DaemonError:
    """An error for one more thread to raise: two must not share one traceback."""
    return DaemonError(error.problem, path=error.path, advice=error.advice)
