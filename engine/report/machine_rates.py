"""The rates of the machine: at which memory is read, and at which the model's drives are read.

A figure printed beside one of these rates was measured in the same run. One thread uses them.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from k3 import kernels
from k3.base.direct_io import ReadFile, span_bytes
from k3.base.huge_pages import HugePages, huge_pages
from k3.base.page_buffers import huge_buffer
from k3.model.keys import Extent
from k3.model.model_source import ModelSource
from k3.store.lending.file_source import DEFAULT_THREADS

MEMORY_BYTES = 512 << 20
"""Memory that is read in one pass: far more than a processor's cache holds."""

MEMORY_PASSES = 3
DRIVE_S = 0.7

SAMPLE_EXPERTS = 512


@dataclass(frozen=True, slots=True)
class DriveRate:
    """The rate of plain reads of whole experts.

    `direct` is True when all of them went past the page cache; `huge_pages` is what the buffers were given.
    """

    bytes_per_s: float
    direct: bool
    huge_pages: HugePages


class MemoryMeter:
    """Measures repeatedly how fast memory is read. Holds `MEMORY_BYTES` of it while it is open.

    Other guests of a host can change the rate by a factor of two within a moment, so it is comparable only with
    what is measured just before or after.
    """

    def __init__(self, threads: int, nbytes: int = MEMORY_BYTES) -> None:
        self._nbytes = nbytes
        left = np.full(nbytes // 2, 7, np.uint8)
        right = left.copy()
        self._parts = list(zip(np.array_split(left, threads), np.array_split(right, threads), strict=True))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="k3-memory")

    def bytes_per_s(self) -> float:
        """Measure the rate: the median of a few passes over the buffers, some 50 ms together.

        Two buffers are compared (`kernels.first_difference`), which reads both and does nothing else.
        """
        rates = []
        for _ in range(MEMORY_PASSES):
            began_s = time.perf_counter()
            list(self._pool.map(lambda pair: kernels.first_difference(*pair), self._parts))
            rates.append(self._nbytes / (time.perf_counter() - began_s))
        return statistics.median(rates)

    def close(self) -> None:
        """End the threads and free the memory."""
        self._pool.shutdown()
        self._parts.clear()

    def __enter__(self) -> MemoryMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def drive_rate(
    source: ModelSource,
    layers: Sequence[int],
    *,
    seconds: float = DRIVE_S,
    seed: int = 0,
    depth: int = DEFAULT_THREADS,
) -> DriveRate | None:
    """Measure plain reads of the experts of `layers`, in random order, on all drives at once.

    `depth` reads are in flight. None when there are no experts; DriveError when one cannot be read.
    """
    dice = random.Random(seed)
    experts = [(layer, expert) for layer in layers for expert in range(source.expert_count(layer))]
    chosen = dice.sample(experts, min(SAMPLE_EXPERTS, len(experts)))
    extents = [extent for layer, expert in chosen for extent in source.expert_extents(layer, expert)]
    if not extents:
        return None
    dice.shuffle(extents)
    stop_s = time.monotonic() + seconds
    # Readers share no extent, so that none reads bytes that another brought into the drive's cache.
    readers = [_Reader(extents[number::depth], stop_s) for number in range(min(depth, len(extents)))]
    began_s = time.monotonic()
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    taken_s = time.monotonic() - began_s
    for reader in readers:
        if reader.failure is not None:
            raise reader.failure
    return DriveRate(
        sum(reader.read_bytes for reader in readers) / taken_s,
        all(reader.direct for reader in readers),
        huge_pages(reader.buffer for reader in readers),
    )


class _Reader(threading.Thread):
    """A thread that reads its extents again and again until the time is over."""

    def __init__(self, extents: Sequence[Extent], stop_s: float) -> None:
        super().__init__(daemon=True)
        self._extents = extents
        self._stop_s = stop_s
        self.buffer = huge_buffer(max(span_bytes(extent.offset, extent.stored_bytes) for extent in extents))
        self.read_bytes = 0
        self.direct = True
        self.failure: Exception | None = None

    def run(self) -> None:
        """Read until the time is over. An error is kept in `failure`."""
        try:
            with ExitStack() as stack:
                files: dict[Path, ReadFile] = {}
                while True:
                    for extent in self._extents:
                        file = files.get(extent.path)
                        if file is None:
                            file = files[extent.path] = stack.enter_context(ReadFile(extent.path))
                            self.direct = self.direct and file.direct
                        file.read(extent.offset, extent.stored_bytes, self.buffer)
                        self.read_bytes += extent.stored_bytes
                        if time.monotonic() >= self._stop_s:
                            return
        except Exception as error:  # raised by the thread that waits for this one
            self.failure = error
