"""The page: the unit of alignment on drives and in memory. Pure."""

from __future__ import annotations

PAGE_BYTES = 4096
"""Alignment of every extent that a container writes: the unit of O_DIRECT on every drive we know."""


def page_ceil(nbytes: int) -> int:
    """Return `nbytes` rounded up to a whole number of pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
