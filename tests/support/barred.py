"""What tests of huge pages share: a process that gets none, and whether this machine grants any."""

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
"""Words to put before a command: the kernel refuses it huge pages, as where they are disabled."""


def machine_grants() -> bool:
    """Whether this process gets huge pages now."""
    buffer = huge_buffer(64 << 20)
    populate(buffer)
    return not huge_pages([buffer]).refused
