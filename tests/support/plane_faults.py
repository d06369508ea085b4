"""Scripted and seeded faults of the drives under a `FileSource`, in the native data plane's own reads."""

from __future__ import annotations

import errno

from k3.store.lending.file_source import FileSource
from tests.support.faults import STALL_MS, Fault

ANY_FILE = -1
FAR = 1 << 62

_NATIVE = {"short": "short", "eio": "error", "flip": "flip", "stall": "stall"}
_ARGUMENTS = {"short": 1, "eio": errno.EIO, "flip": 0, "stall": STALL_MS}


class PlaneFaults:
    """Faults of the reads of a source: a script, and a share of reads that come up short."""

    def __init__(self, source: FileSource, *script: Fault, noise: float = 0.0, seed: int = 0) -> None:
        self._plane = source.plane
        for fault in script:
            begin, end = (0, FAR) if fault.offset is None else (fault.offset, fault.offset + 1)
            self._plane.inject(
                _NATIVE[fault.kind],
                file=ANY_FILE if fault.path is None else source.file_number(fault.path),
                begin=begin,
                end=end,
                times=fault.times,
                probability=1.0,
                argument=_ARGUMENTS[fault.kind],
                seed=seed,
            )
        for short_bytes in (1, 4096, 5000) if noise else ():
            self._inject_short(short_bytes, noise / 3, seed)

    def watch(self) -> None:
        """Note every read from now on in `begun`, and change none."""
        self._inject_short(FAR, 1.0, 0)

    @property
    def begun(self) -> list[int]:
        """The offsets of the reads that had a fault or were watched, in the order in which they began."""
        return [offset for _, offset in self._plane.struck]

    @property
    def struck(self) -> int:
        """The number of faults that happened."""
        return self._plane.fired

    def resume(self) -> None:
        """End every fault, also those to come, and the stalls that have begun."""
        self._plane.clear_faults()

    def resume_begun(self) -> None:
        """End the stalls that have begun."""
        self._plane.resume_stalls()

    def _inject_short(self, short_bytes: int, probability: float, seed: int) -> None:
        self._plane.inject(
            "short", file=ANY_FILE, begin=0, end=FAR, times=-1, probability=probability, argument=short_bytes,
            seed=seed,
        )  # fmt: skip


def noisy(source: FileSource, noise: float, seed: int) -> FileSource:
    """Return the source with a share of its reads coming up short."""
    PlaneFaults(source, noise=noise, seed=seed)
    return source
