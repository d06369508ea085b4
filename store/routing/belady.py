"""The best that any cache could do, knowing the future: a bound for the policies, not one of them.

An expert that must go is the one wanted again latest (Belady). Experts of one set are needed together, so none of
them goes for another; a set larger than the cache is served through it, and what stays are the experts of cache
and set that are wanted again soonest. (So a cache that holds just one set can do worse than a smaller one, which
nobody asks to hold a set as a whole.) All experts count as equally large. Pure.
"""

from __future__ import annotations

import heapq

import numpy as np

from k3.store.routing.trace_requests import Numbers, Requests


def belady_misses(requests: Requests, cache_slots: int) -> Numbers:
    """Experts of each set that even the best choice must read, [R]. The cache starts empty."""
    if cache_slots < 1:
        raise ValueError("a cache needs room for at least one expert")
    keys, coming = requests.keys.tolist(), next_use(requests).tolist()
    bounds = requests.starts.tolist()
    misses = np.zeros(len(requests), np.int64)
    cache: dict[int, int] = {}  # key -> set that wants it next
    latest: list[tuple[int, int]] = []  # heap of (-next use, key); an entry that disagrees with `cache` is void
    for number in range(len(requests)):
        wanted = dict(zip(*(part[bounds[number] : bounds[number + 1]] for part in (keys, coming)), strict=True))
        misses[number] = len(wanted) - sum(key in cache for key in wanted)
        if len(wanted) > cache_slots:
            everything = {**cache, **wanted}
            cache = dict(heapq.nsmallest(cache_slots, everything.items(), key=lambda item: item[1]))
            latest = [(-use, key) for key, use in cache.items()]
            heapq.heapify(latest)
            continue
        cache.update(wanted)  # their old entries in the heap are void now, and the new ones not in yet
        while len(cache) > cache_slots:
            use, key = heapq.heappop(latest)
            if cache.get(key) == -use:
                del cache[key]
        for key, use in wanted.items():
            heapq.heappush(latest, (-use, key))
    return misses


def first_uses(requests: Requests) -> Numbers:
    """Experts of each set that no set before it asked for, [R]: the misses of a cache without bounds."""
    first = np.zeros(len(requests.experts), np.int64)
    first[np.unique(requests.keys, return_index=True)[1]] = 1
    return np.diff(np.concatenate([[0], np.cumsum(first)])[requests.starts])


def next_use(requests: Requests) -> Numbers:
    """For each wanted expert the number of the next set that wants it, [N]; the number of sets if none does."""
    keys = requests.keys
    of_set = np.repeat(np.arange(len(requests)), requests.sizes)
    order = np.argsort(keys, kind="stable")
    following = np.full(len(keys), len(requests), np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    following[order[:-1][same]] = of_set[order[1:][same]]
    return following
