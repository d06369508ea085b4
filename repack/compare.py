"""The proof: every byte of a container against a second read of the source.

The source streams through the same plan and assembler as in the repack; this destination, instead of writing,
reads the container back from the drives and compares: experts byte for byte, dense tensors with a fresh
quantization, headers and small files with what they must be. Nothing is taken from the page cache where the
drive can be read directly; where it cannot, cached pages are dropped first and the result says so. Every shard is
hashed as it passes, and its digest compared with the manifest's. The verdict is `comparison`'s.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from k3 import kernels
from k3.base import checksum
from k3.base.direct_io import Bytes, ReadFile, aligned_buffer, span_bytes
from k3.base.errors import DriveError
from k3.base.huge_pages import huge_pages
from k3.base.ledger import Ledger, Tally
from k3.base.presence import status, was_absent
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import ROOT_NAME
from k3.container.reader import Container, went_away
from k3.model.keys import ExpertKey
from k3.model.kinds import MANIFEST_NAME
from k3.repack.assemble import Assembler
from k3.repack.buffers import BufferPool
from k3.repack.comparison import (
    Cause,
    ComparedUnit,
    Comparison,
    Difference,
    expert_unit,
    required_shards,
    required_units,
    shard_problem,
    tensor_extents,
)
from k3.repack.interrupts import result, submit
from k3.repack.jobs import ONE, Jobs
from k3.repack.plan import Plan, PlannedExtent, PlannedTensor
from k3.repack.shard_stream import ShardBegun, ShardStreamer
from k3.repack.throttle import Throttle

READERS = 3
TASKS_MAX = 36
"""Comparisons that may wait for a reader."""
DIFFERENCES_MAX = 1000
"""Differences that are described; further ones are only counted."""


class CompareDestination:
    """Compares a plan's units with a container. Called from the streaming thread."""

    def __init__(self, plan: Plan, container: Container, *, direct: bool = True) -> None:
        self.experts: set[ExpertKey] = set()
        self.tensors: set[int] = set()
        self.differences: list[Difference] = []
        self.counts: Counter[Cause] = Counter()
        self.fell_back: set[str] = set()
        self._plan = plan
        self._container = container
        self._direct = direct
        self._readers = ThreadPoolExecutor(READERS, "compare")
        self._lock = threading.Lock()
        self._files: dict[int, ReadFile] = {}
        largest = max((piece.stored_bytes for layer in plan.layers.values() for piece in layer.pieces), default=0)
        self._buffers = BufferPool(READERS + 1, max(largest, 4 << 20))
        self._tasks: list[Future[None]] = []
        self._rendered = container.manifest.render()
        self._tally = Tally(required_units(plan, self._small_sizes()))
        self._shards = Tally(required_shards(container.manifest, plan.snapshot.shards))
        self._told: set[ComparedUnit | str] = (
            set()
        )  # open units, and names of shards, of which a difference says why

    # -- Destination

    def expert(self, key: ExpertKey, buffer: Bytes, pool: BufferPool) -> None:
        """Compare an expert's pieces, each with what its root holds."""
        found = self._extents(key)
        wanted = self._plan.expert_extents(key)
        name = self._plan.layers[key.layer].layout.prefix + f".{key.expert}"
        if not self._same_places(found, wanted, key):
            pool.give(buffer)
            return
        pieces = self._plan.layers[key.layer].pieces

        def work() -> None:
            try:
                for part, (piece, planned, extent) in enumerate(zip(pieces, wanted, found, strict=True)):
                    start = piece.payload_offset
                    expected = buffer[start : start + piece.stored_bytes]
                    self._range(
                        expert_unit(key, part), planned, planned.offset, expected, extent.digest, key, name
                    )
            finally:
                pool.give(buffer)

        self.experts.add(key)
        self._submit(work)

    def expert_in_place(self, key: ExpertKey, digests: tuple[bytes, ...]) -> None:
        """Compare the digests of an expert that stays in the source with the catalog's."""
        found = self._extents(key)
        if self._same_places(found, self._plan.expert_extents(key), key):
            for part, (extent, digest) in enumerate(zip(found, digests, strict=True)):
                unit = expert_unit(key, part)
                if extent.digest == digest:
                    self._tally.settle(unit)
                else:
                    path = self._container.file_path(extent.file)
                    self._differ(unit, "source bytes do not match the catalog's digest", path, extent.offset, key)
            self.experts.add(key)

    def dense_block(
        self,
        tensor: PlannedTensor,
        planned: PlannedExtent,
        offset: int,
        data: Bytes,
        buffer: Bytes,
        pool: BufferPool,
    ) -> None:
        """Compare whole pages of the dense blob."""
        unit = ComparedUnit("tensor", tensor.position, part=tensor_extents(tensor).index(planned))

        def work() -> None:
            try:
                self._range(unit, planned, offset, data, None, None, tensor.source.name)
            finally:
                pool.give(buffer)

        self._submit(work)

    def tensor(self, tensor: PlannedTensor, digests: tuple[bytes, ...]) -> None:
        """Compare the digests of a tensor that was quantized anew with the catalog's."""
        name = tensor.source.name
        path = self._container.file_path(0)
        entry_unit = ComparedUnit("entry", tensor.position)
        wanted = tensor_extents(tensor)
        for part, planned in enumerate(wanted):
            if not planned.stored_bytes:  # a tensor without elements: no block will come
                self._tally.settle(ComparedUnit("tensor", tensor.position, part=part))
        try:
            entry = self._container.tensor(name)
        except KeyError:
            self._differ(entry_unit, "catalog has no such tensor", path, None, None, name)
            return
        catalogued = [entry.weights, *([] if entry.scales is None else [entry.scales])]
        if [_place(item) for item in catalogued] != [_place(planned) for planned in wanted]:
            self._differ(entry_unit, "catalog points elsewhere than the source's plan", path, None, None, name)
        elif tuple(item.digest for item in catalogued) != digests:
            problem = "digest differs from a fresh quantization"
            self._differ(entry_unit, problem, path, tensor.weights.offset, None, name)
        else:
            self._tally.settle(entry_unit)
        self.tensors.add(tensor.position)

    def drain(self) -> None:
        """Wait for comparisons under way."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            result(task)
        while self._files:  # a shard's files are not needed for the next one: few descriptors at any time
            self._files.popitem()[1].close()

    # -- the run's own calls

    @property
    def buffers(self) -> list[Bytes]:
        """The buffers that the container is read into."""
        return self._buffers.made

    def shard(self, number: int, sha256: str) -> None:
        """Compare the digest of a shard that was read whole with the manifest's."""
        shard = self._plan.snapshot.shards[number]
        problem = shard_problem(self._container.manifest, shard, sha256)
        if problem is None:
            self._shards.settle(shard.name)
        else:
            self._differ(shard.name, problem, shard.path, None, None)

    def header(self, number: int) -> None:
        """Compare a written file's header with the plan's."""
        expected = np.frombuffer(self._plan.header(number), np.uint8)
        planned = PlannedExtent(number, 0, len(expected), len(expected))
        for start in range(0, len(expected), self._buffers.nbytes):
            block = expected[start : start + self._buffers.nbytes]
            self._range(ComparedUnit("header", number), planned, start, block, None, None, None)

    def small_files(self) -> None:
        """Compare text files with the source's; manifest, catalog and root files with what they must be."""
        manifest = self._container.manifest
        home = self._container.home
        self._small(home / MANIFEST_NAME, checksum.digest(self._rendered).hex(), self._rendered)
        self._small(home / manifest.catalog.path, manifest.catalog.digest, None)
        for small in manifest.text_files:
            expected = self._plan.snapshot.text_bytes(small.path)
            if expected is None:
                path = home / small.path
                self._differ(ComparedUnit("small", name=str(path)), "file is not in the source", path, None, None)
                continue
            self._small(home / small.path, small.digest, expected)
        for located in self._container.roots:
            if located.root.root_file_digest is not None:
                self._small(located.directory / ROOT_NAME, located.root.root_file_digest, None)

    def completeness(self) -> None:
        """Whatever had to be compared and was not, and of which no difference says why, is one more difference."""
        for unit in self._tally.ledger().open():
            if unit not in self._told:
                self._not_compared(unit)
        for name in self._shards.ledger().open():
            if name not in self._told:
                problem = "the container was made from this shard, which the source does not have"
                self._differ(name, problem, Path(name), None, None)

    def ledgers(self) -> tuple[Ledger[ComparedUnit], Ledger[str]]:
        """Return what was compared so far of the container and of the source's shards."""
        return self._tally.ledger(), self._shards.ledger()

    def _not_compared(self, unit: ComparedUnit) -> None:
        path, key, name = self._container.home, None, None
        problem = "was not compared"
        if unit.kind == "header":
            path = self._container.file_path(unit.number)
            problem = "header was not compared"
        elif unit.kind == "expert":
            key = ExpertKey(unit.number, unit.expert)
            problem = "expert was not compared: the source never gave it whole"
        elif unit.kind == "small":
            path = Path(unit.name)
        else:
            name = self._plan.tensors[unit.number].source.name
            problem = "tensor was not compared: the source never gave it"
        self._differ(unit, problem, path, None, key, name, cause=Cause.UNREADABLE)

    def _small_sizes(self) -> dict[str, int]:
        """Bytes of every small file by path. Of a root.json the manifest has only the digest."""
        manifest = self._container.manifest
        home = self._container.home
        sizes = {str(home / MANIFEST_NAME): len(self._rendered)}
        sizes |= {str(home / small.path): small.bytes for small in (*manifest.text_files, manifest.catalog)}
        for located in self._container.roots:
            if located.root.root_file_digest is not None:
                path = located.directory / ROOT_NAME
                found = status(path)
                sizes[str(path)] = 0 if found is None else found.st_size
        return sizes

    def _small(self, path: Path, digest: str, expected: bytes | None) -> None:
        """Read a small file back from the drive, whole, and compare it."""
        unit = ComparedUnit("small", name=str(path))
        try:
            with self._open(path) as file:
                buffer = aligned_buffer(span_bytes(0, file.size_bytes))
                data = file.read(0, file.size_bytes, buffer).tobytes()
        except DriveError as error:
            self._unreadable(unit, error, path, None, None)
            return
        if expected is not None and data != expected:
            self._differ(unit, "file differs from the source's", path, None, None)
        elif checksum.digest(data).hex() != digest:
            self._differ(unit, "file does not match its digest", path, None, None)
        else:
            self._tally.settle(unit)

    def close(self) -> None:
        """End the threads and close the files."""
        self._readers.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _submit(self, work: Callable[[], None]) -> None:
        if len(self._tasks) >= TASKS_MAX:
            result(self._tasks.pop(0))
        self._tasks.append(submit(self._readers, work))

    def _extents(self, key: ExpertKey) -> list[CatalogExtent]:
        return self._container.catalog.expert(key.layer, key.expert) or []

    def _same_places(self, found: list[CatalogExtent], wanted: Sequence[PlannedExtent], key: ExpertKey) -> bool:
        if [_place(extent) for extent in found] == [_place(planned) for planned in wanted]:
            return True
        problem = "catalog points elsewhere than the source's plan" if found else "catalog has no such expert"
        for part in range(len(wanted)):
            self._told.add(expert_unit(key, part))
        self._differ(expert_unit(key, 0), problem, self._container.home, None, key)
        self.experts.add(key)
        return False

    def _range(
        self,
        unit: ComparedUnit,
        planned: PlannedExtent,
        offset: int,
        expected: Bytes,
        digest: bytes | None,
        key: ExpertKey | None,
        name: str | None,
    ) -> None:
        """Read a range of a unit's extent back and compare it; differences are recorded, not raised."""
        number = planned.file
        path = self._container.file_path(number)
        buffer = self._buffers.take()
        try:
            actual = self._file(number).read(offset, len(expected), buffer)
            index = kernels.first_difference(actual, np.ascontiguousarray(expected))
            if index >= 0:
                what = self._tensor_at(key, name, number, offset + index)
                self._differ(unit, "byte differs from the source", path, offset + index, key, what)
            elif digest is not None and checksum.digest(actual.data) != digest:
                problem = "bytes equal the source, but the catalog's digest does not"
                self._differ(unit, problem, path, offset, key, name)
            else:
                self._tally.settle(unit, offset - planned.offset, offset - planned.offset + len(expected))
        except DriveError as error:
            self._unreadable(unit, error, path, key, name)
        finally:
            self._buffers.give(buffer)

    def _tensor_at(self, key: ExpertKey | None, name: str | None, number: int, offset: int) -> str | None:
        """Return the name of the tensor that a differing byte of an expert belongs to."""
        if key is None:
            return name
        layer = self._plan.layers[key.layer]
        for piece, planned in zip(layer.pieces, layer.extents(key.expert), strict=True):
            if planned.file == number:
                inside = piece.payload_offset + offset - planned.offset
                for part in layer.layout.parts:
                    if part.offset <= inside < part.offset + part.nbytes:
                        return f"{name}.{part.name}"
        return f"{name} (padding)"

    def _file(self, number: int) -> ReadFile:
        with self._lock:
            file = self._files.get(number)
            if file is None:
                file = self._files[number] = self._open(self._container.file_path(number))
        return file

    def _open(self, path: Path) -> ReadFile:
        """Open a file to be read from its drive: past the page cache, or with its pages dropped and that noted."""
        file = ReadFile(path, direct=self._direct)
        if not file.direct:
            try:
                file.drop_cache()
            except DriveError:
                file.close()
                raise
            self.fell_back.add(str(path.parent))
        return file

    def _unreadable(
        self, unit: ComparedUnit, error: DriveError, path: Path, key: ExpertKey | None, name: str | None
    ) -> None:
        """Record that something could not be compared: the file, its root, or the drive does not give it."""
        cause = Cause.UNREADABLE
        if was_absent(error):
            roots = [r for r in self._container.roots if r.directory in path.parents]
            if any(went_away(r.number, self._container.manifest, r.directory) for r in roots):
                cause = Cause.GONE
            elif unit.kind == "small":  # data files were there when the container was opened
                cause = Cause.DIFFERENT
        self._differ(unit, f"cannot be compared: {error.problem}", path, error.offset, key, name, cause=cause)

    def _differ(
        self,
        unit: ComparedUnit | str,
        problem: str,
        path: Path,
        offset: int | None,
        key: ExpertKey | None,
        name: str | None = None,
        *,
        cause: Cause = Cause.DIFFERENT,
    ) -> None:
        layer, expert = (None, None) if key is None else (key.layer, key.expert)
        with self._lock:
            self._told.add(unit)
            self.counts[cause] += 1
            if len(self.differences) < DIFFERENCES_MAX:
                self.differences.append(Difference(problem, str(path), offset, layer, expert, name, cause))


