"""Complete experts that are useless: weights that are all zero, or scale bytes that no trained weight has.

A published checkpoint may hold such bytes, or a download that was filled up with them. They are copied and proven
like any others. This module reports them as published, so that nobody takes them for damage of a container.

`ExpertWatch` is for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from k3.model.keys import ExpertKey, ExpertLayout, ExpertPart

RESERVED_SCALE = 255
"""The scale byte that is not a number (NaN, in formats that have one)."""

SCALE_MAX = 127 + 40
"""The largest scale byte of a useful weight: a factor of 2^40. An expert's output multiplies three of them."""

_GLANCE_BYTES = 256
_MAGNITUDES = 0x77  # of the two numbers in a byte, without their signs
_LISTED = 5  # experts named in a note before "and N more"


class ExpertWatch:
    """Inspects one expert's payload as it is copied, in ranges of any size and in any order."""

    def __init__(self, layout: ExpertLayout) -> None:
        self._parts = [part for part in layout.parts if part.nbytes and part.name.endswith(("_packed", "_scale"))]
        self._largest: dict[str, int] = {}  # scale byte, by part
        self._used: set[str] = set()

    def feed(self, start: int, data: npt.NDArray[np.uint8]) -> None:
        """Inspect the payload's bytes from `start` on."""
        for part in self._parts:
            first, last = max(part.offset, start), min(part.offset + part.nbytes, start + len(data))
            if first < last:
                self._look(part, data[first - start : last - start])

    def add(self, other: ExpertWatch) -> None:
        """Add the results of another watch over the same expert."""
        self._used |= other._used
        for name, largest in other._largest.items():
            self._largest[name] = max(largest, self._largest.get(name, 0))

    def problems(self, *, whole: bool = True) -> tuple[str, ...]:
        """Return the oddities of the bytes inspected so far, one phrase for each part.

        Unless the `whole` payload was inspected, a part is not reported as all zeros: its other bytes may not be.
        """
        phrases = []
        for part in self._parts:
            largest = self._largest.get(part.name, 0)
            if largest == RESERVED_SCALE:
                phrases.append(f"{part.name} has the byte {RESERVED_SCALE}, which stands for no number")
            elif largest > SCALE_MAX:
                phrases.append(f"{part.name} has the byte {largest}, a factor of 2^{largest - 127}")
            elif whole and part.name.endswith("_packed") and part.name not in self._used:
                phrases.append(f"{part.name} is all zeros")
        return tuple(phrases)

    def _look(self, part: ExpertPart, data: npt.NDArray[np.uint8]) -> None:
        if part.name.endswith("_scale"):
            self._largest[part.name] = max(int(data.max()), self._largest.get(part.name, 0))
        elif part.name not in self._used:
            glance = data[:_GLANCE_BYTES]
            if (glance & _MAGNITUDES).any() or (data & _MAGNITUDES).any():
                self._used.add(part.name)


def odd_experts_note(odd: Mapping[ExpertKey, tuple[str, ...]]) -> str | None:
    """Return a sentence that names odd experts as published ones, None when there are none."""
    if not odd:
        return None
    named = [f"layer {key.layer} expert {key.expert} ({', '.join(odd[key])})" for key in sorted(odd)[:_LISTED]]
    more = f" and {len(odd) - _LISTED} more" if len(odd) > _LISTED else ""
    return (
        f"as published, these experts are odd: {'; '.join(named)}{more}; a run ends where it "
        f"needs an expert with the scale byte {RESERVED_SCALE}"
    )
