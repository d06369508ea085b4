"""Holds up: the daemon's RAM is decided by every limit there is, and what does not fit is refused with numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import UnsupportedError
from k3.base.memory_limit import Limit
from k3.store.daemon.cache_budget import CachePlan, Wanted, plan_cache

GB = 10**9
LIMITS = [Limit(64 * GB, "the machine"), Limit(20 * GB, "cgroup /a"), Limit(30 * GB, "cgroup /")]
WANTED = Wanted(slot_bytes=10**7, experts=5000, dense_bytes=4 * GB, rings_bytes=10**6, least_slots=100)


def test_the_tightest_limit_decides() -> None:
    plan = plan_cache(LIMITS, WANTED)
    left = 20 * GB - 2 * GB - 4 * GB - 10**6  # free, a tenth of it, dense, rings
    assert plan.slots == left // 10**7 == 1399
    assert plan.cache_bytes == plan.slots * 10**7


def test_every_term_is_printed() -> None:
    text = "\n".join(plan_cache(LIMITS, WANTED).lines())
    for part in ("the machine", "cgroup /a", "cgroup /", "64.000 GB", "reserve", "dense", "rings", "1399 slots"):
        assert part in text


def test_no_more_than_the_model() -> None:
    plan = plan_cache([Limit(10**15, "x")], WANTED)
    assert plan.slots == 5000
    assert "every expert" in plan.lines()[-1]


def test_a_wish_is_granted_exactly_or_refused() -> None:
    assert plan_cache(LIMITS, replace(WANTED, cache_bytes=5 * GB)).slots == 500
    with pytest.raises(UnsupportedError, match=r"does not fit into the 13\.999 GB that cgroup /a leaves"):
        plan_cache(LIMITS, replace(WANTED, cache_bytes=14 * GB))


def test_a_cache_that_cannot_work_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"would hold 99 experts and needs at least 100 \(1\.000 GB\)"):
        plan_cache(LIMITS, replace(WANTED, cache_bytes=GB - 1))
    with pytest.raises(UnsupportedError, match="would hold 0 experts") as raised:
        plan_cache([Limit(5 * GB, "cgroup /a")], WANTED)
    assert "dense tensors 4.000 GB" in str(raised.value)


def test_the_reserve_can_be_chosen() -> None:
    assert plan_cache(LIMITS, replace(WANTED, reserve_bytes=0)).slots == 1599


def test_a_system_that_tells_nothing() -> None:
    assert plan_cache([], WANTED).slots == 5000


@given(
    st.lists(st.integers(0, 10**12), max_size=4),
    st.integers(4096, 10**8), st.integers(1, 10**5), st.integers(0, 10**11), st.integers(1, 500),
    st.none() | st.integers(0, 10**12), st.none() | st.integers(0, 10**11),
)  # fmt: skip
def test_what_is_granted_always_fits(
    frees: list[int], slot: int, experts: int, dense: int, least: int, cache: int | None, reserve: int | None
) -> None:
    wanted = Wanted(slot, experts, dense, 0, least, cache, reserve)
    try:
        plan = plan_cache([Limit(free, str(free)) for free in frees], wanted)
    except UnsupportedError:
        return
    assert isinstance(plan, CachePlan)
    assert wanted.least_slots <= plan.slots <= max(experts, least)
    assert plan.cache_bytes + dense + (reserve or 0) <= min(frees, default=math.inf)
    if cache is not None:
        assert plan.cache_bytes <= cache
