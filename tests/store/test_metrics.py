"""Holds up: what Prometheus scrapes is what happened, under the promised names, on the loopback interface only."""

from __future__ import annotations

import contextlib
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k3.base.errors import SocketError
from k3.store.client.daemon_source import DaemonSource
from k3.store.daemon import metrics_server
from k3.store.daemon.metrics_server import CONNECTIONS_MAX, REQUEST_BYTES_MAX, MetricsPlace, MetricsServer
from k3.store.protocol.peer import Peer
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, daemon_inside, daemon_outside
from tests.support.waiting import wait_until


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a"], [1, 2])


@pytest.fixture
def daemon(built: Built, tmp_path: Path) -> Iterator[Inside]:
    with daemon_inside(tmp_path / "s", built.directories, quota=10) as inside:
        yield inside


def scrape(port: int | None) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_happened_is_counted(built: Built, daemon: Inside) -> None:
    server = MetricsServer(MetricsPlace(0), daemon.daemon.status)
    try:
        source = DaemonSource(daemon.socket)
        held = list(source.lease(1, range(5)))
        for lease in source.lease(1, range(5)):
            lease.release()
        # The daemon hears of what was given back after the client has said so.
        wait_until(lambda: scrape(server.port)["k3store_leases", ()] == 5)
        found = scrape(server.port)
        drives = [("drive", str(path)) for path in built.directories]
        stored = [0, 0]
        for key, pieces in built.pieces.items():
            for extent in pieces if key.layer == 1 else []:
                stored[built.manifest.files[extent.file].root] += extent.stored_bytes
        for drive, read_bytes in zip(drives, stored, strict=True):
            assert found["k3store_read_bytes_total", (drive,)] == read_bytes
            assert found["k3store_read_seconds_count", (drive,)] == 5
            assert found["k3store_read_seconds_sum", (drive,)] > 0
            assert found["k3store_errors_total", (drive,)] == 0
            assert found["k3store_verify_failures_total", (drive,)] == 0
            assert found["k3store_direct", (drive,)] == 1
        assert found["k3store_cache_hits_total", (("kind", "least-stale"),)] == 5
        assert found["k3store_cache_misses_total", ()] == 5
        assert found["k3store_clients", ()] == 1
        assert found["k3store_leases", ()] == 5
        assert found["k3store_cache_slots", (("state", "held"),)] == 5
        assert not any("expert" in dict(labels) for _, labels in found)
        for lease in held:
            lease.release()
        source.close()
    finally:
        server.close()


def test_the_time_of_every_read_is_in_a_bucket(built: Built, daemon: Inside) -> None:
    """Half of the reads take at least 60 ms, and one piece is damaged once."""
    server = MetricsServer(MetricsPlace(0), daemon.daemon.status)
    source = DaemonSource(daemon.socket)
    try:
        drives = [str(path) for path in built.directories]
        daemon.server.inject("flip", times=1, seed=1)
        for lease in source.lease(1, range(5)):
            lease.release()
        daemon.server.inject("stall", argument=60)
        for lease in source.lease(2, range(5)):
            lease.release()
        found = scrape(server.port)
        total = 0.0
        for path in drives:
            buckets = sorted(
                (float(dict(labels)["le"]), count)
                for (name, labels), count in found.items()
                if name == "k3store_read_seconds_bucket" and dict(labels)["drive"] == path
            )
            counts = [count for _, count in buckets]
            assert counts == sorted(counts)
            assert buckets[-1] == (float("inf"), found["k3store_read_seconds_count", (("drive", path),)])
            fast = dict(buckets)[0.05]
            assert counts[-1] - fast >= 5
            total += counts[-1]
        assert total == 5 * 2 * len(drives) + 1
        failures = [found["k3store_verify_failures_total", (("drive", path),)] for path in drives]
        assert sorted(failures) == [0] * (len(drives) - 1) + [1]
    finally:
        source.close()
        server.close()


def test_serve_has_an_option_for_it(built: Built, tmp_path: Path) -> None:
    with daemon_outside(tmp_path / "t", built.directories, "--metrics", "0") as outside:
        pattern = re.compile(r"metrics on http://127\.0\.0\.1:(\d+)/metrics")
        wait_until(lambda: any(map(pattern.search, outside.log)))
        found = next(match for match in map(pattern.search, outside.log) if match)
        assert scrape(int(found[1]))["k3store_clients", ()] == 0


