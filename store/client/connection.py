"""`Connection`: the session that a `DaemonSource` has at the moment, and the way from one to the next.

Guarded by the condition that it is made with, which is let go while a daemon is looked for. One thread at a time
looks; the others wait until it is done.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from k3.base.errors import DaemonError
from k3.model.identity import ModelIdentity
from k3.store.client.ring_session import Session
from k3.store.client.socket_link import Link

RETURN_S = 1.0
"""How often a source with a fallback looks whether the daemon is back."""

_SEARCH_WAIT_S = 1.0

_log = logging.getLogger("k3.store")


class Connection:
    """`session` is None while there is no daemon; what the first one said of its model stays."""

    def __init__(
        self,
        path: Path,
        name: str,
        changed: threading.Condition,
        *,
        reconnect_s: float,
        has_fallback: bool,
        identity: ModelIdentity | None = None,
    ) -> None:
        """`identity` is the model's that the daemon must serve; None to take the first one's."""
        self.session: Session | None = None
        self.counts: dict[int, int] | None = None
        """Experts of each layer, once a daemon was there."""
        self.quota = self.slot_bytes = self.reconnects = 0
        self.is_closed = self.is_searching = False
        self._path = path
        self._name = name
        self._changed = changed
        self._reconnect_s = reconnect_s
        self._has_fallback = has_fallback
        self._identity = identity
        self._lost_because = ""
        self._lost_at_s = self._tried_at_s = time.monotonic()
        self._fatal: DaemonError | None = None

    def begin(self, link: Link | None) -> None:
        """Begin the first session, over `link` if given.

        DaemonError when there is neither a daemon nor a fallback.
        """
        try:
            self._welcome(link or Link.open(self._path, self._name))
        except DaemonError as error:
            if not self._has_fallback or self._fatal is not None:
                raise
            self._lost_because = error.problem

    def _welcome(self, link: Link) -> None:
        """Begin a session. DaemonError when the daemon serves another model than before."""
        try:
            descriptor = link.descriptor()
            identity = descriptor.identity()
            if self._identity not in (None, identity):
                self._fatal = DaemonError(
                    f"k3-store serves another model than is run here: {identity.differences(self._identity)}",
                    path=self._path,
                    advice="Start this program again to run on what is served now",
                )
                raise self._fatal
            if self.counts is None:
                self.counts = {number: layer.experts for number, layer in descriptor.layers.items()}
        except BaseException:
            link.close()
            raise
        self._identity = identity
        self.session = Session(link, descriptor.files)
        self.quota, self.slot_bytes = link.welcome.quota, link.welcome.slot_bytes

    def lose(self, reason: str) -> None:
        """End the session for this reason, and start looking for a daemon."""
        assert self.session is not None
        session, self.session = self.session, None
        self._lost_because = reason
        self._lost_at_s = self._tried_at_s = time.monotonic()
        session.close()
        if self._has_fallback and not self.is_closed:
            _log.warning("k3-store went away (%s): reading from the files meanwhile", reason)

    def look_again(self) -> None:
        """Wait for a daemon, or with a fallback look for one from time to time.

        DaemonError when none is found in time.
        """
        if self._fatal is not None:
            raise _again(self._fatal)
        if self.is_searching:
            self._changed.wait(_SEARCH_WAIT_S)
            return
        now_s = time.monotonic()
        if self._has_fallback:
            if now_s - self._tried_at_s >= RETURN_S:
                self._tried_at_s = now_s
                self._search(0.0)
            return
        self._search(max(0.0, self._lost_at_s + self._reconnect_s - now_s) if self._reconnect_s else 0.0)
        if self.session is None and not self.is_closed:
            raise self._fatal or DaemonError(
                f"k3-store went away ({self._lost_because}) and was not back within {self._reconnect_s:g} s",
                path=self._path,
                advice="Start it again; or use --fallback file to read from the drives meanwhile",
            )

    def _search(self, patience_s: float) -> None:
        """Try to connect until it works or patience ends; at least once. The lock is let go meanwhile."""
        self.is_searching = True
        self._changed.release()
        link = None
        try:
            deadline_s = time.monotonic() + patience_s
            link = Link.await_daemon(self._path, self._name, deadline_s, lambda: not self.is_closed)
        finally:
            self._changed.acquire()
            self.is_searching = False
            self._changed.notify_all()
        if link is None:
            return
        if self.is_closed:
            link.close()
            return
        self._welcome(link)
        self.reconnects += 1
        if self._has_fallback:
            _log.warning("k3-store is back")


def _again(error: DaemonError) -> DaemonError:
    """Return a copy of an error for one more thread to raise: two must not share one traceback."""
    return DaemonError(error.problem, path=error.path, advice=error.advice)
