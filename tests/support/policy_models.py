"""The cache policies in words and in the plainest code: what the native ones must equal, step for step.

`k3.store._store` runs the same five in C++; property tests drive both and compare every answer. These here look
for a victim by going through all keys. Pure: no I/O, no
clock, no randomness. One thread.

A policy holds at most `capacity` keys. A key is *held* while somebody reads it or waits for it, and free
otherwise; only free keys may leave. Every key has two stamps from one counter that rises with each event: when it
was last *used* (access, insertion, or end of the last hold) and when it joined its queue, if the policy has any.

lru
    The free key that was used least recently goes.
pin-lru
    The same, but the keys named as pins never go once they are in.
layer-lru
    The room is divided among the layers (`divide`). For a newcomer whose layer has its share or more,
    held keys included, that layer's least recently used free key goes. Otherwise, or when that layer has no free
    key, the least recently used of the layers that have more than their share goes; if those have no free key,
    the least recently used of all.
least-stale
    A layer is visited when one of its experts is accessed after another layer's. Each layer offers its least
    recently used free key; the offer's staleness is the number of visits of that layer since the one in which the
    key was last accessed or inserted. The stalest offer goes; of equally stale ones, that of the layer that comes
    round last: the layer accessed last, then the one below it and so on, then from the top layer down.
s3-fifo
    Newcomers join the small queue, or the main queue if they are remembered: of the keys evicted from the small
    queue, the newest `capacity` - `capacity` // 10 are. Each access of a key that is in counts, up to 3. While the
    small queue holds `capacity` // 10 keys (at least 1) or main is empty, the small queue's oldest free key is
    looked at: counted more than once it moves to main and its count starts again, otherwise it goes. Else main's
    oldest free key is looked at: counted at all it moves to the end and counts one less, otherwise it goes. A
    queue without a free key leaves its turn to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

Key = tuple[int, int]
"""Layer and expert."""


def divide(slots: int, counts: Mapping[int, int]) -> dict[int, int]:
    """Divide `slots` among layers as evenly as whole numbers allow, no layer getting more than it has experts.

    `counts` maps layer to number of experts. Earlier layers get the odd ones. The sum is min(slots, all experts).
    """
    smallest_first = sorted(counts, key=lambda layer: (counts[layer], layer))
    quotas = {}
    left = slots
    while smallest_first and counts[smallest_first[0]] <= left // len(smallest_first):
        layer = smallest_first.pop(0)  # takes less than its share: the others divide what it leaves
        quotas[layer] = counts[layer]
        left -= counts[layer]
    for index, layer in enumerate(sorted(smallest_first)):
        share, odd = divmod(left, len(smallest_first))
        quotas[layer] = share + (index < odd)
    return quotas


class Policy(Protocol):
    """The methods that the native policies and those of this module have in common."""

    @property
    def capacity(self) -> int:
        """Most keys at once."""

    def __len__(self) -> int: ...

    def contains(self, layer: int, expert: int) -> bool:
        """Return True if a key is in."""

    def held(self, layer: int, expert: int) -> bool:
        """Return True if a key is in and held."""

    def access(self, layer: int, expert: int) -> bool:
        """Note that a key is wanted now; return True if it is in."""

    def insert(self, layer: int, expert: int) -> list[Key]:
        """Take in a key; return those that left for it.

        ValueError when it is in already; RuntimeError, and nothing has changed, when no key may leave.
        """

    def evict_one(self) -> Key | None:
        """Take out the key that would leave next; None when none may leave."""

    def hold(self, layer: int, expert: int) -> None:
        """One hold more. ValueError when the key is not in."""

    def unhold(self, layer: int, expert: int) -> None:
        """One hold less. ValueError when the key is not held."""

    def remove(self, layer: int, expert: int) -> None:
        """Take a key out whatever its state: its read failed. ValueError when it is not in."""


@dataclass(slots=True)
class _Entry:
    """The record of a key that is in. A key that was not accessed since it came in has `count` 0."""

    used: int
    holds: int = 0
    visit: int = 0
    joined: int = 0
    in_small: bool = True
    count: int = 0


class PolicyModel:
    """The books that all policies share; which key goes is left to `victim`."""

    name: ClassVar[str]

    def __init__(self, capacity: int, counts: Mapping[int, int], pins: Sequence[Key] = ()) -> None:
        if capacity < 1:
            raise ValueError("a policy needs room for at least one expert")
        if pins and self.name != "pin-lru":
            raise ValueError("only pin-lru takes pins")
        self._capacity = capacity
        self._counts = dict(counts)
        self._pins = frozenset(pins)
        self._entries: dict[Key, _Entry] = {}
        self._clock = 0

    @property
    def capacity(self) -> int:
        """See `Policy`, also for the methods that follow."""
        return self._capacity

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self._entries

    def held(self, layer: int, expert: int) -> bool:
        return self.contains(layer, expert) and self._entries[layer, expert].holds > 0

    def access(self, layer: int, expert: int) -> bool:
        self.passing(layer)
        if not self.contains(layer, expert):
            return False
        entry = self._entries[layer, expert]
        entry.used = self.tick()
        self.accessed((layer, expert), entry)
        return True

    def insert(self, layer: int, expert: int) -> list[Key]:
        key = (layer, expert)
        if key in self._entries:
            raise ValueError(f"{key} is in already")
        evicted = []
        if len(self._entries) == self._capacity:
            victim = self.victim(key)
            if victim is None:
                raise RuntimeError("no key may leave: there is no room for one more")
            self.left(victim, self._entries.pop(victim))
            evicted.append(victim)
        self._entries[key] = _Entry(self.tick())
        self.joined(key, self._entries[key])
        return evicted

    def evict_one(self) -> Key | None:
        victim = self.victim(None)
        if victim is not None:
            self.left(victim, self._entries.pop(victim))
        return victim

    def hold(self, layer: int, expert: int) -> None:
        if not self.contains(layer, expert):
            raise ValueError(f"{layer, expert} is not in")
        self._entries[layer, expert].holds += 1

    def unhold(self, layer: int, expert: int) -> None:
        if not self.held(layer, expert):
            raise ValueError(f"{layer, expert} is not held")
        entry = self._entries[layer, expert]
        entry.holds -= 1
        if entry.holds == 0:
            entry.used = self.tick()

    def remove(self, layer: int, expert: int) -> None:
        if not self.contains(layer, expert):
            raise ValueError(f"{layer, expert} is not in")
        del self._entries[layer, expert]

    def tick(self) -> int:
        """Return a stamp later than all before it."""
        self._clock += 1
        return self._clock

    def free(self) -> Iterator[tuple[Key, _Entry]]:
        """Yield the keys that may leave."""
        for key, entry in self._entries.items():
            if entry.holds == 0 and key not in self._pins:
                yield key, entry

    def least_recent(self, keys: Iterator[tuple[Key, _Entry]]) -> Key | None:
        """Return the one of these keys that was used least recently."""
        return min(keys, key=lambda item: item[1].used, default=(None, None))[0]

    def victim(self, incoming: Key | None) -> Key | None:
        """Return the key that leaves, for a newcomer or without one; None when none may."""
        raise NotImplementedError

    def passing(self, layer: int) -> None:
        """Note that an expert of this layer is wanted, in or not."""

    def accessed(self, key: Key, entry: _Entry) -> None:
        """Note that a key that is in was accessed."""

    def joined(self, key: Key, entry: _Entry) -> None:
        """Note that a key came in."""

    def left(self, key: Key, entry: _Entry) -> None:
        """Note that a key was evicted."""


class LruModel(PolicyModel):
    """One order of use over all layers."""

    name = "lru"

    def victim(self, incoming: Key | None) -> Key | None:
        """Return the free key used least recently."""
        return self.least_recent(self.free())


class PinLruModel(LruModel):
    """LRU among the keys that are not pinned."""

    name = "pin-lru"


class LayerLruModel(PolicyModel):
    """Room divided among the layers."""

    name = "layer-lru"

    def victim(self, incoming: Key | None) -> Key | None:
        """Let the newcomer's own layer pay if it has its share, else those that have more, else anybody."""
        shares = divide(self._capacity, self._counts)
        present = dict.fromkeys(self._counts, 0)
        for key in self._entries:
            present[key[0]] += 1
        if incoming is not None and present[incoming[0]] >= shares[incoming[0]]:
            own = self.least_recent(item for item in self.free() if item[0][0] == incoming[0])
            if own is not None:
                return own
        over = (item for item in self.free() if present[item[0][0]] > shares[item[0][0]])
        return self.least_recent(over) or self.least_recent(self.free())


