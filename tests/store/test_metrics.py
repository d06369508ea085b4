"""Holds up: what Prometheus scrapes is what happened, under the promised names, on the loopback interface only."""

from __future__ import annotations

import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from k3.container.errors import SocketError
from k3.store.client import DaemonSource
from k3.store.metrics import MetricsServer
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, daemon_inside, daemon_outside, wait_until


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a"], [1, 2])


@pytest.fixture
def daemon(built: Built, tmp_path: Path) -> Iterator[Inside]:
    with daemon_inside(tmp_path / "s", built.directories, quota=10) as inside:
        yield inside


def scrape(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_happened_is_counted(built: Built, daemon: Inside) -> None:
    server = MetricsServer(0, daemon.daemon.status)
    try:
        source = DaemonSource(daemon.socket)
        held = list(source.lease(1, range(5)))
        for lease in source.lease(1, range(5)):
            lease.release()
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
    server = MetricsServer(0, daemon.daemon.status)
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
            assert fast >= 4  # what was not slowed down; a crowded machine may slow one
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
    server = MetricsServer(0, daemon.daemon.status)
    try:
        assert server._server.server_address[0] == "127.0.0.1"
    finally:
        server.close()


def test_a_port_that_is_taken(daemon: Inside) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(SocketError, match="Choose another --metrics"):
            MetricsServer(other.getsockname()[1], daemon.daemon.status)


def test_every_metric_is_documented_and_every_documented_one_is_there(daemon: Inside) -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(k3store_\w+)`", text, re.MULTILINE))
    server = MetricsServer(0, daemon.daemon.status)
    try:
        found = {re.sub("_(bucket|count|sum)$", "", name) for name, _ in scrape(server.port)}
    finally:
        server.close()
    assert {name for name in found if name.startswith("k3store")} == documented
