"""`SlotTable`: the buffers of a source, which expert lies in which, and which of them the cache keeps.

A slot is free, lent to a reader (`take_slot` until `settle`, `settle_ahead` or `give_up`), held (`holders` of its
resident), kept by the cache until its room is needed, or ahead: read on a guess and not asked for yet. Does no I/O
and has no lock: the source's lock guards it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from k3.base.direct_io import Bytes
from k3.base.page_buffers import huge_buffer
from k3.base.pages import page_ceil
from k3.model.keys import ExpertKey
from k3.store.local.eviction import LayeredLru, divide
from k3.store.source import POISON, Payload, read_only


@dataclass(slots=True)
class Resident:
    """An expert in RAM: held by `holders` leases (or by a stream that will hand it out), or kept if 0."""

    key: ExpertKey
    slot: int
    payload: Payload
    holders: int = 0


class SlotTable:
    """`working_slots` slots, as many as the cache may keep and the model can fill, and `ahead_slots` for guesses.

    All of them are one region of memory, in huge pages where the system has them.
    """

    def __init__(
        self,
        slot_bytes: int,
        working_slots: int,
        cache_slots: int,
        counts: Mapping[int, int],
        *,
        ahead_slots: int = 0,
        debug: bool,
    ) -> None:
        quotas = divide(cache_slots, counts)
        self.slot_bytes = slot_bytes
        slots = working_slots + sum(quotas.values()) + ahead_slots
        stride = page_ceil(slot_bytes)
        self.region = huge_buffer(slots * stride)
        self._buffers = [self.region[slot * stride : (slot + 1) * stride] for slot in range(slots)]
        self._views = [read_only(buffer) for buffer in self._buffers]
        self._ahead: OrderedDict[ExpertKey, Resident] = OrderedDict()
        self._free = list(range(len(self._buffers)))
        self._kept = LayeredLru(quotas)
        self._residents: dict[ExpertKey, Resident] = {}
        self._debug = debug
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._residents

    @property
    def has_free(self) -> bool:
        """Whether `take_slot` would cost nothing."""
        return bool(self._free)

    @property
    def ahead(self) -> int:
        """Experts that are here on a guess."""
        return len(self._ahead)

    def is_ahead(self, key: ExpertKey) -> bool:
        """Whether an expert is here on a guess."""
        return key in self._ahead

    def buffer(self, slot: int) -> Bytes:
        """The writable buffer of a slot, for the reader that it is lent to."""
        return self._buffers[slot]

    def hold(self, key: ExpertKey) -> Resident | None:
        """One holder more for an expert that is in RAM; None when it is not. It is not ahead from then on."""
        resident = self._residents.get(key)
        if resident is None:
            return None
        if resident.holders == 0 and self._ahead.pop(key, None) is None:
            taken = self._kept.take(key)
            assert taken, f"{key} is neither held nor kept"
        resident.holders += 1
        return resident

    def let_go(self, resident: Resident) -> None:
        """One holder less; the last one leaves the expert to the cache."""
        assert resident.holders > 0
        resident.holders -= 1
        if resident.holders == 0:
            victim = self._kept.put(resident.key)
            if victim is not None:
                self._evict(victim)

    def take_slot(self) -> int:
        """Lend a slot for reading. If none is free, a guess makes room, else what the cache has kept longest."""
        if not self._free and self._ahead:
            self.drop_ahead()
        if not self._free:
            victim = self._kept.drop_oldest()
            assert victim is not None, "every slot is lent or held: the caller had no right to one"
            self._evict(victim)
        return self._free.pop()

    def settle(self, key: ExpertKey, slot: int, begin: int, end: int, holders: int) -> Resident:
        """The lent slot now holds an expert, its payload from `begin` to `end`, for this many holders."""
        assert key not in self._residents
        assert holders > 0
        resident = Resident(key, slot, self._views[slot][begin:end], holders)
        self._residents[key] = resident
        return resident

    def settle_ahead(self, key: ExpertKey, slot: int, begin: int, end: int) -> None:
        """The lent slot now holds an expert that nobody has asked for yet."""
        assert key not in self._residents
        self._residents[key] = self._ahead[key] = Resident(key, slot, self._views[slot][begin:end])

    def renew_ahead(self, key: ExpertKey) -> bool:
        """Make a guess the newest one, the last to go; False when the expert is not here on a guess."""
        if key not in self._ahead:
            return False
        self._ahead.move_to_end(key)
        return True

    def drop_ahead(self) -> None:
        """Take back the slot of the oldest guess."""
        key, resident = self._ahead.popitem(last=False)
        del self._residents[key]
        self.give_up(resident.slot)

    def give_up(self, slot: int) -> None:
        """The lent slot holds nothing of use."""
        if self._debug:
            self._buffers[slot].fill(POISON)
        self._free.append(slot)

    def _evict(self, key: ExpertKey) -> None:
        self.give_up(self._residents.pop(key).slot)
        self.evictions += 1
