"""`StandIn`: the source that serves while there is no daemon. Opened when it is first needed; any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from k3.base.huge_pages import HugePages
from k3.store.source import ExpertSource, LeaseStream, SourceStats

_NO_SUMS = ("slots", "slot_bytes", "direct")


class StandIn:
    """A source that is opened once. Not to be used under a lock: it reads."""

    def __init__(self, open_source: Callable[[], ExpertSource]) -> None:
        self._open = open_source
        self._opening = threading.Lock()
        self._source: ExpertSource | None = None

    def lease(self, layer: int, experts: Sequence[int]) -> LeaseStream:
        """See `ExpertSource.lease`."""
        return self._opened().lease(layer, experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """See `ExpertSource.prefetch`."""
        return self._opened().prefetch(layer, experts)

    def _opened(self) -> ExpertSource:
        with self._opening:
            if self._source is None:
                self._source = self._open()
            return self._source

    def added_to(self, stats: SourceStats) -> SourceStats:
        """Return the sum of the counters `stats` and these."""
        if self._source is None:
            return stats
        mine = self._source.stats()
        names = [item.name for item in fields(SourceStats) if item.name not in _NO_SUMS]
        sums = {name: getattr(stats, name) + getattr(mine, name) for name in names}
        return replace(stats, **sums, direct=mine.direct)

    def huge_pages(self) -> HugePages:
        """See `ExpertSource.huge_pages`."""
        return HugePages() if self._source is None else self._source.huge_pages()

    def close(self) -> None:
        """Close the source if it was opened."""
        if self._source is not None:
            self._source.close()