def test_only_the_loopback_interface(daemon: Inside) -> None:
    server = MetricsServer(MetricsPlace(0), daemon.daemon.status)
    try:
        assert server._claimed.socket.getsockname()[0] == "127.0.0.1"
    finally:
        server.close()


def test_a_port_that_is_taken(daemon: Inside) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SocketError, match="Choose another --metrics"):
            MetricsServer(MetricsPlace(other.getsockname()[1]), daemon.daemon.status)


def test_every_metric_is_documented_and_every_documented_one_is_there(daemon: Inside) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(k3store_\w+)`", text, re.MULTILINE))
    server = MetricsServer(MetricsPlace(0), daemon.daemon.status)
    try:
        found = {re.sub("_(bucket|count|sum)$", "", name) for name, _ in scrape(server.port)}
    finally:
        server.close()
    assert {name for name in found if name.startswith("k3store")} == documented


# Strangers at the port


def ask(server: MetricsServer, request: bytes) -> bytes:
    """All that comes back."""
    with socket.create_connection(("127.0.0.1", server.port or 0), timeout=30) as connection:
        return talk(connection, request)


def talk(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    found = b""
    while data := connection.recv(65536):
        found += data
    return found


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"HEAD / HTTP/1.0\r\n\r\n", 200),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"\xff\x00 \r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (REQUEST_BYTES_MAX - 18), 431),
    ],
)
def test_requests_of_every_kind_are_answered(daemon: Inside, request_: bytes, code: int) -> None:
    server = MetricsServer(MetricsPlace(0), daemon.daemon.status)
    try:
        answer = ask(server, request_)
        assert answer.startswith(b"HTTP/1.1 %d " % code)
        assert (b"k3store_clients" in answer) == request_.startswith(b"GET /metrics")
    finally:
        server.close()


def test_idle_connections_take_nothing_from_the_daemon(built: Built, tmp_path: Path) -> None:
    with daemon_outside(tmp_path / "t", built.directories, "--metrics", "0") as outside:
        pattern = re.compile(r"metrics on http://127\.0\.0\.1:(\d+)/metrics")
        wait_until(lambda: any(map(pattern.search, outside.log)))
        port = int(next(match for match in map(pattern.search, outside.log) if match)[1])
        process = Path("/proc", str(outside.process.pid))

        def has() -> tuple[int, int]:
            return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))

        scrape(port)
        descriptors, threads = has()
        idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(400)]
        assert outside.status()["version"] == 1
        assert scrape(port)["k3store_clients", ()] == 0
        now = has()
        assert now[0] <= descriptors + CONNECTIONS_MAX + 2
        assert now[1] <= threads
        for connection in idle:
            connection.close()


def test_a_connection_that_says_nothing_is_ended(daemon: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "DEADLINE_S", 0.05)
    server = MetricsServer(MetricsPlace(0), daemon.daemon.status)
    try:
        assert ask(server, b"GET / HT") == b""
        assert server.connections == 0
    finally:
        server.close()


def test_a_scrape_that_goes_wrong_is_not_the_last(daemon: Inside) -> None:
    calls = []

    def status() -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError
        return daemon.daemon.status()

    server = MetricsServer(MetricsPlace(0), status)
    try:
        assert ask(server, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 500")
        assert ask(server, b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")
    finally:
        server.close()


def test_a_unix_socket_has_the_rights_of_the_daemons(
    daemon: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m"
    server = MetricsServer(MetricsPlace(path=path), daemon.daemon.status)

    def answer() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(path))
            return talk(connection, b"GET /metrics HTTP/1.1\r\n\r\n")

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(path)) == 0

    try:
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"k3store_clients" in answer()
        path.unlink()
        wait_until(listens)
        assert b"k3store_clients" in answer()
        monkeypatch.setattr(metrics_server, "peer_of", lambda connection: Peer(1, 1001, 1001))
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            assert answer() == b""
    finally:
        server.close()
    assert not path.exists()
