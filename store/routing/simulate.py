"""Replays a routing trace against a cache policy, and counts what would have been read with this much room.

A set of experts of one layer is served as the daemon serves it: all of the set that is in is held first, then
the missing ones come in one after the other and are held too, and at the end everything is given back, in that
order. A set that is larger than the room gives back what it got first to go on. Pure; any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from k3.store._store import Policy
from k3.store.routing.belady import belady_misses, first_uses
from k3.store.routing.trace_requests import Key, Numbers, Requests

BELADY = "belady"
"""The name under which tables show the best possible."""


class Cache(Protocol):
    """The part of a cache policy that a replay calls; `Policy` has it."""

    def access(self, layer: int, expert: int) -> bool:
        """Note that an expert is wanted now; True when it is in."""

    def insert(self, layer: int, expert: int) -> list[Key]:
        """Take in an expert; return those that left for it. RuntimeError when none may leave."""

    def hold(self, layer: int, expert: int) -> None:
        """Keep an expert in until `unhold`."""

    def unhold(self, layer: int, expert: int) -> None:
        """Let a held expert leave again."""


@dataclass(frozen=True, slots=True)
class Result:
    """One replay. Hits and misses count experts, one for each set that wants it."""

    policy: str
    cache_slots: int
    hits: int
    misses: int
    bytes_read: int

    @property
    def hit_rate(self) -> float:
        """Hits of all wanted experts; 0 when nothing was wanted."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All numbers, the rate included."""
        return {**asdict(self), "hit_rate": self.hit_rate}


def simulate(
    requests: Requests,
    policy: str,
    cache_slots: int,
    pins: Sequence[Key] = (),
) -> Result:
    """Replay with an empty cache of this policy, or with `BELADY`. `pins` are for pin-lru only.

    ValueError for an unknown policy, no room, pins that leave none, or pins for another policy.
    """
    if policy == BELADY:
        if pins:
            raise ValueError("only pin-lru takes pins")
        return _result(requests, policy, cache_slots, belady_misses(requests, cache_slots))
    if len(set(pins)) >= cache_slots:
        raise ValueError(f"{len(set(pins))} pins leave no room in a cache of {cache_slots} experts")
    cache = Policy(policy, cache_slots, requests.header.counts, list(pins))
    return _result(requests, policy, cache_slots, replay(requests, cache))


def compulsory(requests: Requests) -> Result:
    """Return what a cache with room for everything reads: each expert once, when it is first wanted."""
    misses = first_uses(requests)
    return _result(requests, "compulsory", int(misses.sum()), misses)


def replay(requests: Requests, cache: Cache) -> Numbers:
    """Experts of each set that had to be read, [R]."""
    experts, starts = requests.experts.tolist(), requests.starts.tolist()
    misses = np.zeros(len(requests), np.int64)
    for number, layer in enumerate(requests.layers.tolist()):
        misses[number] = _serve(cache, layer, experts[starts[number] : starts[number + 1]])
    return misses


def _serve(cache: Cache, layer: int, experts: Iterable[int]) -> int:
    """Serve one set; how many of it were not in."""
    held: deque[int] = deque()
    missing = []
    for expert in experts:
        if cache.access(layer, expert):
            cache.hold(layer, expert)
            held.append(expert)
        else:
            missing.append(expert)
    for expert in missing:
        while not _insert(cache, layer, expert):
            cache.unhold(layer, held.popleft())
        cache.hold(layer, expert)
        held.append(expert)
    for expert in held:
        cache.unhold(layer, expert)
    return len(missing)


def _insert(cache: Cache, layer: int, expert: int) -> bool:
    """Return True if there was room. The expert is not in, so no room is the only ground for a refusal."""
    try:
        cache.insert(layer, expert)
    except RuntimeError:
        return False
    return True


def _result(requests: Requests, policy: str, cache_slots: int, misses: Numbers) -> Result:
    missed = int(misses.sum())
    read_bytes = sum(  # of Python's numbers, which have no end
        int(misses[requests.layers == entry.layer].sum()) * entry.payload_bytes for entry in requests.header.layers
    )
    return Result(policy, cache_slots, len(requests.experts) - missed, missed, read_bytes)