class LeastStaleModel(PolicyModel):
    """The key that its own layer passed over most often goes first."""

    name = "least-stale"

    def __init__(self, capacity: int, counts: Mapping[int, int], pins: Sequence[Key] = ()) -> None:
        super().__init__(capacity, counts, pins)
        self._layer = -1
        self._visits = dict.fromkeys(counts, 0)

    def passing(self, layer: int) -> None:
        """Count a visit when the layer is another than before."""
        self._visits[layer] += layer != self._layer
        self._layer = layer

    def accessed(self, key: Key, entry: _Entry) -> None:
        """Note that a key is used in this visit."""
        entry.visit = self._visits[key[0]]

    def joined(self, key: Key, entry: _Entry) -> None:
        """Note that a key is used in this visit."""
        entry.visit = self._visits[key[0]]

    def victim(self, incoming: Key | None) -> Key | None:
        """Return the stalest offer."""
        downwards = sorted(self._counts, reverse=True)
        order = [layer for layer in downwards if layer <= self._layer] + [
            layer for layer in downwards if layer > self._layer
        ]
        offers = [self.least_recent(item for item in self.free() if item[0][0] == layer) for layer in order]
        some = [offer for offer in offers if offer is not None]
        return max(some, key=self._staleness, default=None)  # the first of equals

    def _staleness(self, key: Key) -> int:
        return self._visits[key[0]] - self._entries[key].visit


