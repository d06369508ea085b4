"""Ceilings of a drive: plain O_DIRECT loops with nothing in between, to measure everything else against."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

BLOCK_BYTES = 8 << 20
DEPTH = 6


def read_files(paths: Sequence[Path]) -> float:
    """Seconds to read these files front to back, one after the other, at depth 6, past the page cache."""
    start = time.perf_counter()
    for path in paths:
        _lanes(path, path.stat().st_size, os.O_RDONLY, os.preadv)
    return time.perf_counter() - start


def write_file(path: Path, nbytes: int) -> float:
    """Seconds to write a file of `nbytes` (whole blocks) at depth 6, past the page cache, and make it durable."""
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.posix_fallocate(descriptor, 0, nbytes)
    _lanes(path, nbytes, os.O_RDWR, os.pwritev)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - start


def read_and_write(paths: Sequence[Path], target: Path, nbytes: int) -> float:
    """Seconds to read files and to write another one at the same time: what a copy could reach at best."""
    writer = threading.Thread(target=write_file, args=(target, nbytes))
    start = time.perf_counter()
    writer.start()
    read_files(paths)
    writer.join()
    return time.perf_counter() - start


def _lanes(path: Path, nbytes: int, flags: int, transfer: object) -> None:
    assert callable(transfer)
    descriptor = os.open(path, flags | os.O_DIRECT)
    failures: list[OSError] = []

    def lane(number: int) -> None:
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        try:
            for offset in range(number * BLOCK_BYTES, nbytes, DEPTH * BLOCK_BYTES):
                transfer(descriptor, [buffer], offset)
        except OSError as error:
            failures.append(error)

    lanes = [threading.Thread(target=lane, args=(number,)) for number in range(DEPTH)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    os.close(descriptor)
    if failures:
        raise failures[0]
