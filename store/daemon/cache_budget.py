"""How much RAM the daemon takes: decided once, before anything is loaded, every term printable. Pure.

free      the tightest of: MemAvailable, every cgroup above the process (v2 and v1), the address space limit
- reserve what the rest of the machine keeps
- dense   the dense tensors, which every engine shares
- rings   the rings of as many clients as are allowed
= cache   rounded down to whole slots; no more than the whole model, or what clients are promised if that is more

Nothing is clamped: what was asked for and does not fit is refused with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from k3.base.errors import UnsupportedError
from k3.base.memory_limit import Limit, gb

RESERVE_SHARE = 0.1
RESERVE_BYTES_MIN = 1 << 30
"""Kept for everybody else: a tenth of what is free, at least 1 GiB."""

SLOTS_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the daemon would hold. `cache_bytes` None: as much as there is, at most all experts."""

    slot_bytes: int
    experts: int
    dense_bytes: int
    rings_bytes: int
    least_slots: int
    cache_bytes: int | None = None
    reserve_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the budget."""

    name: str
    size_bytes: float


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The decision and every term of it."""

    slots: int
    slot_bytes: int
    terms: tuple[Term, ...]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the arena."""
        return self.slots * self.slot_bytes

    def lines(self) -> list[str]:
        """For people: one line per term."""
        width = max(len(term.name) for term in self.terms)
        return [f"{term.name:<{width}}  {_shown(term.size_bytes):>14}" for term in self.terms]


def plan_cache(limits: Sequence[Limit], wanted: Wanted) -> CachePlan:
    """Decide the number of slots. UnsupportedError with every number when it does not fit."""
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=Limit(math.inf, "nothing"))
    free_bytes = tightest.free_bytes
    reserve_bytes = _reserve(free_bytes) if wanted.reserve_bytes is None else wanted.reserve_bytes
    left_bytes = free_bytes - reserve_bytes - wanted.dense_bytes - wanted.rings_bytes
    most = min(max(wanted.experts, wanted.least_slots), SLOTS_MAX)
    if wanted.cache_bytes is not None:
        slots = min(most, wanted.cache_bytes // wanted.slot_bytes)
    elif math.isinf(left_bytes):
        slots = most
    else:
        slots = min(most, max(0, int(left_bytes)) // wanted.slot_bytes)
    whole = ", every expert of the model" if slots >= wanted.experts else ""
    terms = (
        *(Term(f"free: {limit.set_by}", limit.free_bytes) for limit in limits),
        Term(f"free by the tightest: {tightest.set_by}", free_bytes),
        Term("- reserve for everything else", reserve_bytes),
        Term("- dense tensors", wanted.dense_bytes),
        Term("- clients' rings", wanted.rings_bytes),
        Term("= left for experts", left_bytes),
        Term(f"cache: {slots} slots of {wanted.slot_bytes} bytes{whole}", slots * wanted.slot_bytes),
    )
    plan = CachePlan(slots, wanted.slot_bytes, terms)
    _refuse(plan, wanted, tightest, left_bytes)
    return plan


def _refuse(plan: CachePlan, wanted: Wanted, tightest: Limit, left_bytes: float) -> None:
    """UnsupportedError when the plan holds too few experts to work, or more than there is room for."""
    numbers = "; ".join(f"{term.name} {_shown(term.size_bytes)}" for term in plan.terms)
    if plan.slots < wanted.least_slots:
        least_bytes = wanted.least_slots * wanted.slot_bytes
        raise UnsupportedError(
            f"the cache would hold {plan.slots} experts and needs at least {wanted.least_slots} "
            f"({gb(least_bytes)}) ({numbers})",
            advice="Give it more memory (--cache-gb, the cgroup's limit), a smaller --reserve-gb, or fewer "
            "--max-clients",
        )
    if plan.cache_bytes > left_bytes:
        raise UnsupportedError(
            f"a cache of {gb(plan.cache_bytes)} does not fit into the {gb(left_bytes)} that "
            f"{tightest.set_by} leaves ({numbers})",
            advice="Ask for a smaller --cache-gb, or leave it out to take what there is",
        )


def _reserve(free_bytes: float) -> int:
    return RESERVE_BYTES_MIN if math.isinf(free_bytes) else max(RESERVE_BYTES_MIN, int(free_bytes * RESERVE_SHARE))


def _shown(size_bytes: float) -> str:
    return "unlimited" if math.isinf(size_bytes) else gb(size_bytes)