def _place(item: CatalogExtent | PlannedExtent) -> tuple[int, int, int, int]:
    return (item.file, item.offset, item.payload_bytes, item.stored_bytes)


def compare_with_source(
    plan: Plan,
    container: Container,
    *,
    scratch: Path,
    direct: bool = True,
    throttle: Throttle | None = None,
    jobs: Jobs = ONE,
    on_shard: Callable[[str], None] = lambda name: None,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Comparison:
    """Read source and container once more and compare every byte that the container holds.

    `plan` is the source's plan under the container's own recipe and shares; `scratch` names a file that is
    made only if experts lie apart in the source. `on_bytes` is told of source bytes as they pass. Differences
    are in the result; errors of the source itself are raised.
    """
    destination = CompareDestination(plan, container, direct=direct)
    with ShardStreamer(jobs, direct=direct, throttle=throttle) as streamer:
        assembler = Assembler(plan, destination, streamer, scratch)
        try:
            shards = plan.snapshot.shards
            with closing(assembler.stream(range(len(shards)), on_bytes, lambda shard: None)) as events:
                for event in events:
                    if isinstance(event, ShardBegun):
                        on_shard(shards[event.number].name)
                    else:
                        destination.drain()
                        destination.shard(event.number, event.sha256)
            for number, file in enumerate(plan.files):
                if file.kind != "source":
                    destination.header(number)
            destination.small_files()
            destination.completeness()
            granted = huge_pages([*streamer.buffers, *assembler.buffers, *destination.buffers])
        finally:
            assembler.close()
            destination.close()
    ledger, hashed = destination.ledgers()
    return Comparison(
        ledger=ledger,
        shards=hashed,
        experts=len(destination.experts),
        tensors=len(destination.tensors),
        counts=dict(destination.counts),
        differences=tuple(destination.differences),
        through_page_cache=tuple(sorted({*destination.fell_back, *(str(p.parent) for p in streamer.fell_back)})),
        huge_pages=granted,
        odd=assembler.odd,
    )
