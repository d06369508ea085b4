"""Helpers for tests of huge pages: a process that is refused them, and a check that this machine grants any."""

from __future__ import annotations

import sys

from k3.base.huge_pages import huge_pages
from k3.base.page_buffers import huge_buffer, populate

_PR_SET_THP_DISABLE = 41

BARRED = [
    sys.executable,
    "-c",
    "import ctypes, os, sys\n"
    f"assert ctypes.CDLL(None).prctl({_PR_SET_THP_DISABLE}, 1, 0, 0, 0) == 0\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n",
]
"""Arguments to put before a command so that the kernel refuses it huge pages, as if they were disabled."""


def machine_grants() -> bool:
    """Return True if the kernel grants this process huge pages for a 64 MiB buffer now."""
    buffer = huge_buffer(64 << 20)
    populate(buffer)
    return not huge_pages([buffer]).refused
