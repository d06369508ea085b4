"""The machine as the repacker finds it: how fast drives read, and how many shards to stream at once.

Rates come from a short O_DIRECT measurement; shares and time estimates follow from them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from k3 import kernels
from k3.base.direct_io import ReadFile, WriteFile, drive_error
from k3.base.drive_info import is_spinning
from k3.base.errno_advice import Operation
from k3.base.new_file import create_unguessed, remove_unguessed
from k3.base.page_buffers import huge_buffer, populate
from k3.checkpoint.snapshot import Snapshot
from k3.repack.jobs import Jobs, choose_jobs

PROBE_BYTES = 128 << 20
REQUEST_BYTES = 4 << 20
DEPTH = 4
SAME_SPEED = 1.10
"""Rates within 10 % of each other are noise: the drives get equal shares."""


def read_rate(path: Path, *, limit_bytes: int = PROBE_BYTES) -> float | None:
    """Bytes per second of reading the first `limit_bytes` of a file at depth 4; None for a file too small."""
    with ReadFile(path) as file:
        count = min(file.size_bytes, limit_bytes) // REQUEST_BYTES
        if count < DEPTH:
            return None
        if not file.direct:
            file.drop_cache()
        buffers = [huge_buffer(REQUEST_BYTES) for _ in range(DEPTH)]
        for buffer in buffers:
            populate(buffer)

        def lane(number: int) -> None:
            for index in range(number, count, DEPTH):
                file.read(index * REQUEST_BYTES, REQUEST_BYTES, buffers[number])

        start = time.monotonic()
        with ThreadPoolExecutor(DEPTH) as pool:
            list(pool.map(lane, range(DEPTH)))
        return count * REQUEST_BYTES / (time.monotonic() - start)


def drive_rate(directory: Path) -> float:
    """Bytes per second of reading back a scratch file written in `directory`; the file is removed."""
    try:
        remove_unguessed(directory, "probe")
        descriptor, path = create_unguessed(directory, "probe")
        os.close(descriptor)
    except OSError as error:
        problem = "cannot make a file to measure the drive with"
        raise drive_error(problem, error, directory, operation=Operation.MAKE) from error
    data = huge_buffer(REQUEST_BYTES)
    data[:] = 0xA5
    try:
        with WriteFile(path, PROBE_BYTES) as file:
            for offset in range(0, PROBE_BYTES, REQUEST_BYTES):
                file.write(offset, data)
            file.sync()
        rate = read_rate(path)
        assert rate is not None
        return rate
    finally:
        path.unlink(missing_ok=True)


def shares_from_rates(rates: Sequence[float]) -> tuple[int, ...]:
    """Integer shares in proportion to rates (sum about 100); equal ones when the rates are within 10 %. Pure."""
    if max(rates) <= SAME_SPEED * min(rates):
        return (1,) * len(rates)
    total = sum(rates)
    return tuple(max(1, round(100 * rate / total)) for rate in rates)


def source_jobs(wanted: int | None, snapshot: Snapshot) -> Jobs:
    """Return the jobs that a snapshot is streamed with on this machine; `wanted` None lets them be chosen."""
    return choose_jobs(
        wanted,
        shards=len(snapshot.shards),
        cpus=kernels.usable_cpus(),
        side_by_side=kernels.sha256_side_by_side(),
        spinning=any(is_spinning(directory) for directory in snapshot.directories),
    )
