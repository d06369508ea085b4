"""A snapshot's shards and the tensors in them, as values.

Nothing here does I/O. Safe to use from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a snapshot.

    `path` is in the snapshot's directory, with links not resolved. The data section starts at `header_bytes`.
    `blob_sha256` is the SHA-256 that the file is published under, None when its downloader left no record of it.
    """

    name: str
    path: Path
    size_bytes: int
    header_bytes: int
    blob_sha256: str | None


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a snapshot.

    `shard` is an index into `Snapshot.shards`; `offset` counts from the start of that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first offset after the tensor."""
        return self.offset + self.nbytes
