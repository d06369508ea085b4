"""Memory that this process may still allocate, and the limits that say so: machine, cgroups, ulimit.

Every limit found is returned, not only the tightest, so that a command that obeys them can print them all. Page
cache that the kernel can reclaim counts as free. Only reads /proc and /sys; any thread.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

UNLIMITED_BYTES = 1 << 60
"""Smallest value that means "no limit": cgroups of version 1 report a number close to 2^63."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes that one limit still allows, and that limit's name."""

    free_bytes: float
    set_by: str


def memory_limits(proc: Path = PROC, cgroup: Path = CGROUP) -> list[Limit]:
    """Return every limit in force; none where the system reports none."""
    return [*_host(proc), *_address_space(), *_cgroups(proc, cgroup)]


def memory_limit(proc: Path = PROC, cgroup: Path = CGROUP) -> Limit:
    """Return the tightest limit in force; one of infinite bytes where the system reports none."""
    limits = [Limit(math.inf, "nothing"), *memory_limits(proc, cgroup)]
    return min(limits, key=lambda limit: limit.free_bytes)


def gb(size: float) -> str:
    """Return bytes as every memory message writes them: "1.234 GB"."""
    return f"{size / 1e9:.3f} GB"


def _host(proc: Path) -> Iterator[Limit]:
    for line in _lines(proc / "meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield Limit(int(rest.split()[0]) * 1024, "the machine (MemAvailable)")
            return
    # Without /proc the system call is left, which leaves out the page cache that could be reclaimed.
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Limit(free_bytes, f"the machine (free pages: {proc / 'meminfo'} cannot be read)")


def _address_space() -> Iterator[Limit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        statm = _lines(Path("/proc/self/statm"))
        used_bytes = int(statm[0].split()[0]) * os.sysconf("SC_PAGE_SIZE") if statm else 0
        yield Limit(soft - used_bytes, "the address space limit (ulimit -v)")


def _cgroups(proc: Path, root: Path) -> Iterator[Limit]:
    """Yield the limits of this process's cgroup and of every cgroup above it, versions 2 and 1."""
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _ancestors(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            yield from _ancestors(
                base, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _ancestors(base: Path, path: str, limit_name: str, usage_name: str, cache_key: str) -> Iterator[Limit]:
    """Yield the limits from a cgroup up to `base`; inside a container `path` may not exist below `base`."""
    inner = base / path.lstrip("/")
    for directory in (inner, *inner.parents):
        limit, usage = _number(directory / limit_name), _number(directory / usage_name)
        if limit is not None and usage is not None and limit < UNLIMITED_BYTES:
            cache_bytes = _stat(directory / "memory.stat", cache_key)
            free_bytes = limit - usage + min(cache_bytes, usage)
            yield Limit(free_bytes, f"the memory limit of cgroup {directory} ({gb(limit)})")
        if directory == base:
            return


def _number(path: Path) -> int | None:
    """Return the number in a file; None when there is no file or no limit ("max")."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _stat(path: Path, key: str) -> int:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    """Return a file's lines; none when it cannot be read: such a pseudo file does not exist on this system."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
