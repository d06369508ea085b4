"""The number of shards that are streamed at once, and the threads and buffers that it takes. Pure.

One shard at a time is bound by one processor's SHA-256: the digest of a file cannot be computed in parts. Several
shards at once are bound by all processors, each of which hashes several side by side, or by the drives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BLOCK_BYTES = 8 << 20
CHOSEN_MAX = 16
"""Largest number of shards at once that is chosen without --jobs; memory grows with the number."""
WANTED_MAX = 64
"""Most shards at once that can be asked for."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """A number of shards at once, and the threads and buffers of a stream of them."""

    shards: int
    hash_threads: int
    spinning: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes that are read at a time, from one shard."""
        return BLOCK_BYTES // (1 if self.shards == 1 else 2 if self.shards <= 4 else 4)

    @property
    def blocks(self) -> int:
        """Blocks in memory: being read, hashed or routed."""
        return 6 if self.shards == 1 else 6 + 3 * self.shards

    @property
    def readers(self) -> int:
        """Reads that are under way at a time."""
        return 1 if self.spinning else 2 + min(self.shards, 6)

    @property
    def resident_experts(self) -> int:
        """Experts that may be incomplete in memory; further ones wait in the scratch file."""
        return 3 + self.shards

    @property
    def output_buffers(self) -> int:
        """Buffers of dense tensors on their way to the drive; a tensor that is being made holds two."""
        return 6 + 2 * self.shards


ONE = Jobs(1, 1)


def choose_jobs(wanted: int | None, *, shards: int, cpus: int, side_by_side: int, spinning: bool) -> Jobs:
    """Return the jobs for a source of `shards` shards on `cpus` processors, each hashing `side_by_side` at once.

    `wanted` is what the user asked for, None to choose: as many as the processors hash together, and one alone
    where a spinning drive would have to seek between several.
    """
    at_once = wanted if wanted is not None else 1 if spinning else min(cpus * side_by_side, CHOSEN_MAX)
    at_once = max(1, min(at_once, shards))
    return Jobs(at_once, min(at_once, cpus), spinning)


@dataclass(frozen=True, slots=True)
class ShardRead:
    """The read of a block: `nbytes` bytes of a shard from `offset` on. `last`: no byte of the shard follows."""

    number: int
    offset: int
    nbytes: int
    last: bool


def read_order(sizes: Iterable[tuple[int, int]], jobs: Jobs) -> Iterator[ShardRead]:
    """Yield the reads of shards, given as (number, bytes), in the order in which they are made.

    So many shards as `jobs` says take turns, a block each; when one has been read, the next of `sizes` joins. A
    shard without bytes has one read, of none.
    """
    waiting = deque(sizes)
    turns: deque[tuple[int, int, int]] = deque()
    while waiting or turns:
        while waiting and len(turns) < jobs.shards:
            number, size_bytes = waiting.popleft()
            turns.append((number, size_bytes, 0))
        number, size_bytes, offset = turns.popleft()
        end = min(offset + jobs.block_bytes, size_bytes)
        yield ShardRead(number, offset, end - offset, end == size_bytes)
        if end < size_bytes:
            turns.append((number, size_bytes, end))
