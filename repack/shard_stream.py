"""One pass over the shards: blocks of each in order, read ahead of their use, hashed beside it.

Several shards are read in turns (`repack.jobs`). Every byte of a file passes here exactly once, headers included,
so that the SHA-256 is that of the file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from k3.base.direct_io import Bytes, ReadFile
from k3.base.page_buffers import huge_buffer
from k3.checkpoint.shard import Shard
from k3.repack.interrupts import result, submit
from k3.repack.jobs import Jobs, ShardRead, read_order
from k3.repack.shard_hash import HashPool, ShardHash
from k3.repack.throttle import Throttle


@dataclass(frozen=True, slots=True)
class ShardBegun:
    """A shard of which the first block comes next. `number` counts in `Snapshot.shards`."""

    number: int


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """The next bytes of a shard, from `offset` of its file on. Valid until the next event is asked for."""

    number: int
    offset: int
    data: Bytes


@dataclass(frozen=True, slots=True)
class ShardEnded:
    """A shard of which every block has passed, and the SHA-256 of them in hexadecimal."""

    number: int
    sha256: str


@dataclass(slots=True)
class _OpenShard:
    file: ReadFile
    hash: ShardHash


@dataclass(slots=True)
class _Block:
    """A block on its way: it is read, then hashed, and its buffer is free when both are done."""

    read: ShardRead
    buffer: Bytes
    reading: Future[Bytes]
    hashed: Future[None] = field(default_factory=Future)

    def abandon(self) -> None:
        """Return when nobody uses the buffer any more, whatever has become of its bytes."""
        for future in (self.reading, self.hashed):
            if not future.cancel():
                future.exception()


class ShardStreamer:
    """The threads and buffers that shards are streamed with; one pass at a time, from one thread."""

    def __init__(self, jobs: Jobs, *, direct: bool = True, throttle: Throttle | None = None) -> None:
        self.direct = direct
        self.jobs = jobs
        self.fell_back: set[Path] = set()  # files whose file system does not take O_DIRECT
        self._throttle = throttle or Throttle(None)
        self.buffers = [huge_buffer(jobs.block_bytes) for _ in range(jobs.blocks)]
        self._readers = ThreadPoolExecutor(jobs.readers, "shard-read")
        self._hashers = HashPool(jobs)

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown(cancel_futures=True)
        self._hashers.close()

    def __enter__(self) -> ShardStreamer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stream(
        self, shards: Sequence[tuple[int, Shard]], on_open: Callable[[Shard], None] = lambda shard: None
    ) -> Generator[ShardBegun | ShardBlock | ShardEnded, None, None]:
        """Yield the events of numbered shards: of each its beginning, its blocks front to back, and its end.

        Events of different shards alternate. `on_open` is called before a shard's file is opened. DriveError names
        file and offset when a read fails or a file is shorter than the shard's `size_bytes`.
        """
        by_number = dict(shards)
        order = read_order([(number, shard.size_bytes) for number, shard in shards], self.jobs)
        opened: dict[int, _OpenShard] = {}
        reading: deque[_Block] = deque()
        hashing: deque[_Block] = deque()
        free = deque(self.buffers)
        try:
            while True:
                while free and (read := next(order, None)) is not None:
                    if read.offset == 0:
                        on_open(by_number[read.number])
                        opened[read.number] = _OpenShard(
                            self._open(by_number[read.number].path), self._hashers.begin()
                        )
                    reading.append(self._ask(opened[read.number].file, read, free.popleft()))
                if not reading:
                    break
                data = result(reading[0].reading)
                block = reading.popleft()
                number = block.read.number
                hashing.append(block)
                block.hashed = self._hashers.feed(opened[number].hash, data)
                if block.read.offset == 0:
                    yield ShardBegun(number)
                yield ShardBlock(number, block.read.offset, data)
                while hashing and (hashing[0].hashed.done() or not free):
                    yield from self._hashed(hashing, free, opened)
            while hashing:
                yield from self._hashed(hashing, free, opened)
        finally:
            for block in (*reading, *hashing):
                block.abandon()
            for shard in opened.values():
                shard.file.close()

    def _open(self, path: Path) -> ReadFile:
        file = ReadFile(path, direct=self.direct)
        if self.direct and not file.direct:
            self.fell_back.add(path)
        return file

    def _ask(self, file: ReadFile, read: ShardRead, buffer: Bytes) -> _Block:
        self._throttle.pay(read.nbytes)
        return _Block(read, buffer, submit(self._readers, file.read, read.offset, read.nbytes, buffer))

    def _hashed(
        self, hashing: deque[_Block], free: deque[Bytes], opened: dict[int, _OpenShard]
    ) -> Iterator[ShardEnded]:
        """Wait until the oldest block is hashed and free its buffer; yield its shard's end if it was the last."""
        result(hashing[0].hashed)
        block = hashing.popleft()
        free.append(block.buffer)
        if not block.read.last:
            return
        number = block.read.number
        shard = opened[number]
        if not shard.file.direct:
            shard.file.drop_cache()  # one pass over 1.5 TB must not push everything else out of memory
        del opened[number]
        shard.file.close()
        yield ShardEnded(number, shard.hash.hexdigest())
