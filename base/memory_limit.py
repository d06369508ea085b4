"""How much more memory this process may take, and who says so: the machine, cgroups, ulimit. Only reads /proc
and /sys; any thread.

Every limit that was found is returned, not only the tightest, so that a command that decides by them can print
them all. What the kernel can take back from the page cache counts as free.
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
"""Cgroups of version 1 have no word for "no limit": they say a number close to 2^63."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes that one authority still allows, and its name."""

    free_bytes: float
    set_by: str


def memory_limits(proc: Path = PROC, cgroup: Path = CGROUP) -> list[Limit]:
    """Every limit that holds now; empty where the system tells nothing."""
    return [*_host(proc), *_address_space(), *_cgroups(proc, cgroup)]


def memory_limit(proc: Path = PROC, cgroup: Path = CGROUP) -> Limit:
    """The tightest limit that holds now. Infinite where the system tells nothing."""
    limits = [Limit(math.inf, "nothing"), *memory_limits(proc, cgroup)]
    return min(limits, key=lambda limit: limit.free_bytes)


def gb(size: float) -> str:
    """Bytes for people, as every memory message writes them."""
    return f"{size / 1e9:.3f} GB"


def _host(proc: Path) -> Iterator[Limit]:
    for line in _lines(proc / "meminfo"):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield Limit(int(rest.split()[0]) * 1024, "the machine (MemAvailable)")


def _address_space() -> Iterator[Limit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        statm = _lines(Path("/proc/self/statm"))
        used_bytes = int(statm[0].split()[0]) * os.sysconf("SC_PAGE_SIZE") if statm else 0
        yield Limit(soft - used_bytes, "the address space limit (ulimit -v)")


def _cgroups(proc: Path, root: Path) -> Iterator[Limit]:
    """Limits of this process's cgroup and of every cgroup above it, versions 2 and 1."""
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
    """Inside a container the path may not exist below `base`; then `base` itself is what holds."""
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
    """A file's number; None when there is no file or no limit ("max")."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _stat(path: Path, key: str) -> int:
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    """A file's lines; none when it cannot be read, which on these pseudo files means "not here"."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
