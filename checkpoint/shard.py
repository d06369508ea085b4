"""A snapshot's shards and the tensors in them, as values.

Nothing here does I/O. Safe to use from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a snapshot.

    `path` is where the snapshot names it, links not resolved. `header_bytes` is where the data section starts.
    `blob_sha256` is the SHA-256 that the file is published under, None when its downloader left no record of it.
    """

    name: str
    path: Path
    size_bytes: int
    header_bytes: int
    blob_sha256: str | None


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a snapshot. `shard` counts in `Snapshot.shards`, `offset` from the start of that file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """First offset after the tensor."""
        return self.offset + self.nbytes
