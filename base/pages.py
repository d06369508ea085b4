"""The page: the unit of alignment on drives and in memory. Pure."""

from __future__ import annotations

PAGE_BYTES = 4096
"""Alignment of every extent that a container writes: O_DIRECT needs no more on any drive that is known."""


def page_ceil(nbytes: int) -> int:
    """Return `nbytes` rounded up to a whole number of pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
