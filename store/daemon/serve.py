"""The body of `k3-store serve`: claim the socket, open the service, run the loop, let go in the reverse order.

The socket is claimed first, so that a second daemon is refused before it reads a byte; nobody can connect to it
until everything is ready. Main thread only.
"""

from __future__ import annotations

import contextlib
import io
import logging
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from k3.base.errors import SocketError
from k3.store.daemon.control_loop import Daemon, DaemonOptions
from k3.store.daemon.log_output import JsonFormatter, LogOutput, PlainFormatter
from k3.store.daemon.metrics_server import LOOPBACK, MetricsPlace, MetricsServer
from k3.store.daemon.model_service import ServeSettings, Service
from k3.store.daemon.systemd import FIRST_DESCRIPTOR, Notifier, Supervisor
from k3.store.protocol.socket_file import ClaimedSocket, adopt, claim

START_PATIENCE_S = 60.0
_PROGRESS_S = 1.0

_log = logging.getLogger("k3.store")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where to serve, and what is said about it. A socket that systemd made takes the place of `socket`."""

    service: ServeSettings
    socket: Path
    group: int | None = None
    metrics: MetricsPlace | None = None
    clients_per_user: int | None = None
    makes_directory: bool = False
    """Make the socket's directory if it is not there: it is a default, and nobody chose it."""
    log_json: bool = False
    drain_s: float = 5.0


def serve(options: ServeOptions, supervisor: Supervisor) -> None:
    """Serve until told to stop, which may be before anybody is served. K3Error when it cannot begin."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_log_to_stderr(as_json=options.log_json))
        try:
            with _stop_signals_raised():
                daemon = _opened(options, supervisor, stack)
        except _StoppedError as stopped:
            _log.info("%s: ending before anybody was served", stopped)
            return
        daemon.run()
        _log.info("ended")


def _opened(options: ServeOptions, supervisor: Supervisor, stack: contextlib.ExitStack) -> Daemon:
    """Everything that serving needs; `stack` lets go of it."""
    notifier = Notifier(supervisor)
    stack.callback(notifier.close)
    claimed = _socket(options, supervisor)
    stack.callback(claimed.close)
    service = Service.open(options.service, _Progress(notifier).told)
    stack.callback(service.close)
    behaviour = DaemonOptions(
        group=options.group,
        clients_per_user=options.clients_per_user,
        drain_s=options.drain_s,
        ping_interval_s=supervisor.ping_interval_s,
    )
    daemon = Daemon(service, claimed, notifier, behaviour)
    if options.metrics is not None:
        metrics = MetricsServer(options.metrics, daemon.status)
        stack.callback(metrics.close)
        place = options.metrics.path or f"http://{LOOPBACK}:{metrics.port}/metrics"
        _log.info("metrics on %s; they name the container's directories", place)
    return daemon


class _StoppedError(BaseException):
    """Raised by SIGTERM and SIGHUP while the daemon begins, which may take minutes: as Ctrl-C, it is no error."""


@contextlib.contextmanager
def _stop_signals_raised() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (unless it is ignored, as under nohup) raise _StoppedError while inside.

    Without it they would end the process where it stands, with its socket left behind and without a word.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise _StoppedError(signal.Signals(number).name)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _socket(options: ServeOptions, supervisor: Supervisor) -> ClaimedSocket:
    """Systemd's socket if it made one, else our own."""
    if supervisor.listen_descriptors > 1:
        raise SocketError(f"systemd made {supervisor.listen_descriptors} sockets; this daemon serves on one")
    if supervisor.listen_descriptors == 1:
        return adopt(FIRST_DESCRIPTOR)
    if options.makes_directory:
        with contextlib.suppress(OSError):  # `claim` says what is wrong with it
            options.socket.parent.mkdir(mode=0o755)
    mode = 0o600 if options.group is None else 0o660
    return claim(options.socket, mode=mode, group=options.group)


class _Progress:
    """Tells the log and systemd how far starting is, about once a second."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._next_s = 0.0

    def told(self, what: str, done_bytes: int, total_bytes: int) -> None:
        """See `Service.open`."""
        now_s = time.monotonic()
        if now_s >= self._next_s or done_bytes == total_bytes:
            self._next_s = now_s + _PROGRESS_S
            text = f"{what}: {done_bytes / 1e9:.3f} of {total_bytes / 1e9:.3f} GB"
            self._notifier.extend(START_PATIENCE_S)
            self._notifier.status(text)
            _log.info("%s", text)


@contextlib.contextmanager
def _log_to_stderr(*, as_json: bool) -> Iterator[None]:
    """Log to stderr while inside; what is said after it can be written there at once."""
    try:
        stream: Any = io.FileIO(sys.stderr.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:  # a stream of a test, which has no descriptor
        stream = sys.stderr.buffer
    output = LogOutput(stream, JsonFormatter() if as_json else PlainFormatter(), sys.stderr.encoding)
    _log.handlers[:] = [output]
    _log.setLevel(logging.INFO)
    _log.propagate = False
    try:
        yield
    finally:
        output.close()
        _log.removeHandler(output)
