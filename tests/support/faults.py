"""Scripted and seeded faults of drives, kernels and cables.

`DriveFaults.open` opens files whose reads follow a script; `FaultySource` disturbs the leases of any source.
Both are deterministic for a seed and a single thread; print the seed when something fails.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from k3.base.direct_io import ReadFile, aligned_buffer
from k3.base.errors import K3Error
from k3.base.huge_pages import HugePages
from k3.model.keys import ExpertKey
from k3.store.source import ExpertSource, Lease, LeaseStream, SourceStats

Kind = Literal["short", "eintr", "eio", "flip", "stall"]

STALL_MS = 100_000
"""Argument of a stall injected into a native server that is to last until `clear_faults`."""


@dataclass
class Fault:
    """A fault of reads of `path` (any file if None) that cover byte `offset` (any if None).

    It happens `times` times. A stall lasts until `DriveFaults.resume`.
    """

    kind: Kind
    path: Path | None = None
    offset: int | None = None
    times: int = 1

    def strikes(self, path: Path, start: int, count: int) -> bool:
        """Return True if a read of `count` bytes from `start` has this fault."""
        right_file = self.path is None or path == self.path
        return self.times > 0 and right_file and (self.offset is None or start <= self.offset < start + count)


@dataclass
class DriveFaults:
    """A drive with a script. `noise` is the share of all other reads that come up short or interrupted."""

    script: list[Fault] = field(default_factory=list)
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        self._resumed = threading.Event()
        self.struck: list[Fault] = []
        self.opened: list[Path] = []
        self.calls = 0

    def open(self, path: Path, direct: bool) -> ReadFile:
        """Open a file on this drive; fits `DenseLoad(opener=...)`."""

        def preadv(fd: int, buffers: Sequence[Any], offset: int) -> int:
            return self._preadv(path, fd, buffers, offset)

        self.opened.append(path)
        return ReadFile(path, direct=direct, preadv=preadv)

    def resume(self) -> None:
        """End every stall, also those to come."""
        self._resumed.set()

    def _preadv(self, path: Path, fd: int, buffers: Sequence[Any], offset: int) -> int:
        (target,) = buffers
        with self._lock:
            self.calls += 1
            kind, fault = self._choose(path, offset, len(target))
            dice = self._random.random()
        if kind == "eintr":
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        if kind == "eio":
            raise OSError(errno.EIO, "Input/output error")
        if kind == "stall":
            assert self._resumed.wait(60), "nobody ended the stall"
        if kind == "short" and len(target) > 1:
            return _short_read(fd, target, offset, 1 + int(dice * (len(target) - 1)))
        count = os.preadv(fd, [target], offset)
        if kind == "flip":
            at = int(dice * count) if fault is None or fault.offset is None else fault.offset - offset
            target[at] ^= 1 << int(dice * 8)
        return count

    def _choose(self, path: Path, offset: int, count: int) -> tuple[Kind | None, Fault | None]:
        for fault in self.script:
            if fault.strikes(path, offset, count):
                fault.times -= 1
                self.struck.append(fault)
                return fault.kind, fault
        if self._random.random() < self.noise:
            return self._random.choice(("short", "eintr")), None
        return None, None


def _short_read(fd: int, target: Any, offset: int, count: int) -> int:
    """Read all, deliver `count` bytes: a kernel may stop anywhere, but only asks a drive for whole sectors."""
    whole: Any = aligned_buffer(len(target))[: len(target)]
    count = min(count, os.preadv(fd, [whole], offset))
    target[:count] = whole[:count]
    return count


class FaultySource:
    """A source whose leases arrive in another order, and some of which fail.

    Up to `window` leases are held back to be shuffled (so the inner source needs that many slots). An expert in
    `failures` raises its error instead of arriving, once.
    """

    def __init__(
        self,
        inner: ExpertSource,
        *,
        seed: int = 0,
        window: int = 4,
        failures: Mapping[ExpertKey, K3Error] | None = None,
    ) -> None:
        self._inner = inner
        self._random = random.Random(seed)
        self._window = window
        self._failures = dict(failures or {})

    def lease(self, layer: int, experts: Sequence[int]) -> _FaultyStream:
        """See `ExpertSource.lease`."""
        random_order = random.Random(self._random.random())
        return _FaultyStream(self._inner.lease(layer, experts), random_order, self._window, self._failures)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """Prefetch from the inner source; no fault happens here."""
        return self._inner.prefetch(layer, experts)

    def huge_pages(self) -> HugePages:
        """Return the huge pages of the inner source."""
        return self._inner.huge_pages()

    def stats(self) -> SourceStats:
        """Return the inner source's counters."""
        return self._inner.stats()

    def close(self) -> None:
        """Close the inner source."""
        self._inner.close()


class _FaultyStream:
    def __init__(
        self, inner: LeaseStream, order: random.Random, window: int, failures: dict[ExpertKey, K3Error]
    ) -> None:
        self._inner = inner
        self._order = order
        self._window = window
        self._failures = failures
        self._waiting: list[Lease] = []

    def __iter__(self) -> Iterator[Lease]:
        return self

    def __next__(self) -> Lease:
        try:
            while len(self._waiting) < self._window:
                lease = next(self._inner, None)
                if lease is None:
                    break
                self._waiting.append(lease)
                failure = self._failures.pop(ExpertKey(lease.layer, lease.expert), None)
                if failure is not None:
                    raise failure
        except BaseException:
            self.close()
            raise
        if not self._waiting:
            raise StopIteration
        return self._waiting.pop(self._order.randrange(len(self._waiting)))

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop().release()
        self._inner.close()
