"""From a shard's bytes, in file order, to complete experts and dense tensors.

The streaming thread feeds blocks, of one shard or of several in turns; each run of a shard goes where the plan's
route says. Experts are gathered in page-aligned buffers, since their tensors may lie in any order; dense tensors
pass through `DenseSink`. The same code serves the repack and the comparison with the source: only the destination
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3.base import checksum
from k3.base.direct_io import Bytes
from k3.base.errors import ShardError
from k3.base.pages import page_ceil
from k3.checkpoint.odd_experts import ExpertWatch
from k3.checkpoint.shard import Shard
from k3.model.keys import ExpertKey
from k3.repack.buffers import BufferPool
from k3.repack.dense import OUTPUT_BYTES, DenseSink
from k3.repack.destination import Destination
from k3.repack.plan import ExpertRoute, Plan, PlannedTensor, Route
from k3.repack.scratch_file import Scratch
from k3.repack.shard_stream import ShardBegun, ShardBlock, ShardEnded, ShardStreamer

WRITTEN_EXPERTS = 5
"""Complete experts that may be on their way to the drives."""


@dataclass(slots=True)
class _ShardCursor:
    """A shard that passes: the route that its next bytes take, and the dense tensor that they belong to."""

    path: Path
    routes: list[Route]
    index: int = 0
    dense: DenseSink | None = None


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
        self._resident = streamer.jobs.resident_experts
        self._experts = BufferPool(self._resident + WRITTEN_EXPERTS, page_ceil(largest))
        self._outputs = BufferPool(streamer.jobs.output_buffers, OUTPUT_BYTES)
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

    def stream(
        self, numbers: Sequence[int], on_bytes: Callable[[int], None], on_open: Callable[[Shard], None]
    ) -> Generator[ShardBegun | ShardEnded, None, None]:
        """Stream shards through, and yield the beginning and the end of each as they come.

        `on_bytes` is told of every block's size, `on_open` of every shard before its file is opened.
        """
        cursors: dict[int, _ShardCursor] = {}
        shards = [(number, self._plan.snapshot.shards[number]) for number in numbers]
        with closing(self._streamer.stream(shards, on_open)) as events:
            for event in events:
                if isinstance(event, ShardBlock):
                    self._block(cursors[event.number], event.offset, event.data)
                    on_bytes(len(event.data))
                    continue
                if isinstance(event, ShardBegun):
                    path = self._plan.snapshot.shards[event.number].path
                    cursors[event.number] = _ShardCursor(path, self._plan.routes(event.number))
                else:
                    self._empty_tensors(cursors.pop(event.number))
                yield event

    def _block(self, cursor: _ShardCursor, offset: int, block: Bytes) -> None:
        """Send a shard's next bytes where they belong."""
        end = offset + len(block)
        while cursor.index < len(cursor.routes) and cursor.routes[cursor.index].offset < end:
            route = cursor.routes[cursor.index]
            begun = max(0, offset - route.offset)
            start = max(route.offset, offset) - offset
            stop = min(route.offset + route.nbytes, end) - offset
            data = block[start:stop]
            last = route.offset + route.nbytes <= end
            if isinstance(route.to, ExpertRoute):
                if route.nbytes:  # a part without elements adds nothing
                    self._expert_bytes(cursor.path, route, route.to, begun, data, last)
            elif route.to is not None:
                if cursor.dense is None:
                    cursor.dense = DenseSink(route.to, cursor.path, self._destination, self._outputs)
                cursor.dense.feed(data)
                if last:
                    cursor.dense.finish()
                    cursor.dense = None
            if not last:
                break
            cursor.index += 1

    def _empty_tensors(self, cursor: _ShardCursor) -> None:
        """Tensors without elements at the very end of a shard belong to no block."""
        for route in cursor.routes[cursor.index :]:
            if route.nbytes:
                raise ShardError("shard ended before its last tensor", path=cursor.path, offset=route.offset)
            if isinstance(route.to, PlannedTensor):
                DenseSink(route.to, cursor.path, self._destination, self._outputs).finish()

    def _expert_bytes(
        self, path: Path, route: Route, to: ExpertRoute, begun: int, data: Bytes, last: bool
    ) -> None:
        if self._plan.in_place:
            self._digest_in_place(path, route.offset + begun, to, begun, data)
            return
        key = to.key
        payload_bytes = self._plan.layers[key.layer].layout.payload_bytes
        if key in self._scratch or (key not in self._open and len(self._open) >= self._resident):
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
