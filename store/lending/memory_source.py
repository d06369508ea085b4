"""`MemorySource`: experts that are in RAM already. For tests and for models that fit.

Payloads are copied once when the source is made and never change. Thread-safe; nothing here ever waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from k3.base.huge_pages import HugePages
from k3.model.keys import ExpertKey
from k3.store.source import Lease, Payload, SourceStats, checked_request, poisoned_on_release, read_only


class MemorySource:
    """An `ExpertSource` over payload bytes held in a dictionary."""

    def __init__(self, payloads: Mapping[ExpertKey, bytes | Payload], *, debug: bool = False) -> None:
        self._payloads = {
            key: read_only(np.frombuffer(payload, dtype=np.uint8).copy()) for key, payload in payloads.items()
        }
        self._counts = Counter(key.layer for key in payloads)
        for key in payloads:
            if not 0 <= key.expert < self._counts[key.layer]:
                raise ValueError(f"experts of layer {key.layer} are not numbered from 0 without gaps")
        self._debug = debug
        self._lock = threading.Lock()
        self._hits = 0
        self._held = 0
        self._closed = False

    def lease(self, layer: int, experts: Sequence[int]) -> MemoryStream:
        """See `ExpertSource.lease`. Experts arrive in the order of the request."""
        ids = checked_request(layer, experts, self._counts)
        with self._lock:
            if self._closed:
                raise ValueError("the source is closed")
            self._hits += len(ids)
        return MemoryStream(self, [ExpertKey(layer, expert) for expert in ids])

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """See `ExpertSource.prefetch`. Everything is in RAM already."""
        checked_request(layer, experts, self._counts)
        if self._closed:
            raise ValueError("the source is closed")
        return lambda: None

    def stats(self) -> SourceStats:
        """See `ExpertSource.stats`."""
        largest = max((payload.size for payload in self._payloads.values()), default=0)
        return SourceStats(hits=self._hits, slots=len(self._payloads), slot_bytes=largest)

    def huge_pages(self) -> HugePages:
        """See `ExpertSource.huge_pages`. None were asked for."""
        return HugePages()

    def close(self) -> None:
        """See `ExpertSource.close`."""
        with self._lock:
            self._closed = True

    @property
    def held(self) -> int:
        """Leases that were handed out and not released."""
        return self._held

    def _hand_out(self, key: ExpertKey) -> Lease:
        with self._lock:
            if self._closed:
                raise ValueError("the source was closed")
            self._held += 1
        payload = self._payloads[key]
        on_release = self._release
        if self._debug:
            payload, on_release = poisoned_on_release(payload, on_release)
        return Lease(key.layer, key.expert, payload, on_release)

    def _release(self) -> None:
        with self._lock:
            self._held -= 1


class MemoryStream:
    """The leases of one request; nothing to give back early."""

    def __init__(self, source: MemorySource, keys: list[ExpertKey]) -> None:
        self._leases: Iterator[Lease] = map(partial(MemorySource._hand_out, source), keys)

    def __iter__(self) -> Iterator[Lease]:
        return self

    def __next__(self) -> Lease:
        return next(self._leases)

    def close(self) -> None:
        """See `LeaseStream.close`."""
        self._leases = iter(())
