"""Which extents to read back: a part of five, two and a half percent, fifty gigabytes, or all. Pure.

The order is a shuffle by a seed, so that a part is spread over all files and drives; the same seed and list give
the same choice on any machine. Parts 1/n to n/n with one seed are disjoint and make up everything: a nightly
job with n = 7 has read the whole container after a week.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from k3.base.option_types import parse_size
from k3.verify.target import Target

_PART = re.compile(r"^(\d{1,9})/(\d{1,9})$")
_PERCENT = re.compile(r"^(\d+(?:\.\d+)?)%$")


@dataclass(frozen=True, slots=True)
class Selection:
    """The amount to read: `part` of `parts` by count of extents, or a percentage or a number of bytes.

    Exactly one of the three is set. Percentages and bytes are met or exceeded by less than one extent, as far as
    there are that many bytes.
    """

    part: tuple[int, int] | None = None
    percent: float | None = None
    nbytes: int | None = None

    def choose(self, targets: Sequence[Target], seed: int) -> list[Target]:
        """Return the chosen targets, in the order of `targets`."""
        order = list(range(len(targets)))
        random.Random(seed).shuffle(order)
        if self.part is not None:
            number, parts = self.part
            chosen = order[number - 1 :: parts]
        else:
            wanted_bytes = self.nbytes
            if self.percent is not None:
                wanted_bytes = round(sum(target.stored_bytes for target in targets) * self.percent / 100)
            assert wanted_bytes is not None
            chosen = []
            for index in order:
                if wanted_bytes <= 0:
                    break
                chosen.append(index)
                wanted_bytes -= targets[index].stored_bytes
        return [targets[index] for index in sorted(chosen)]

    def __str__(self) -> str:
        if self == EVERYTHING:
            return "all"
        if self.part is not None:
            return f"{self.part[0]}/{self.part[1]}"
        return f"{self.nbytes}B" if self.percent is None else f"{self.percent:g}%"


EVERYTHING = Selection(part=(1, 1))


def parse_selection(text: str) -> Selection:
    """Return the selection that "1/5", "2.5%", "50G" or "all" means. ValueError says what is allowed."""
    text = text.strip()
    if text.lower() == "all":
        return EVERYTHING
    if match := _PART.match(text):
        number, parts = int(match[1]), int(match[2])
        if not 1 <= number <= parts:
            raise ValueError(f"{text!r} is not a part: 1/5 is the first of five, 5/5 the last")
        return Selection(part=(number, parts))
    if match := _PERCENT.match(text):
        percent = float(match[1])
        if not 0 < percent <= 100:
            raise ValueError(f"{text!r} is not a share above 0% and up to 100%")
        return Selection(percent=percent)
    try:
        nbytes = parse_size(text)
    except ValueError:
        allowed = "a part such as 1/5, a share such as 2.5%, a size such as 50G, or all"
        raise ValueError(f"{text!r} is none of: {allowed}") from None
    if nbytes < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return Selection(nbytes=nbytes)
