"""SHA-256 of several shards at once, on threads beside the one that streams.

The digest of a shard is a chain: its blocks are hashed one after the other, in order. Several shards are several
chains, and a thread that is free takes one that waits.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from k3.base.direct_io import Bytes
from k3.repack.interrupts import submit


class ShardHash:
    """The chain of one shard. Its members are the pool's, but for `hexdigest`."""

    def __init__(self) -> None:
        self.state = hashlib.sha256()
        self.waiting: deque[tuple[Bytes, Future[None]]] = deque()
        self.in_work = False

    def hexdigest(self) -> str:
        """Return the digest of the blocks that have been hashed, in hexadecimal."""
        return self.state.hexdigest()


class HashPool:
    """Threads that hash. `feed` and `close` are called by one thread, the one that streams."""

    def __init__(self, threads: int) -> None:
        self._lock = threading.Lock()  # never taken by the streaming thread, which signals interrupt
        self._arrived: deque[ShardHash] = deque()
        self._threads = ThreadPoolExecutor(threads, "shard-hash")

    def close(self) -> None:
        """End the threads. Blocks that no thread has taken are not hashed, and their futures are cancelled."""
        self._threads.shutdown(cancel_futures=True)
        while self._arrived:
            for _, hashed in self._arrived.popleft().waiting:
                hashed.cancel()

    def feed(self, chain: ShardHash, block: Bytes) -> Future[None]:
        """Append a block to a chain. It must not change before the future that is returned is done."""
        hashed: Future[None] = Future()
        chain.waiting.append((block, hashed))
        self._arrived.append(chain)
        submit(self._threads, self._work)
        return hashed

    def _work(self) -> None:
        """Hash blocks until no chain waits that is in no other thread's work."""
        while (chain := self._taken()) is not None:
            working = True
            while working:
                block, hashed = chain.waiting.popleft()
                if hashed.set_running_or_notify_cancel():
                    chain.state.update(block.data)
                    hashed.set_result(None)
                with self._lock:
                    working = chain.in_work = bool(chain.waiting)

    def _taken(self) -> ShardHash | None:
        """Take a chain that waits. One in another thread's work is left to that thread, which looks again."""
        with self._lock:
            while self._arrived:
                chain = self._arrived.popleft()
                if chain.waiting and not chain.in_work:
                    chain.in_work = True
                    return chain
            return None
