"""Which experts are odd, from sound pieces that several threads read in any order.

A container that faithfully holds odd bytes is sound, so nothing here is a finding: it is told as a note.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from k3.checkpoint.odd_experts import ExpertWatch
from k3.model.keys import ExpertKey, ExpertLayout
from k3.verify.target import Target


@dataclass(slots=True)
class _PartlySeen:
    watch: ExpertWatch
    seen_bytes: int = 0


class OddPieces:
    """Collects what pieces show. An expert is judged when all of it was seen, then it is forgotten unless odd.

    May be called from any thread.
    """

    def __init__(self, layouts: Mapping[int, ExpertLayout]) -> None:
        self._layouts = layouts
        self._lock = threading.Lock()
        self._partly: dict[ExpertKey, _PartlySeen] = {}
        self._odd: dict[ExpertKey, tuple[str, ...]] = {}

    def watch(self, target: Target) -> ExpertWatch | None:
        """Return a watch for the bytes of one piece, for the thread that reads it; None for a dense tensor."""
        layout = None if target.expert is None or target.layer is None else self._layouts.get(target.layer)
        return None if layout is None else ExpertWatch(layout)

    def add(self, target: Target, watch: ExpertWatch | None) -> None:
        """Take in what the watch of a piece has seen, once its digest was found to be right."""
        if watch is None or target.layer is None or target.expert is None:
            return
        key = ExpertKey(target.layer, target.expert)
        with self._lock:
            partly = self._partly.setdefault(key, _PartlySeen(watch))
            if partly.watch is not watch:
                partly.watch.add(watch)
            partly.seen_bytes += target.payload_bytes
            if partly.seen_bytes >= self._layouts[key.layer].payload_bytes:
                del self._partly[key]
                self._judge(key, partly.watch.problems())

    def found(self) -> dict[ExpertKey, tuple[str, ...]]:
        """Return what is odd about which expert. Of experts seen in part, only what that part shows."""
        with self._lock:
            for key, partly in self._partly.items():
                self._judge(key, partly.watch.problems(whole=False))
            self._partly.clear()
            return dict(self._odd)

    def _judge(self, key: ExpertKey, problems: tuple[str, ...]) -> None:
        if problems:
            self._odd[key] = problems
