"""The destination that writes: units go to `.partial` files, become durable, and enter the journal.

Writes run in a few threads per root. Every `COMMIT_BYTES` the files touched are made durable and the journal
records the finished units. Units that the journal already holds are not written again; their digests are
compared, so that a source that changed between two runs is found.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from k3.base import checksum
from k3.base.direct_io import Bytes, WriteFile
from k3.base.errors import K3Error, ResumeError
from k3.container.layout import PARTIAL_SUFFIX
from k3.model.keys import ExpertKey
from k3.repack.buffers import BufferPool
from k3.repack.interrupts import result, submit
from k3.repack.journal import Journal
from k3.repack.journal_file import ShardRecord
from k3.repack.plan import Plan, PlannedExtent, PlannedTensor

COMMIT_BYTES = 1 << 30
WRITERS_PER_ROOT = 2
OPEN_FILES_MAX = 24


class WriteDestination:
    """Writes a plan's units. Called from the streaming thread; `close` ends the threads."""

    def __init__(self, plan: Plan, directories: Mapping[int, Path], journal: Journal, *, direct: bool) -> None:
        self.fell_back: set[Path] = set()  # directories whose file system does not take O_DIRECT
        self.written_bytes = 0
        self._plan = plan
        self._directories = directories
        self._journal = journal
        self._direct = direct
        self._pools = {root: ThreadPoolExecutor(WRITERS_PER_ROOT, f"write-{root}") for root in directories}
        self._committer = ThreadPoolExecutor(1, "commit")
        self._commit: Future[None] | None = None
        self._files: dict[int, WriteFile] = {}
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._waiting: list[Future[None]] = []
        self._experts: dict[ExpertKey, tuple[bytes, ...]] = {}
        self._tensors: dict[int, tuple[bytes, ...]] = {}
        self._shards: dict[str, ShardRecord] = {}
        self._since_commit_bytes = 0
        self._failure: K3Error | None = None

    # -- Destination

    def expert(self, key: ExpertKey, buffer: Bytes, pool: BufferPool) -> None:
        """Digest the expert's pieces and write them, all roots at once."""
        pieces = self._plan.layers[key.layer].pieces
        runs = [buffer[piece.payload_offset : piece.payload_offset + piece.stored_bytes] for piece in pieces]
        digests = tuple(checksum.digest(run.data) for run in runs)
        if key in self._journal.experts:
            pool.give(buffer)
            self._compare(self._journal.experts[key], digests, f"layer {key.layer} expert {key.expert}")
            return
        extents = self._plan.expert_extents(key)
        remaining = [len(extents)]

        def finished() -> None:
            with self._lock:
                remaining[0] -= 1
                last = remaining[0] == 0
            if last:
                pool.give(buffer)

        for extent, run in zip(extents, runs, strict=True):
            self._write(extent.file, extent.offset, run, finished)
        self._experts[key] = digests
        self._maybe_commit()

    def expert_in_place(self, key: ExpertKey, digests: tuple[bytes, ...]) -> None:
        """Nothing to write: the digests are the product."""
        if key in self._journal.experts:
            self._compare(self._journal.experts[key], digests, f"layer {key.layer} expert {key.expert}")
        else:
            self._experts[key] = digests

    def dense_block(
        self,
        tensor: PlannedTensor,
        planned: PlannedExtent,
        offset: int,
        data: Bytes,
        buffer: Bytes,
        pool: BufferPool,
    ) -> None:
        """Write whole pages of the dense blob."""
        if tensor.position in self._journal.tensors:
            pool.give(buffer)
        else:
            self._write(planned.file, offset, data, lambda: pool.give(buffer))

    def tensor(self, tensor: PlannedTensor, digests: tuple[bytes, ...]) -> None:
        """All blocks of a tensor are on their way."""
        if tensor.position in self._journal.tensors:
            self._compare(self._journal.tensors[tensor.position], digests, f"tensor {tensor.source.name}")
        else:
            self._tensors[tensor.position] = digests
            self._maybe_commit()

    def drain(self) -> None:
        """Make everything handed over durable and journalled."""
        self._begin_commit()
        if self._commit is not None:
            result(self._commit)
            self._commit = None

    # -- the run's own calls

    def touch(self, number: int) -> None:
        """Make a data file that has no content to be written."""
        self._file(number)

    def shard(self, name: str, record: ShardRecord) -> None:
        """Take the record of a shard that was read to its end; it is durable with the next commit."""
        self._shards[name] = record

    def save(self) -> None:
        """Journal what is complete before the run ends early; what cannot be saved will be made again."""
        with contextlib.suppress(K3Error):  # the error that ends the run is on its way already
            self.drain()

    def close(self) -> None:
        """Wait for writes under way and close the files; what is not journalled by now is written again."""
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)
        self._committer.shutdown()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _compare(self, before: tuple[bytes, ...], now: tuple[bytes, ...], what: str) -> None:
        if before != now:
            raise ResumeError(
                f"the source has changed since the unfinished run began: {what} has other bytes now",
                path=self._journal.path.parent,
                advice="Restore the first source, or remove the unfinished container and start anew",
            )

    def _write(self, number: int, offset: int, data: Bytes, finished: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        file = self._file(number)
        self._dirty.add(number)
        self._since_commit_bytes += len(data)
        self.written_bytes += len(data)

        def work() -> None:
            try:
                file.write(offset, data)
            except K3Error as error:
                self._failure = error  # the streaming thread stops at its next write
                raise
            finally:
                finished()

        self._waiting.append(submit(self._pools[self._plan.files[number].root], work))

    def _file(self, number: int) -> WriteFile:
        file = self._files.get(number)
        if file is None:
            if len(self._files) >= OPEN_FILES_MAX:
                self.drain()
                for old in [n for n in self._files if self._plan.files[n].kind != "dense"]:
                    self._files.pop(old).close()
            planned = self._plan.files[number]
            path = self._directories[planned.root] / (planned.path + PARTIAL_SUFFIX)
            file = self._files[number] = WriteFile(path, planned.size_bytes, direct=self._direct)
            if self._direct and not file.direct:
                self.fell_back.add(path.parent)
        return file

    def _maybe_commit(self) -> None:
        done = [future for future in self._waiting if future.done()]
        if len(done) > 64:
            for future in done:
                result(future)
            finished = set(done)
            self._waiting = [future for future in self._waiting if future not in finished]
        if self._since_commit_bytes >= COMMIT_BYTES:
            self._begin_commit()

    def _begin_commit(self) -> None:
        """Start making the units handed over so far durable; one commit at a time, beside the streaming."""
        if self._commit is not None:
            result(self._commit)
        waiting, experts, tensors, shards = self._waiting, self._experts, self._tensors, self._shards
        files = [self._files[number] for number in sorted(self._dirty)]

        def work() -> None:
            for future in waiting:
                future.result()  # raises for a write that `close` has called off, too
            for file in files:
                file.sync()
            self._journal.commit(experts, tensors, shards)

        self._commit = submit(self._committer, work)
        # Only now: an interrupt before this line leaves everything to be committed once more, which is harmless.
        self._waiting, self._experts, self._tensors, self._shards = [], {}, {}, {}
        self._dirty = set()
        self._since_commit_bytes = 0
