"""Daemons for tests: one in this process (faults can be injected), one in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3.base.errors import DaemonError
from k3.store.client.socket_link import ask_status
from k3.store.daemon.control_loop import Daemon, DaemonOptions
from k3.store.daemon.model_service import ServeSettings, Service
from k3.store.daemon.systemd import Notifier, Supervisor
from k3.store.protocol.native import NativeServer
from k3.store.protocol.socket_file import claim
from tests.support.waiting import wait_until

START_S = 60.0


@dataclass
class Inside:
    """A daemon whose loop runs in a thread of this process."""

    socket: Path
    daemon: Daemon
    service: Service

    @property
    def server(self) -> NativeServer:
        return self.service._server

    def status(self) -> dict[str, Any]:
        return ask_status(self.socket)


@contextlib.contextmanager
def daemon_inside(
    socket: Path,
    directories: Sequence[Path],
    *,
    loop: dict[str, Any] | None = None,
    drain_s: float = 5.0,
    **settings: Any,
) -> Iterator[Inside]:
    """Serve a container until the end of the block. `loop` has options of the control loop."""
    claimed = claim(socket)
    try:
        service = Service.open(ServeSettings(tuple(directories), **settings), lambda what, done, total: None)
    except BaseException:
        claimed.close()
        raise
    options = DaemonOptions(drain_s=drain_s, with_signals=False, **(loop or {}))
    daemon = Daemon(service, claimed, Notifier(Supervisor()), options)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            daemon.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="daemon")
    thread.start()
    try:
        wait_until(lambda: failures or answers(socket))
        assert not failures
        yield Inside(socket, daemon, service)
    finally:
        if thread.is_alive():
            daemon.stop("the test is over")
        thread.join(60)
        assert not thread.is_alive(), "the daemon never ended"
        service._server.clear_faults()
        service.close()
        claimed.close()
        if failures:
            raise failures[0]


@dataclass
class Outside:
    """A daemon in a process of its own."""

    socket: Path
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    def status(self) -> dict[str, Any]:
        return ask_status(self.socket)

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory runs out, and wait for the end."""
        self.process.kill()
        self.process.wait(60)

    def terminate(self) -> None:
        """Send SIGTERM, as systemd does, and wait for the end."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def serve_command(socket: Path, directories: Sequence[Path], *options: str) -> list[str]:
    return [
        sys.executable, "-m", "k3.store.cli", "serve", "--dirs", ",".join(map(str, directories)), "--socket",
        str(socket), *options,
    ]  # fmt: skip


def start(socket: Path, directories: Sequence[Path], *options: str, ready: bool = True, **how: Any) -> Outside:
    """Start a daemon; with `ready`, wait until it answers, and raise AssertionError with its log if it ends."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("K3_")}
    how = {"env": environment, **how}
    command = serve_command(socket, directories, "--log-json", *options)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **how)
    daemon = Outside(socket, process)

    def listen() -> None:
        assert process.stderr is not None
        with process.stderr:
            daemon.log.extend(process.stderr)

    threading.Thread(target=listen, daemon=True).start()
    if ready:
        try:
            wait_until(lambda: process.poll() is not None or answers(socket), START_S)
            assert process.poll() is None, "".join(daemon.log)
        except BaseException:
            process.kill()
            process.wait()
            raise
    return daemon


@contextlib.contextmanager
def daemon_outside(socket: Path, directories: Sequence[Path], *options: str, **how: Any) -> Iterator[Outside]:
    """Start a daemon as `start` does, and kill it at the end of the block."""
    daemon = start(socket, directories, *options, **how)
    try:
        yield daemon
    finally:
        daemon.process.kill()
        daemon.process.wait(60)


def messages(daemon: Outside) -> list[str]:
    """Return the messages that a daemon has logged so far as JSON."""
    return [json.loads(line)["message"] for line in daemon.log if line.startswith("{") and "message" in line]


def answers(socket: Path) -> bool:
    """Return True if a daemon answers on this socket."""
    try:
        ask_status(socket)
    except DaemonError:
        return False
    return True
