"""Sizes that the native data plane is made with. Pure but for the limit of descriptors; imports no NumPy."""

from __future__ import annotations

import resource

from k3.base.pages import PAGE_BYTES, page_ceil


def slot_bytes_for(payload_bytes: int) -> int:
    """Return the size of a slot that holds any expert of this payload.

    One page more than the payload rounded up: a single extent of a snapshot that begins inside a page is read
    where it falls, with the pages around it.
    """
    return page_ceil(payload_bytes) + PAGE_BYTES


def default_open_files() -> int:
    """Return a quarter of the descriptors that the process may have, at most 256."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 256 if soft == resource.RLIM_INFINITY else max(1, min(256, soft // 4))
