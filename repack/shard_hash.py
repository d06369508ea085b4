"""SHA-256 of several shards at once, on threads beside the one that streams.

The digest of a shard is a chain: its blocks are hashed one after the other, in order. Several shards are several
chains, and a thread that is free takes the next block of each that waits, as many as its CPU hashes side by side.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from k3 import kernels
from k3.base.direct_io import Bytes
from k3.repack.interrupts import submit
from k3.repack.jobs import Jobs


class ShardHash:
    """The chain of one shard. Its members are the pool's, but for `hexdigest`."""

    def __init__(self, state: hashlib._Hash | kernels.Sha256) -> None:
        self.state = state
        self.waiting: deque[tuple[Bytes, Future[None]]] = deque()
        self.in_work = False

    def hexdigest(self) -> str:
        """Return the digest of the blocks that have been hashed, in hexadecimal."""
        return self.state.hexdigest()


class HashPool:
    """Threads that hash. All methods but `_work` and what it calls are for the one thread that streams."""

    def __init__(self, jobs: Jobs) -> None:
        self._together = min(kernels.sha256_side_by_side(), jobs.shards)  # of one alone, hashlib is the faster way
        self._lock = threading.Lock()  # never taken by the streaming thread, which signals interrupt
        self._arrived: deque[ShardHash] = deque()
        self._threads = ThreadPoolExecutor(jobs.hash_threads, "shard-hash")

    def close(self) -> None:
        """End the threads. Blocks that no thread has taken are not hashed, and their futures are cancelled."""
        self._threads.shutdown(cancel_futures=True)
        while self._arrived:
            for _, hashed in self._arrived.popleft().waiting:
                hashed.cancel()

    def begin(self) -> ShardHash:
        """Return a chain without blocks."""
        return ShardHash(hashlib.sha256() if self._together == 1 else kernels.Sha256())

    def feed(self, chain: ShardHash, block: Bytes) -> Future[None]:
        """Append a block to a chain. It must not change before the future that is returned is done."""
        hashed: Future[None] = Future()
        chain.waiting.append((block, hashed))
        self._arrived.append(chain)
        submit(self._threads, self._work)
        return hashed

    def _work(self) -> None:
        """Hash blocks until no chain waits that is in no other thread's work."""
        taken = self._take([])
        while taken:
            begun = []
            for chain in taken:
                block, hashed = chain.waiting.popleft()
                if hashed.set_running_or_notify_cancel():
                    begun.append((chain, block, hashed))
            try:
                _update([chain for chain, _, _ in begun], [block for _, block, _ in begun])
            except BaseException as error:  # told to the thread that waits, which ends the run
                for _, _, hashed in begun:
                    hashed.set_exception(error)
            else:
                for _, _, hashed in begun:
                    hashed.set_result(None)
            taken = self._take(taken)

    def _take(self, done: Sequence[ShardHash]) -> list[ShardHash]:
        """Put chains back that are done with, and take some that wait and are in nobody's work."""
        with self._lock:
            for chain in done:
                chain.in_work = False
                if chain.waiting:
                    self._arrived.append(chain)
            taken: list[ShardHash] = []
            while self._arrived and len(taken) < self._together:
                chain = self._arrived.popleft()
                if chain.waiting and not chain.in_work:
                    chain.in_work = True
                    taken.append(chain)
            return taken


def _update(chains: Sequence[ShardHash], blocks: Sequence[Bytes]) -> None:
    """Append to each chain its block."""
    together: list[kernels.Sha256] = []
    their_blocks: list[Bytes] = []
    for chain, block in zip(chains, blocks, strict=True):
        if isinstance(chain.state, kernels.Sha256):
            together.append(chain.state)
            their_blocks.append(block)
        else:
            chain.state.update(block.data)
    kernels.sha256_update(together, their_blocks)
