"""The contract of a destination, which takes assembled units: a repack writes them, a verification compares.

A *unit* is what becomes durable or is found equal as a whole: an expert or a dense tensor. All calls come from
the thread that streams; a destination may work on in threads of its own and reports their errors from its
next call or from `drain`.
"""

from __future__ import annotations

from typing import Protocol

from k3.base.direct_io import Bytes
from k3.model.keys import ExpertKey
from k3.repack.buffers import BufferPool
from k3.repack.plan import PlannedExtent, PlannedTensor


class Destination(Protocol):
    """Takes over buffers with finished bytes and gives them back to their pool when done with them."""

    def expert(self, key: ExpertKey, buffer: Bytes, pool: BufferPool) -> None:
        """Take a complete expert: payload, then zeros to a page, at the start of `buffer`."""

    def expert_in_place(self, key: ExpertKey, digests: tuple[bytes, ...]) -> None:
        """Take the digests of an expert that stays where it is, one per extent, in payload order."""

    def dense_block(
        self,
        tensor: PlannedTensor,
        planned: PlannedExtent,
        offset: int,
        data: Bytes,
        buffer: Bytes,
        pool: BufferPool,
    ) -> None:
        """Whole pages `data` (a view of `buffer`) of a tensor's weights or scales, at `offset` of the blob."""

    def tensor(self, tensor: PlannedTensor, digests: tuple[bytes, ...]) -> None:
        """All blocks of a tensor have been handed over; digests of its weights and, if any, its scales."""

    def drain(self) -> None:
        """Wait for everything handed over; raises what went wrong."""
