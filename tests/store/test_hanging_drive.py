"""Holds up: a drive that does not answer is seen in status, metrics and log, and so is its return."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry

from k3.store.client.daemon_source import DaemonSource
from k3.store.daemon import model_service
from k3.store.daemon.metrics import StatusCollector
from k3.store.daemon.status_text import ps_lines, status_lines
from tests.support.containers import build_container
from tests.support.daemons import daemon_inside
from tests.support.waiting import wait_until


def test_a_drive_that_hangs_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = build_container(tmp_path / "home", [tmp_path / "a"], [1, 2])
    monkeypatch.setattr(model_service, "HANGING_S", 0.05)
    with daemon_inside(tmp_path / "s", built.directories, quota=2, max_clients=2) as daemon:
        daemon.server.inject("stall", argument=60_000)
        source = DaemonSource(daemon.socket)
        stream = source.lease(1, [0])
        wait_until(lambda: "hangs: a read has been under way for" in caplog.text)
        status = daemon.status()
        assert max(drive["oldest_read_s"] for drive in status["drives"]) > 0.05
        assert any("oldest" in line for line in status_lines(status))
        hanging = [drive for drive in status["drives"] if drive["oldest_read_s"]]
        for drive in hanging:
            drive["oldest_read_s"] = 3600.04
        told = [line for line in ps_lines(status) if "under way" in line]
        assert told == [f"{drive['path']}: a read has been under way for 3600.0 s" for drive in hanging]
        registry = CollectorRegistry()
        registry.register(StatusCollector(lambda: status))
        assert b"k3store_oldest_read_seconds{" in generate_latest(registry)
        daemon.server.clear_faults()
        with next(stream):
            pass
        wait_until(lambda: 0 < caplog.text.count("hangs: a read") == caplog.text.count("answers again"))
        assert caplog.text.count("hangs: a read") <= len(status["drives"]), "once for each drive"
        assert all(drive["oldest_read_s"] == 0 for drive in daemon.status()["drives"])
        source.close()
