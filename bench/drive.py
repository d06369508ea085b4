"""Ceilings of a drive: plain O_DIRECT loops with nothing in between, to measure everything else against.

The buffers lie in huge pages and are present before the clock starts: in pages of 4 KiB every page is a segment
of its own for the drive, which can halve what a loop reaches. No ceiling may be lower than what a program can do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from k3.base.page_buffers import huge_buffer, populate

BLOCK_BYTES = 8 << 20
DEPTH = 6


def read_files(paths: Sequence[Path]) -> float:
    """Seconds to read these files front to back, one after the other, at depth 6, past the page cache."""
    buffers = _buffers()
    start = time.perf_counter()
    _read(paths, buffers)
    return time.perf_counter() - start


def write_file(path: Path, nbytes: int) -> float:
    """Seconds to write a file of `nbytes` (whole blocks) at depth 6, past the page cache, and make it durable."""
    buffers = _buffers()
    start = time.perf_counter()
    _write(path, nbytes, buffers)
    return time.perf_counter() - start


def read_and_write(paths: Sequence[Path], target: Path, nbytes: int) -> float:
    """Seconds to read files and to write another one at the same time: what a copy could reach at best."""
    reading, writing = _buffers(), _buffers()
    failures: list[OSError] = []

    def write() -> None:
        try:
            _write(target, nbytes, writing)
        except OSError as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    start = time.perf_counter()
    writer.start()
    _read(paths, reading)
    writer.join()
    elapsed_s = time.perf_counter() - start
    if failures:
        raise failures[0]
    return elapsed_s


def _buffers() -> list[memoryview]:
    buffers = [huge_buffer(BLOCK_BYTES) for _ in range(DEPTH)]
    for buffer in buffers:
        populate(buffer)
    return [buffer.data for buffer in buffers]


def _read(paths: Sequence[Path], buffers: Sequence[memoryview]) -> None:
    for path in paths:
        _lanes(path, path.stat().st_size, os.O_RDONLY, os.preadv, buffers)


def _write(path: Path, nbytes: int, buffers: Sequence[memoryview]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.posix_fallocate(descriptor, 0, nbytes)
    _lanes(path, nbytes, os.O_RDWR, os.pwritev, buffers)
    os.fsync(descriptor)
    os.close(descriptor)


def _lanes(
    path: Path,
    nbytes: int,
    flags: int,
    transfer: Callable[[int, Sequence[memoryview], int], int],
    buffers: Sequence[memoryview],
) -> None:
    descriptor = os.open(path, flags | os.O_DIRECT)
    failures: list[OSError] = []

    def lane(number: int) -> None:
        try:
            for offset in range(number * BLOCK_BYTES, nbytes, DEPTH * BLOCK_BYTES):
                transfer(descriptor, [buffers[number]], offset)
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
