"""A daemon's status as Prometheus metrics. Names: `k3store_`, base units, `_total`.

Every scrape takes one status; nothing is counted here. No label ever names an expert: there are 82,432 of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

PREFIX = "k3store"

_DRIVE_COUNTERS = (
    ("read_bytes", "Bytes read from the drive, second tries included"),
    ("errors", "Reads that the drive refused, or that came out short or damaged"),
    ("verify_failures", "Pieces that were read and did not match their digest"),
    ("re_reads", "Pieces that were read a second time"),
)
_CACHE_COUNTERS = (
    ("misses", "Experts asked for that were read"),
    ("coalesced", "Experts asked for while somebody else's read of them was under way"),
    ("evictions", "Experts that made room"),
    ("failed", "Experts that could not be had: the drive refused, or the bytes were damaged, twice"),
    ("prefetched", "Experts read ahead of being asked for"),
    ("prefetch_hits", "Prefetched experts that were asked for"),
    ("prefetch_wasted", "Prefetched experts that made room without having been asked for"),
)


class StatusCollector(Collector):
    """Turns a status into metric families."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """One family after the other, all from one status."""
        status = self._status()
        yield InfoMetricFamily(
            PREFIX, "What is served", {"container": status["container"], "home": status["home"]}
        )
        yield _gauge("uptime_seconds", "Since the daemon began to serve", status["uptime_s"])
        yield from _drives(status["drives"])
        yield from _cache(status["cache"])
        yield from _clients(status["clients"])
        faults = status["internal_errors"]
        yield CounterMetricFamily(f"{PREFIX}_internal_errors", "Faults of the daemon itself", value=faults)
        closing = status["closing_connections"]
        yield _gauge("closing_connections", "Ended connections whose descriptors are still being closed", closing)
        yield _gauge("dense_bytes", "Dense tensors in memory, shared by every engine", status["dense"]["bytes"])
        huge = GaugeMetricFamily(f"{PREFIX}_huge_page_bytes", "Shared memory in huge pages", labels=["of"])
        huge.add_metric(["experts"], status["cache"]["huge_bytes"])
        huge.add_metric(["dense"], status["dense"]["huge_bytes"])
        yield huge


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value)


def _drives(drives: list[Mapping[str, Any]]) -> Iterator[Metric]:
    for key, text in _DRIVE_COUNTERS:
        family = CounterMetricFamily(f"{PREFIX}_{key}", text, labels=["drive"])
        for drive in drives:
            family.add_metric([drive["path"]], drive[key])
        yield family
    seconds = HistogramMetricFamily(
        f"{PREFIX}_read_seconds", "Time of one read of at most 4 MiB", labels=["drive"]
    )
    for drive in drives:
        seconds.add_metric([drive["path"]], _buckets(drive["read_times"]), drive["read_ns"] / 1e9)
    yield seconds
    for name, key, text in (
        ("queue_depth", "queue", "Reads that are queued or under way"),
        (
            "oldest_read_seconds",
            "oldest_read_s",
            "Age of the read that has been under way for longest; 0: none is",
        ),
        ("direct", "direct", "1 if reads go past the page cache"),
    ):
        family_now = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["drive"])
        for drive in drives:
            family_now.add_metric([drive["path"]], float(drive[key]))
        yield family_now


def _buckets(read_times: list[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """How many reads took at most so long, the last of them any time."""
    counts = itertools.accumulate(entry["reads"] for entry in read_times)
    bounds = ("+Inf" if entry["up_to_s"] is None else str(entry["up_to_s"]) for entry in read_times)
    return list(zip(bounds, counts, strict=True))


def _cache(cache: Mapping[str, Any]) -> Iterator[Metric]:
    hits = CounterMetricFamily(f"{PREFIX}_cache_hits", "Experts asked for that were in memory", labels=["kind"])
    hits.add_metric([cache["policy"]], cache["hits"])
    yield hits
    for key, text in _CACHE_COUNTERS:
        yield CounterMetricFamily(f"{PREFIX}_cache_{key}", text, value=cache[key])
    slots = GaugeMetricFamily(f"{PREFIX}_cache_slots", "Slots by state", labels=["state"])
    for state, count in cache["states"].items():
        slots.add_metric([state], count)
    yield slots
    yield _gauge("cache_slot_bytes", "Bytes of one slot", cache["slot_bytes"])


def _clients(clients: list[Mapping[str, Any]]) -> Iterator[Metric]:
    yield _gauge("clients", "Attached clients", len(clients))
    yield _gauge("leases", "Leases held by all clients", sum(client["leases"] for client in clients))
    yield _gauge("leases_waiting", "Leases awaited by all clients", sum(client["waiting"] for client in clients))
