"""A daemon's status as text for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SLOW_READ_S = 1.0
"""Age from which a read under way is worth a line among the clients, who may be waiting for it."""

DRIVE_OF_PS = ("path", "queue", "oldest_read_s")
"""Of each drive's status, what `ps --json` has."""


def status_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `k3-store status` prints."""
    cache = status["cache"]
    yield f"container {status['container']} at {status['home']}"
    yield (
        f"process   {status['pid']} on {status['socket']}, up {status['uptime_s']:.0f} s, "
        f"{status['io_depth']} reads at once per drive, checked {status['verify']}"
    )
    dense = status["dense"]
    yield f"dense     {_gb(dense['bytes'])}, read in {dense['load_s']:.2f} s"
    yield f"in huge pages: {_gb(cache['huge_bytes'])} of the cache, {_gb(dense['huge_bytes'])} of dense"
    yield ""
    yield from table(
        (
            "drive",
            "model",
            "share",
            "O_DIRECT",
            "queue",
            "oldest",
            "GB/s now",
            "GB/s busy",
            "read",
            "errors",
            "re-reads",
        ),
        [
            (
                drive["path"],
                drive["model"] or drive["device"] or "unknown",
                f"{100 * drive['share']:.0f} %",
                "yes" if drive["direct"] else "NO",
                drive["queue"],
                f"{drive['oldest_read_s']:.1f} s",
                f"{drive['recent_gb_per_s']:.3f}",
                f"{drive['busy_gb_per_s']:.3f}",
                _gb(drive["read_bytes"]),
                drive["errors"],
                drive["re_reads"],
            )
            for drive in status["drives"]
        ],
    )
    asked = cache["hits"] + cache["misses"] + cache["coalesced"]
    share = f" ({100 * cache['hits'] / asked:.1f} %)" if asked else ""
    states = ", ".join(f"{count} {name}" for name, count in cache["states"].items())
    yield ""
    size = f"{cache['slots']} slots of {cache['slot_bytes']} bytes ({_gb(cache['bytes'])})"
    yield f"cache     {cache['policy']}, {size}: {states}"
    yield (
        f"experts   {asked} asked for: {cache['hits']} hits{share}, {cache['misses']} misses, "
        f"{cache['coalesced']} coalesced; {cache['evictions']} evictions, {cache['failed']} failed"
    )
    yield (
        f"prefetch  {cache['prefetched']} read ahead, {cache['prefetch_hits']} of them used, "
        f"{cache['prefetch_wasted']} dropped unused"
    )
    yield f"clients   {len(status['clients'])} of {status['max_clients']}, {status['quota']} leases each"


def ps_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `k3-store ps` prints."""
    rows = [
        (
            client["client"],
            client["name"],
            client["pid"] if client["pid"] is not None else "?",
            f"{client['connected_s'] or 0:.0f} s",
            client["leases"],
            _gb(client["leased_bytes"]),
            client["waiting"],
            client["granted"],
            client["errors"],
        )
        for client in status["clients"]
    ]
    yield from table(("client", "name", "pid", "since", "leases", "leased", "waiting", "granted", "errors"), rows)
    for drive in status["drives"]:
        if drive["oldest_read_s"] >= SLOW_READ_S:
            yield f"{drive['path']}: a read has been under way for {drive['oldest_read_s']:.1f} s"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Columns as wide as they need to be, numbers to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    right = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(heads))]
    for line in (heads, *texts):
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True)]
        yield "  ".join(cells).rstrip()


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f} GB"
