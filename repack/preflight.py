"""Everything that is checked before byte one is written: free space, and how long it will take."""

from __future__ import annotations

import errno
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3 import kernels
from k3.base.errno_advice import Operation, refusal
from k3.base.errors import DriveError, SpaceError
from k3.base.free_space import free_bytes, largest_file_bytes
from k3.base.notes import note_once
from k3.base.presence import is_there, status
from k3.container.layout import PARTIAL_SUFFIX
from k3.repack.jobs import Jobs
from k3.repack.plan import Plan
from k3.repack.probe import read_rate
from k3.repack.scratch_file import scratch_bytes

_JOURNAL_BYTES_PER_EXPERT = 128
_CATALOG_BYTES_PER_EXPERT = 256
_FIXED_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class DriveNeed:
    """The bytes that a run needs on one file system, and those that are free there."""

    directories: tuple[str, ...]
    write_bytes: int  # data files in all
    present_bytes: int  # of these, already allocated by an unfinished run
    extra_bytes: int  # journal, catalog, small files, scratch
    free_bytes: int | None  # None: the file system does not say

    @property
    def missing_bytes(self) -> int:
        """Bytes that the run lacks beyond those free; 0 if it fits, or if the file system does not tell."""
        if self.free_bytes is None:
            return 0
        return max(0, self.write_bytes - self.present_bytes + self.extra_bytes - self.free_bytes)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected duration in seconds and what it is bound by, from rates that were measured here.

    `read_gb_per_s`, `seconds` and `limit` are None when the source is too small to measure its drive.
    """

    read_gb_per_s: float | None
    hash_gb_per_s: float
    seconds: float | None
    limit: str | None = None


def drive_needs(plan: Plan, directories: Mapping[int, Path], small_bytes: int, jobs: Jobs) -> list[DriveNeed]:
    """Per file system: bytes to write, bytes there already, bytes free. Writes nothing.

    `small_bytes` are those of the small files that home takes.
    """
    by_device: dict[int, list[int]] = {}
    for number, root in enumerate(plan.roots):
        if root.kind != "source":
            by_device.setdefault(_existing(directories[number]).stat().st_dev, []).append(number)
    writes = plan.write_bytes()
    experts = sum(layer.experts for layer in plan.layers.values())
    needs = []
    for numbers in by_device.values():
        extra = _FIXED_BYTES if 0 in numbers else 0
        if 0 in numbers:
            extra += experts * (_JOURNAL_BYTES_PER_EXPERT + _CATALOG_BYTES_PER_EXPERT)
            extra += small_bytes
            extra += scratch_bytes(plan, jobs)
        free = free_bytes(_existing(directories[numbers[0]]))
        if free is None:
            note_once(
                f"free space {numbers}",
                f"the file system of {directories[numbers[0]]} does not say how much is free: that it "
                "suffices was not checked",
            )
        needs.append(
            DriveNeed(
                directories=tuple(str(directories[number]) for number in numbers),
                write_bytes=sum(writes[number] for number in numbers),
                present_bytes=sum(_present_bytes(plan, directories, number) for number in numbers),
                extra_bytes=extra,
                free_bytes=free,
            )
        )
    return needs


def check_space(needs: list[DriveNeed]) -> None:
    """SpaceError with the numbers of every file system that is too small."""
    short = [need for need in needs if need.missing_bytes]
    if short:
        details = "; ".join(
            f"{', '.join(need.directories)}: {need.missing_bytes + (need.free_bytes or 0):,} bytes needed, "
            f"{need.free_bytes or 0:,} free, {need.missing_bytes:,} missing"
            for need in short
        )
        raise SpaceError(
            f"not enough space: {details}",
            path=short[0].directories[0],
            advice="Free space, add a drive with --dirs, or lower --bits; nothing was written",
        )


def check_file_sizes(plan: Plan, directories: Mapping[int, Path]) -> None:
    """DriveError when a file of the plan is larger than its place takes (FAT32, ulimit -f)."""
    for file in plan.files:
        if file.kind == "source":
            continue
        most_bytes = largest_file_bytes(_existing(directories[file.root]))
        if most_bytes is not None and file.size_bytes > most_bytes:
            problem = (
                f"a file of {file.size_bytes:,} bytes is to be written where at most {most_bytes:,} are taken"
            )
            raise DriveError(
                problem,
                path=directories[file.root] / file.path,
                advice=f"{refusal(Operation.WRITE, errno.EFBIG).advice}; nothing was written",
            )


def estimate(plan: Plan, needs: list[DriveNeed], jobs: Jobs) -> Estimate:
    """Return how long a run will take, and which of its three works is the longest.

    Every drive transfers what it must, processors hash the source, and the thread that routes quantizes matrices.
    Writes are assumed to be as fast as reads, which is what most drives do for this size of request.
    """
    shards = plan.snapshot.shards
    largest = max(shards, key=lambda shard: shard.size_bytes)
    rate = read_rate(largest.path)
    hash_rate = _hash_rate(jobs) * jobs.hash_threads
    if rate is None:
        return Estimate(None, hash_rate / 1e9, None)
    source_devices = {shard.path.stat().st_dev for shard in shards}
    busiest = 0
    for need in needs:
        device = _existing(Path(need.directories[0])).stat().st_dev
        reads = plan.read_bytes if device in source_devices else 0
        busiest = max(busiest, need.write_bytes + reads)
    quantized_bytes = sum(tensor.source.nbytes for tensor in plan.tensors if tensor.scales is not None)
    works = {
        "the drive": max(busiest, plan.read_bytes) / rate,
        "SHA-256": plan.read_bytes / hash_rate,
        "quantization": quantized_bytes / _quantize_rate() if quantized_bytes else 0.0,
    }
    limit = max(works, key=lambda name: works[name])
    return Estimate(rate / 1e9, hash_rate / 1e9, works[limit], limit)


def _hash_rate(jobs: Jobs) -> float:
    """Return the bytes per second that one processor hashes of its share of the shards at once."""
    block = np.zeros(8 << 20, np.uint8)
    together = min(kernels.sha256_side_by_side(), -(-jobs.shards // jobs.hash_threads))
    messages = [kernels.Sha256() for _ in range(together)]
    start = time.perf_counter()
    if together == 1:
        hashlib.sha256(block.data).digest()
    else:
        kernels.sha256_update(messages, [block] * together)
    return together * len(block) / (time.perf_counter() - start)


def _quantize_rate() -> float:
    """Return the bytes of bfloat16 weights per second that are quantized, with all processors."""
    rows = np.zeros((1024, 4096), np.uint16)
    kernels.quantize_int8(rows[:64])
    start = time.perf_counter()
    kernels.quantize_int8(rows)
    return rows.nbytes / (time.perf_counter() - start)


def _existing(directory: Path) -> Path:
    """Return the directory itself, or the nearest ancestor that exists."""
    for place in (directory, *directory.absolute().parents):
        if is_there(place):
            return place
    raise AssertionError("the root directory exists")


def _present_bytes(plan: Plan, directories: Mapping[int, Path], root: int) -> int:
    """Bytes that an unfinished run has already allocated for this root's files."""
    total = 0
    for file in plan.files:
        if file.root == root and file.kind != "source":
            final = directories[root] / file.path
            for path in (final, final.with_name(final.name + PARTIAL_SUFFIX)):
                found = status(path)
                if found is not None:
                    total += min(file.size_bytes, found.st_blocks * 512)
    return total
