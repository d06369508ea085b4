"""Which experts stay in RAM after they were given back: a pure policy, no I/O and no locks.

A token touches every layer in turn. One LRU list over all layers that is smaller than a token's whole set
therefore evicts every expert before its layer comes round again, and never hits. So the room is divided
among the layers, and each layer keeps its own least-recently-used order.

The policy knows only experts that nobody holds; a held expert is taken out (`take`) and comes back as the
newest one (`put`). Call from one thread at a time (the source's lock).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from k3.model.keys import ExpertKey


def divide(slots: int, counts: Mapping[int, int]) -> dict[int, int]:
    """Divide `slots` among layers as evenly as whole numbers allow, no layer getting more than it has experts.

    `counts` maps layer to number of experts. Earlier layers get the odd ones. The sum is
    min(slots, all experts).
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


class LayeredLru:
    """Least recently used first out, each layer within its own quota."""

    def __init__(self, quotas: Mapping[int, int]) -> None:
        self._quotas = dict(quotas)
        self._layers: dict[int, OrderedDict[int, int]] = {layer: OrderedDict() for layer in quotas}
        self._clock = 0

    def __len__(self) -> int:
        return sum(len(order) for order in self._layers.values())

    def __contains__(self, key: ExpertKey) -> bool:
        return key.expert in self._layers[key.layer]

    def take(self, key: ExpertKey) -> bool:
        """Take an expert out because somebody holds it now; False when it is not here."""
        return self._layers[key.layer].pop(key.expert, None) is not None

    def put(self, key: ExpertKey) -> ExpertKey | None:
        """Bring an expert in as its layer's newest; the one that must go for it, possibly itself."""
        order = self._layers[key.layer]
        assert key.expert not in order, f"{key} is in the cache already"
        quota = self._quotas[key.layer]
        if quota == 0:
            return key
        self._clock += 1
        order[key.expert] = self._clock
        if len(order) <= quota:
            return None
        oldest, _ = order.popitem(last=False)
        return ExpertKey(key.layer, oldest)

    def drop_oldest(self) -> ExpertKey | None:
        """Take out the expert unused for longest, whatever its layer; None when there is none."""
        oldest: tuple[int, ExpertKey] | None = None
        for layer, order in self._layers.items():
            if order:
                expert, clock = next(iter(order.items()))
                if oldest is None or clock < oldest[0]:
                    oldest = (clock, ExpertKey(layer, expert))
        if oldest is None:
            return None
        self.take(oldest[1])
        return oldest[1]
