"""`Target`: one extent that can be read and compared with its digest, and what it is. Immutable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """An extent of data file `file`: a piece of an expert, or a dense tensor's weights or scales.

    Of a piece of an expert, the first `payload_bytes` are its payload from `payload_offset` on, the rest padding.
    """

    file: int
    offset: int
    stored_bytes: int
    digest: bytes
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None
    payload_offset: int = 0
    payload_bytes: int = 0

    @property
    def end(self) -> int:
        """First offset after the extent."""
        return self.offset + self.stored_bytes
