"""From a shard's bytes, in file order, to complete experts and dense tensors.

The streaming thread feeds blocks; each run of a shard goes where the plan's route says. Experts are gathered in
page-aligned buffers, since their tensors may lie in any order; dense tensors pass through `DenseSink`. The same
code serves the repack and the comparison with the source: only the destination differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3.base import checksum
from k3.base.direct_io import Bytes
from k3.base.errors import ShardError
from k3.base.pages import page_ceil
from k3.checkpoint.odd_experts import ExpertWatch
from k3.model.keys import ExpertKey
from k3.repack.buffers import BufferPool
from k3.repack.dense import OUTPUT_BYTES, DenseSink
from k3.repack.destination import Destination
from k3.repack.plan import ExpertRoute, Plan, PlannedTensor, Route
from k3.repack.scratch_file import Scratch
from k3.repack.shard_stream import ShardStreamer

RESIDENT_EXPERTS = 4
"""Experts that may be incomplete in memory at once; further ones wait in the scratch file."""
EXPERT_BUFFERS = RESIDENT_EXPERTS + 5
OUTPUT_BUFFERS = 8


@dataclass(slots=True)
class _OpenExpert:
    buffer: Bytes
    arrived_bytes: int = 0


@dataclass(slots=True)
class _InPlaceExpert:
    """An expert that stays in the source: only its extents' digests are taken."""

    offsets: list[tuple[str, int, int]]  # path, offset, bytes of each extent
    watch: ExpertWatch
    hashers: list[Any] = field(default_factory=list)
    arrived_bytes: int = 0


class Assembler:
    """Routes shards into a destination. One per run; called from one thread."""

    def __init__(self, plan: Plan, destination: Destination, streamer: ShardStreamer, scratch: Path) -> None:
        self.odd: dict[ExpertKey, tuple[str, ...]] = {}  # what is odd about experts as they were published
        self._plan = plan
        self._destination = destination
        self._streamer = streamer
        largest = max((layer.layout.payload_bytes for layer in plan.layers.values()), default=1)
        self._experts = BufferPool(EXPERT_BUFFERS, page_ceil(largest))
        self._outputs = BufferPool(OUTPUT_BUFFERS, OUTPUT_BYTES)
        self._scratch = Scratch(scratch, largest)
        self._open: dict[ExpertKey, _OpenExpert] = {}
        self._in_place: dict[ExpertKey, _InPlaceExpert] = {}

    def close(self) -> None:
        """Give the scratch file up."""
        self._scratch.close()

    @property
    def buffers(self) -> list[Bytes]:
        """Those of experts and of quantized rows."""
        return [*self._experts.made, *self._outputs.made]

    def unfinished(self) -> list[ExpertKey]:
        """Experts of which only some bytes have come so far, in order."""
        return sorted({*self._open, *self._in_place, *self._scratch_keys()})

    def _scratch_keys(self) -> list[ExpertKey]:
        return [key for key in self._plan.experts() if key in self._scratch]

    def shard(self, number: int, sha256: Any, on_bytes: Callable[[int], None]) -> None:
        """Stream one shard through. `sha256` may be None; `on_bytes` is told of every block's size."""
        shard = self._plan.snapshot.shards[number]
        routes = self._plan.routes(number)
        index = 0
        dense: DenseSink | None = None
        for offset, block in self._streamer.stream(shard.path, shard.size_bytes, sha256):
            end = offset + len(block)
            while index < len(routes) and routes[index].offset < end:
                route = routes[index]
                begun = max(0, offset - route.offset)
                start = max(route.offset, offset) - offset
                stop = min(route.offset + route.nbytes, end) - offset
                data = block[start:stop]
                last = route.offset + route.nbytes <= end
                if isinstance(route.to, ExpertRoute):
                    if route.nbytes:  # a part without elements adds nothing
                        self._expert_bytes(shard.path, route, route.to, begun, data, last)
                elif route.to is not None:
                    if dense is None:
                        dense = DenseSink(route.to, shard.path, self._destination, self._outputs)
                    dense.feed(data)
                    if last:
                        dense.finish()
                        dense = None
                if not last:
                    break
                index += 1
            on_bytes(len(block))
        self._empty_tensors(routes[index:], shard.path)

    def _empty_tensors(self, rest: list[Route], path: Path) -> None:
        """Tensors without elements at the very end of a shard belong to no block."""
        for route in rest:
            if route.nbytes:
                raise ShardError("shard ended before its last tensor", path=path, offset=route.offset)
            if isinstance(route.to, PlannedTensor):
                DenseSink(route.to, path, self._destination, self._outputs).finish()

    def _expert_bytes(
        self, path: Path, route: Route, to: ExpertRoute, begun: int, data: Bytes, last: bool
    ) -> None:
        if self._plan.in_place:
            self._digest_in_place(path, route.offset + begun, to, begun, data)
            return
        key = to.key
        payload_bytes = self._plan.layers[key.layer].layout.payload_bytes
        if key in self._scratch or (key not in self._open and len(self._open) >= RESIDENT_EXPERTS):
            if key not in self._scratch:
                self._scratch.open_expert(key)
            if self._scratch.write(key, to.payload_offset, begun, data, last) == payload_bytes:
                buffer = self._experts.take()
                self._scratch.take(key, buffer)
                self._complete(key, buffer, payload_bytes)
            return
        expert = self._open.get(key)
        if expert is None:
            expert = self._open[key] = _OpenExpert(self._experts.take())
        start = to.payload_offset + begun
        expert.buffer[start : start + len(data)] = data
        expert.arrived_bytes += len(data)
        if expert.arrived_bytes == payload_bytes:
            del self._open[key]
            self._complete(key, expert.buffer, payload_bytes)

    def _complete(self, key: ExpertKey, buffer: Bytes, payload_bytes: int) -> None:
        buffer[payload_bytes : page_ceil(payload_bytes)] = 0
        watch = ExpertWatch(self._plan.layers[key.layer].layout)
        watch.feed(0, buffer[:payload_bytes])
        self._judge(key, watch)
        self._destination.expert(key, buffer, self._experts)

    def _judge(self, key: ExpertKey, watch: ExpertWatch) -> None:
        problems = watch.problems()
        if problems:
            self.odd[key] = problems

    def _digest_in_place(self, path: Path, offset: int, to: ExpertRoute, begun: int, data: Bytes) -> None:
        key, layout = to.key, self._plan.layers[to.key.layer].layout
        expert = self._in_place.get(key)
        if expert is None:
            extents = self._plan.source_extents(key)
            places = [(str(extent.path), extent.offset, extent.stored_bytes) for extent in extents]
            expert = self._in_place[key] = _InPlaceExpert(
                places, ExpertWatch(layout), [checksum.Hasher() for _ in places]
            )
        for index, (extent_path, start, nbytes) in enumerate(expert.offsets):
            if extent_path == str(path) and start <= offset < start + nbytes:
                expert.hashers[index].update(data.data)
                break
        else:
            raise AssertionError("a part of an expert lies outside its extents")
        expert.watch.feed(to.payload_offset + begun, data)
        expert.arrived_bytes += len(data)
        if expert.arrived_bytes == layout.payload_bytes:
            del self._in_place[key]
            self._judge(key, expert.watch)
            self._destination.expert_in_place(key, tuple(hasher.digest() for hasher in expert.hashers))