class S3FifoModel(PolicyModel):
    """Two queues and the memory of who left the first."""

    name = "s3-fifo"

    def __init__(self, capacity: int, counts: Mapping[int, int], pins: Sequence[Key] = ()) -> None:
        super().__init__(capacity, counts, pins)
        self._small_target = max(1, capacity // 10)
        self._ghosts_max = capacity - capacity // 10
        self._ghosts: list[Key] = []

    def accessed(self, key: Key, entry: _Entry) -> None:
        """Count, up to 3."""
        entry.count = min(3, entry.count + 1)

    def joined(self, key: Key, entry: _Entry) -> None:
        """To the small queue, or to main if it is remembered."""
        entry.joined = self.tick()
        entry.in_small = key not in self._ghosts
        if not entry.in_small:
            self._ghosts.remove(key)

    def left(self, key: Key, entry: _Entry) -> None:
        """Remember who left the small queue."""
        if entry.in_small:
            self._ghosts = [*self._ghosts, key][-self._ghosts_max :]

    def victim(self, incoming: Key | None) -> Key | None:
        """Look at oldest keys until one goes; each that does not has its count lowered or its queue changed."""
        while True:
            small = [entry for entry in self._entries.values() if entry.in_small]
            small_first = len(small) >= self._small_target or len(small) == len(self._entries)
            key = self._oldest(in_small=small_first) or self._oldest(in_small=not small_first)
            if key is None:
                return None
            entry = self._entries[key]
            if entry.in_small and entry.count > 1:
                entry.in_small, entry.count = False, 0
            elif not entry.in_small and entry.count > 0:
                entry.count -= 1
            else:
                return key
            entry.joined = self.tick()

    def _oldest(self, *, in_small: bool) -> Key | None:
        queue = (item for item in self.free() if item[1].in_small == in_small)
        return min(queue, key=lambda item: item[1].joined, default=(None, None))[0]


MODELS: dict[str, type[PolicyModel]] = {
    model.name: model for model in (LayerLruModel, LruModel, S3FifoModel, LeastStaleModel, PinLruModel)
}
"""The policies by name, in the order in which tables show them."""


def make_model(name: str, capacity: int, counts: Mapping[int, int], pins: Sequence[Key] = ()) -> PolicyModel:
    """Return an empty policy of this name. ValueError for another name, no room, or pins that it does not take."""
    if name not in MODELS:
        raise ValueError(f"no policy is called {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name](capacity, counts, pins)
