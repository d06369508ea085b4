"""One pass over a shard: blocks in order, read ahead of their use, hashed beside it.

Every byte of the file passes here exactly once, headers included, so that the SHA-256 is that of the file.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from k3.base.direct_io import Bytes, ReadFile
from k3.base.page_buffers import huge_buffer
from k3.repack.interrupts import result, submit
from k3.repack.throttle import Throttle

BLOCK_BYTES = 8 << 20
BLOCKS = 6
READERS = 3


class ShardStreamer:
    """The threads and buffers that shards are streamed with; one shard at a time, from one thread."""

    def __init__(self, *, direct: bool = True, throttle: Throttle | None = None) -> None:
        self.direct = direct
        self.fell_back: set[Path] = set()  # files whose file system does not take O_DIRECT
        self._throttle = throttle or Throttle(None)
        self.buffers = [huge_buffer(BLOCK_BYTES) for _ in range(BLOCKS)]
        self._readers = ThreadPoolExecutor(READERS, "shard-read")
        self._hasher = ThreadPoolExecutor(1, "shard-hash")

    def close(self) -> None:
        """End the threads."""
        self._readers.shutdown(cancel_futures=True)
        self._hasher.shutdown(cancel_futures=True)

    def __enter__(self) -> ShardStreamer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stream(self, path: Path, size_bytes: int, sha256: hashlib._Hash | None) -> Iterator[tuple[int, Bytes]]:
        """Yield (offset, block) front to back; a block is valid until the next one is asked for.

        `sha256` is updated with every block and complete when the iterator ends. DriveError names file and
        offset when a read fails or the file is shorter than `size_bytes`.
        """
        with ReadFile(path, direct=self.direct) as file:
            if self.direct and not file.direct:
                self.fell_back.add(path)
            yield from self._blocks(file, size_bytes, sha256)
            if not file.direct:
                file.drop_cache()  # one pass over 1.5 TB must not push everything else out of memory

    def _blocks(
        self, file: ReadFile, size_bytes: int, sha256: hashlib._Hash | None
    ) -> Iterator[tuple[int, Bytes]]:
        free = deque(self.buffers)
        reading: deque[tuple[int, Bytes, Future[Bytes]]] = deque()
        hashing: deque[tuple[Bytes, Future[None]]] = deque()
        next_offset = 0
        try:
            while True:
                while free and next_offset < size_bytes:
                    buffer = free.popleft()
                    length = min(BLOCK_BYTES, size_bytes - next_offset)
                    self._throttle.pay(length)
                    future = submit(self._readers, file.read, next_offset, length, buffer)
                    reading.append((next_offset, buffer, future))
                    next_offset += length
                if not reading:
                    break
                offset, buffer, future = reading.popleft()
                block = result(future)
                if sha256 is not None:
                    hashing.append((buffer, submit(self._hasher, sha256.update, block.data)))
                yield offset, block
                if sha256 is None:
                    free.append(buffer)
                while hashing and (hashing[0][1].done() or not free):
                    done_buffer, hashed = hashing.popleft()
                    result(hashed)
                    free.append(done_buffer)
            for _, hashed in hashing:
                result(hashed)
        finally:
            # The buffers belong to the next shard: nobody may still be filling or hashing them.
            for _, _, future in reading:
                if not future.cancel():
                    future.exception()
            for _, hashed in hashing:
                if not hashed.cancel():
                    hashed.exception()
