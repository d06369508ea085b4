"""The ledger that the verdicts "sound", "equal" and "finished" follow from: bytes to prove, and bytes proven.

A check that finds no fault has proven nothing yet: perhaps it could not read. So every proof of the project keeps
a ledger. Everything to be proven is entered before the first read, from the manifest, the catalog or the plan. A
unit is settled only by the line of code that compared its bytes and found them equal (or, in a repack, by the
journal's record that they are durable). A verdict is a pure function of ledgers and findings (docs/proof.md).

`Ledger` is an immutable value. A `Tally` is filled from several threads and makes one.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Ledger(Generic[K]):
    """Bytes by unit: `required` of each unit that had to be proven, `proven` of those that were.

    A unit of 0 bytes (a listing, an empty tensor) is proven by an entry of 0; without an entry it is open.
    """

    required: Mapping[K, int]
    proven: Mapping[K, int]

    @property
    def required_bytes(self) -> int:
        """Bytes that had to be proven."""
        return sum(self.required.values())

    @property
    def proven_bytes(self) -> int:
        """Bytes that were proven, of required units only."""
        return sum(nbytes for unit, nbytes in self.proven.items() if unit in self.required)

    @property
    def proven_units(self) -> int:
        """Number of required units that were proven to their last byte."""
        return len(self.required) - len(self.open())

    @property
    def complete(self) -> bool:
        """True if every required unit was proven to its last byte."""
        return not self.open()

    def open(self) -> list[K]:
        """Return the required units that were not proven to their last byte, in the order of `required`."""
        return [unit for unit, nbytes in self.required.items() if self.proven.get(unit) != nbytes]

    def counts(self) -> dict[str, Any]:
        """Return the totals as a JSON object."""
        return {
            "required_units": len(self.required),
            "compared_units": self.proven_units,
            "required_bytes": self.required_bytes,
            "compared_bytes": self.proven_bytes,
        }


class Tally(Generic[K]):
    """A ledger in the making. Any thread may call `settle`; call `require` before the first thread starts."""

    def __init__(self, required: Mapping[K, int] | None = None) -> None:
        self._lock = threading.Lock()
        self._required: dict[K, int] = dict(required or {})
        self._proven: dict[K, int] = {}
        self._runs: dict[K, list[tuple[int, int]]] = {}  # for units that are proven part by part

    def require(self, unit: K, nbytes: int) -> None:
        """Enter a unit that has to be proven. Raises ValueError when it was entered with another size."""
        if self._required.setdefault(unit, nbytes) != nbytes:
            raise ValueError(f"{unit!r} is required with {self._required[unit]} and with {nbytes} bytes")

    def settle(self, unit: K, start: int = 0, stop: int | None = None) -> None:
        """Enter bytes [start, stop) of a unit as proven, by default all of them.

        Bytes that are entered twice count once. Raises ValueError for a unit that is not required and for bytes
        outside of it.
        """
        with self._lock:
            nbytes = self._required.get(unit)
            stop = nbytes if stop is None else stop
            if nbytes is None or stop is None or not 0 <= start <= stop <= nbytes:
                raise ValueError(f"bytes {start} to {stop} of {unit!r} were not required")
            if (start, stop) == (0, nbytes):
                self._proven[unit] = nbytes
                self._runs.pop(unit, None)
            elif unit not in self._proven:
                self._runs.setdefault(unit, []).append((start, stop))

    def ledger(self) -> Ledger[K]:
        """Return all that is settled so far."""
        with self._lock:
            proven = {unit: distinct_bytes(runs) for unit, runs in self._runs.items()}
            proven.update(self._proven)
            return Ledger(MappingProxyType(dict(self._required)), MappingProxyType(proven))


def distinct_bytes(runs: Iterable[tuple[int, int]]) -> int:
    """Return the number of bytes that the ranges [start, stop) cover; overlaps count once. Pure."""
    total = reached = 0
    for start, stop in sorted(runs):
        total += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
