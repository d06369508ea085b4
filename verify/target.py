"""`Target`: one extent that can be read and compared with its digest, and what it is. Immutable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """An extent of data file `file`: a piece of an expert, or a dense tensor's weights or scales."""

    file: int
    offset: int
    stored_bytes: int
    digest: bytes
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None

    @property
    def end(self) -> int:
        """First offset after the extent."""
        return self.offset + self.stored_bytes
