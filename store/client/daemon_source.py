"""`DaemonSource`: experts leased from a k3-store daemon. One per process; any number of threads.

A request's experts are asked for at once, as far as the client's quota goes; more follow as leases come back.
Everything is guarded by one lock; only waiting on the ring, looking for a daemon, and the fallback happen outside
of it.

When the daemon goes, requests wait `reconnect_s` for one to return and lease again what had not arrived; 0 raises
DaemonError at once. With a `fallback`, they read from there at once, and every second the daemon is tried again.

In a forked child asking for anything is a DaemonError, releasing and closing do nothing: leases are the parent's.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3.base.errors import DaemonError
from k3.base.huge_pages import HugePages
from k3.model.identity import ModelIdentity
from k3.store.client.connection import Connection
from k3.store.client.daemon_request import Request
from k3.store.client.dispatch import HEARTBEAT_S, Dispatch
from k3.store.client.file_fallback import StandIn
from k3.store.client.pins import are_settled, first_error
from k3.store.client.ring_session import Session
from k3.store.client.socket_link import Link
from k3.store.protocol.forked import belongs_to_this_process
from k3.store.protocol.ring_layout import Op
from k3.store.request_stream import RequestStream
from k3.store.source import (
    ExpertSource,
    Lease,
    SourceStats,
    checked_request,
    poisoned_on_release,
)

BUSY_RETRY_S = 0.01
RECONNECT_S = 30.0


class DaemonSource:
    """An `ExpertSource` over a daemon's socket. See the module's text."""

    def __init__(
        self,
        path: Path,
        *,
        name: str = "k3",
        link: Link | None = None,
        fallback: Callable[[], ExpertSource] | None = None,
        identity: ModelIdentity | None = None,
        patience_s: float = 60.0,
        reconnect_s: float = RECONNECT_S,
        debug: bool = False,
    ) -> None:
        """Connect, unless `link` is given. DaemonError when no daemon is there, unless there is a fallback.

        `fallback` opens another source of the same experts when it is first needed; it is closed with this one.
        A daemon of another model than `identity` is refused; None: than the first one served.
        """
        self._path = path
        self._stand_in = StandIn(fallback) if fallback is not None else None
        self._debug = debug
        self._changed = threading.Condition(threading.Lock())
        self._daemon = Connection(
            path, name, self._changed,
            reconnect_s=reconnect_s, has_fallback=fallback is not None, identity=identity,
        )  # fmt: skip
        self._dispatch = Dispatch(path, self._changed, self._daemon, patience_s)
        self._daemon.begin(link)
        belongs_to_this_process(self)

    def inherited(self) -> None:
        """Note, in a forked child, that nothing here is its own; and let go of what keeps the leases alive."""
        self._dispatch.is_inherited = True
        session = self._session
        if session is not None:
            session.abandon()

    def lease(self, layer: int, experts: Sequence[int]) -> RequestStream[Request]:
        """See `ExpertSource.lease`. Waits for its turn when other requests hold the quota."""
        request = None
        self._check_process()
        with self._changed:
            self._dispatch.check_open()
            if self._session is None:
                self._dispatch.look_again()
            counts = self._daemon.counts
            if counts is not None:
                request = self._dispatch.begin(layer, checked_request(layer, experts, counts))
        if request is None:  # no daemon was ever there: the fallback knows the model
            request = self._delegated(Request(layer, 0, deque(experts)))
        elif self._session is None and self._stand_in is not None:
            self._delegated(request)
        return RequestStream(self, request, request.ready) if not self._debug else _DebugStream(self, request)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """Ask the daemon to read experts into its cache when it has nothing better to do: a hint, not awaited.

        Returns a function that cancels what has not begun. ValueError and ExpertError as for `lease`. While there
        is no daemon, the fallback is asked instead; without one it does nothing.
        """
        self._check_process()
        with self._changed:
            self._dispatch.check_open()
            session = self._session
            counts = self._daemon.counts
            if counts is not None:
                experts = checked_request(layer, experts, counts)
            if session is not None and not experts:
                return lambda: None
            if session is not None:
                tag = self._dispatch.next_tag()
                session.link.ring.submit(tag, Op.PREFETCH, layer, experts)  # what finds no room is let go
        if session is None:
            return (lambda: None) if self._stand_in is None else self._stand_in.prefetch(layer, experts)

        def cancel() -> None:
            if self._dispatch.is_inherited:
                return
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
        self._check_process()
        with self._changed:
            self._dispatch.check_open()
            self._dispatch.notice_end()  # else what an earlier daemon kept would count
            if self._session is None:
                self._dispatch.look_again()
            if self._daemon.counts is None:
                raise DaemonError("there is no daemon that could keep experts in RAM", path=self._path)
            ids = checked_request(layer, experts, self._daemon.counts)
            mine = self._dispatch.pins.want(layer, ids)
            if self._session is not None:
                self._dispatch.pins.flush(self._session)
            try:
                while not are_settled(mine):
                    self._dispatch.check_open()
                    if self._session is None:
                        self._dispatch.look_again()
                        if self._session is None and self._stand_in is not None:
                            return
                    else:
                        self._dispatch.pump(HEARTBEAT_S)
                failure = first_error(mine)
                if failure is not None:
                    raise failure
            except BaseException:
                self._unpin(layer, ids)
                raise

    def unpin(self, layer: int, experts: Sequence[int]) -> None:
        """Let pinned experts go again; those that are not pinned are passed over. Waits for nothing."""
        self._check_process()
        with self._changed:
            self._dispatch.check_open()
            self._unpin(layer, experts)

    def _unpin(self, layer: int, experts: Sequence[int]) -> None:
        self._dispatch.pins.drop(layer, experts)
        if self._session is not None:
            self._dispatch.pins.flush(self._session)
        self._changed.notify_all()

    def stats(self) -> SourceStats:
        """See `ExpertSource.stats`. What the daemon read for others is not in it; the fallback's reads are."""
        self._check_process()
        with self._changed:
            counts: dict[str, Any] = dict(self._dispatch.counts)
            mine = SourceStats(slots=self._daemon.quota, slot_bytes=self._daemon.slot_bytes, **counts)
        return mine if self._stand_in is None else self._stand_in.added_to(mine)

    def huge_pages(self) -> HugePages:
        """See `ExpertSource.huge_pages`. Those of the fallback; the daemon tells of its own."""
        return HugePages() if self._stand_in is None else self._stand_in.huge_pages()

    def close(self) -> None:
        """See `ExpertSource.close`. In a forked child nothing is left to do."""
        if self._dispatch.is_inherited:
            return
        with self._changed:
            session = self._dispatch.close()
        if session is not None:
            session.close()
        if self._stand_in is not None:
            self._stand_in.close()

    @property
    def is_connected(self) -> bool:
        """Whether a daemon serves at the moment, as far as this source knows."""
        return self._session is not None

    @property
    def reconnects(self) -> int:
        """How often a daemon that had gone came back."""
        return self._daemon.reconnects

    @property
    def _session(self) -> Session | None:
        return self._daemon.session

    def _check_process(self) -> None:
        if self._dispatch.is_inherited:
            raise DaemonError(
                "this connection to k3-store belongs to the process that opened it, and not to its forked child",
                path=self._path,
                advice="Open another one in the child",
            )

    # The fallback. Not under the lock.

    def _delegated(self, request: Request) -> Request:
        """Let the fallback serve what a request has not got yet."""
        assert self._stand_in is not None
        with self._changed:
            missing = list(request.unstarted)
            request.unstarted.clear()
        request.delegate = self._stand_in.lease(request.layer, missing)
        return request

    # Handing out and giving back

    def take(self, request: Request) -> Lease:
        """Wait for a stream's next expert. StopIteration after the last one, or its error."""
        began_ns = time.monotonic_ns()
        self._check_process()
        with self._changed:
            item = self._next_item(request, began_ns)
            self._dispatch.counts["wait_ns"] += time.monotonic_ns() - began_ns
        if item is None:
            if request.unstarted:
                self._delegated(request)
            if request.delegate is None:
                raise StopIteration
            return next(request.delegate)
        if isinstance(item, Exception):
            raise copy.copy(item)  # two threads must not share one traceback
        return item

    def _next_item(self, request: Request, began_ns: int) -> Lease | Exception | None:
        """Return the next expert or error of a request; None when the daemon has nothing (more) for it."""
        while True:
            self._dispatch.collect()
            self._dispatch.check_open()
            if request.ready:
                return request.ready.popleft()
            if request.errors:
                return request.errors.popleft()
            if request.closed or request.delegate is not None:
                return None
            if not request.awaited and not request.unstarted:
                return None
            session = self._session
            if session is None:
                self._dispatch.look_again()
                if self._session is None and self._stand_in is not None:
                    return None
            elif request.awaited:
                self._dispatch.pump(HEARTBEAT_S)
            elif request.tickets:  # asked already, and the daemon could not take it
                if time.monotonic_ns() - (request.busy_since_ns or began_ns) > self._dispatch.patience_s * 1e9:
                    raise self._dispatch.out_of_budget(len(request.unstarted))
                self._changed.wait(BUSY_RETRY_S)
                if not self._dispatch.is_pumping and session is self._session and self._dispatch.drain(session):
                    self._changed.notify_all()  # a daemon whose answers nobody reads takes nothing more
                self._dispatch.advance(request)
            elif session.free:  # the caller holds all that it was admitted with, or the session is new: lend more
                more = min(session.free, len(request.unstarted))
                session.free -= more
                request.tickets += more
                self._dispatch.advance(request)
            else:
                self._dispatch.wait_for_ticket(began_ns, 1)

    def forget(self, request: Request) -> None:
        """End a stream that was dropped, maybe inside the lock: note it for whoever has the lock next."""
        self._dispatch.abandoned.append(request)

    def give_up(self, request: Request) -> None:
        """End a stream: what it has not handed out is given back."""
        if self._dispatch.is_inherited:
            return
        with self._changed:
            self._dispatch.end(request)
        if request.delegate is not None:
            request.delegate.close()


class _DebugStream(RequestStream[Request]):
    """Hands out private copies, poisoned when they are released."""

    def _await_next(self) -> Lease:
        lease = super()._await_next()
        return Lease(lease.layer, lease.expert, *poisoned_on_release(lease.payload, lease.release))
