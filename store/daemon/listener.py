"""The daemon's listening socket in the control loop: let people in, pause when there is no room, keep the path.

Socket and lock file may be removed by others while the daemon lives. Once a second they are looked for, and made
again; connections that are there already notice nothing. Belongs to the control loop's thread.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable

from k3.base.errors import SocketError
from k3.store.protocol.closing import close_socket
from k3.store.protocol.peer import refuse_descriptors
from k3.store.protocol.socket_file import ClaimedSocket

BACKLOG = 64
ACCEPT_PAUSE_S = 0.2
MISSES_MAX = 10
"""Looks in a row that find the path lost before a daemon without clients ends."""

_log = logging.getLogger("k3.store")


class Listener:
    """Accepts connections on a claimed socket while the loop's selector runs."""

    def __init__(
        self,
        claimed: ClaimedSocket,
        selector: selectors.BaseSelector,
        on_peer: Callable[[socket.socket], None],
        has_room: Callable[[], bool],
        *,
        refuses_descriptors: bool,
    ) -> None:
        """`on_peer` is given each connection; none is taken while `has_room` says no."""
        self._claimed = claimed
        self._selector = selector
        self._on_peer = on_peer
        self._has_room = has_room
        self._refuses = refuses_descriptors
        self._is_accepting = False
        self._problem = ""
        self._misses = 0
        self._cannot_look = False
        self.resumes_at_s: float | None = None
        """When `turn` has something to do next; None while it is accepting."""

    def open(self) -> None:
        """Listen, and accept from now on."""
        self._listen()
        self._resume()

    def turn(self, now_s: float) -> None:
        """Accept again when a pause is over."""
        if self.resumes_at_s is not None and now_s >= self.resumes_at_s:
            self._resume()

    def withdraw(self) -> None:
        """Stop listening, take who has connected already, and remove the socket file."""
        self._pause()
        self.resumes_at_s = None
        if self._claimed.lock is not None:
            self._take_all(self._claimed.socket)
        self._claimed.withdraw()

    def look_after_path(self) -> SocketError | None:
        """Make socket and lock file again if they are gone. Returns why it cannot be done, once it is for good."""
        try:
            is_in_place = self._claimed.is_in_place()
        except OSError as error:  # neither there nor gone, as far as can be seen
            if not self._cannot_look:
                _log.warning("cannot look at %s and its lock file: %s", self._claimed.path, error.strerror)
            self._cannot_look = True
            return None
        self._cannot_look = False
        if is_in_place:
            self._misses = 0
            return None
        was_accepting = self._is_accepting
        try:
            before = self._claimed.restore()
        except SocketError as error:
            self._misses += 1
            if self._misses == 1:
                _log.error("nobody can connect any more: %s", error)
            return error if self._misses >= MISSES_MAX and self._claimed.lock is not None else None
        self._misses = 0
        _log.warning(
            "%s or its lock file had been removed or replaced by others, and was made again", self._claimed.path
        )
        if before is not None:
            if was_accepting:
                self._selector.unregister(before)
                self._is_accepting = False
            self._listen()
            if was_accepting:
                self._resume()
            self._take_all(before)
            close_socket(before)
        return None

    def _listen(self) -> None:
        self._claimed.socket.setblocking(False)
        if self._refuses:
            refuse_descriptors(self._claimed.socket)
        self._claimed.socket.listen(BACKLOG)

    def _resume(self) -> None:
        self._selector.register(self._claimed.socket, selectors.EVENT_READ, self._accept)
        self._is_accepting = True
        self.resumes_at_s = None

    def _pause(self) -> None:
        """Accept nobody for a moment: else a connection that cannot be taken would keep the loop busy."""
        if self._is_accepting:
            self._selector.unregister(self._claimed.socket)
        self._is_accepting = False
        self.resumes_at_s = time.monotonic() + ACCEPT_PAUSE_S

    def _pause_because(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("cannot accept a connection: %s", problem)
        self._problem = problem
        self._pause()

    def _accept(self) -> None:
        if not self._has_room():
            self._pause_because("connections that sent descriptors cannot be closed")
            return
        try:
            connection, _ = self._claimed.socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no room for one more descriptor, or something that is wrong with this socket
            self._pause_because(error.strerror or str(error))
            return
        self._problem = ""
        self._on_peer(connection)

    def _take_all(self, listening: socket.socket) -> None:
        """Take whoever waits in a socket that is to be closed; nobody else can connect to it.

        Closing it with people in it would throw away what they sent, which may take as long as they like.
        """
        try:
            listening.shutdown(socket.SHUT_RDWR)
            while self._has_room():
                connection, _ = listening.accept()
                self._on_peer(connection)
        except OSError:
            return  # there are no more
