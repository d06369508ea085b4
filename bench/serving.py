"""A k3-store daemon in a process of its own, as benchmarks need it: started cold, asked, metered, ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from k3.base.errors import DaemonError
from k3.store.client.socket_link import ask_status

START_S = 300.0


class Daemon:
    """Serves from the making to the end of the block."""

    def __init__(self, directories: Sequence[Path], *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="k3-bench-")
        self.socket = Path(self._folder.name) / "s"
        dirs = ",".join(map(str, directories))
        command = [sys.executable, "-m", "k3.store.cli", "serve", "--dirs", dirs, "--socket", str(self.socket)]
        self._process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        self._await()

    def _await(self) -> None:
        began_s = time.monotonic()
        while True:
            try:
                self.status()
                return
            except DaemonError:
                if self._process.poll() is not None or time.monotonic() - began_s > START_S:
                    self._process.kill()
                    raise SystemExit(f"the daemon did not start: {self._process.communicate()[1]}") from None
                time.sleep(0.02)

    def status(self) -> dict[str, Any]:
        """Return the name and settings of the policy."""
        return ask_status(self.socket)

    def read_bytes(self) -> int:
        """Bytes that it has read from all drives."""
        return sum(drive["read_bytes"] for drive in self.status()["drives"])

    def cpu_s(self) -> float:
        """CPU time that it has used, all threads, user and system."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.communicate()
        self._folder.cleanup()
