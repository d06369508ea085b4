"""What large buffers got of the huge pages that were asked for, by the kernel's word, and how a user is told.

`pages.huge_memory` only asks. Where the kernel refuses (it is set to, something has barred the process, memory is
in pieces) buffers lie in pages of 4 KiB, and everything works, slower. Whoever owns such buffers looks once, when
the work is done: a look makes the kernel list every mapping of the process, and walk what is in small pages.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3.base.cli_support import format_size
from k3.base.page_buffers import HUGE_PAGE_BYTES, address

if TYPE_CHECKING:
    from k3.base.direct_io import Bytes

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_SMAPS = Path("/proc/self/smaps")

_GET_THP_DISABLE = 42
"""PR_GET_THP_DISABLE of prctl(2)."""

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class HugePages:
    """Of some buffers: bytes in use that huge pages were asked for, in whole ones, and bytes that lie in them."""

    asked_bytes: int = 0
    granted_bytes: int = 0

    def __add__(self, other: HugePages) -> HugePages:
        """Of both."""
        return HugePages(self.asked_bytes + other.asked_bytes, self.granted_bytes + other.granted_bytes)

    @property
    def refused(self) -> bool:
        """Whether at least one was not granted."""
        return self.granted_bytes < self.asked_bytes

    def line(self) -> str:
        """What a user should know: what was granted, what the rest costs, and what to do about it."""
        return (
            f"huge pages: granted {format_size(self.granted_bytes)} of {format_size(self.asked_bytes)} asked for; "
            "what is read past the page cache into the rest, pages of 4 KiB, can take more than twice as long. "
            f"{_advice()}"
        )


def huge_pages(buffers: Iterable[Bytes | memoryview]) -> HugePages:
    """What buffers made by `huge_buffer` got, as far as they are in use now. Whole ones, not parts of them.

    Less than one huge page is nothing that was asked for. Neither is anything where the system does not tell
    (no /proc/self/smaps, no descriptor left for it): this is a remark on speed, and comes with results that must
    not get lost by it.
    """
    sizes = {address(buffer): len(buffer) for buffer in buffers if len(buffer) >= HUGE_PAGE_BYTES}
    if not sizes:
        return HugePages()
    try:
        return _granted(sizes)
    except OSError:
        return HugePages()


def _granted(sizes: Mapping[int, int]) -> HugePages:
    found = HugePages()
    if _SMAPS.exists():
        with _SMAPS.open() as lines:
            for addresses, resident_bytes, huge_bytes in _mappings(lines):
                # One, that is the whole mapping; only a kernel without huge pages lets several share one.
                for start in filter(addresses.__contains__, sizes):
                    used_bytes = min(resident_bytes, sizes[start]) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                    found += HugePages(max(used_bytes, huge_bytes), huge_bytes)
    return found


def _mappings(lines: Iterable[str]) -> Iterator[tuple[range, int, int]]:
    """Of each mapping: its addresses, its bytes in memory, and those of them in huge pages."""
    addresses, resident_bytes = range(0), 0
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "Rss:":
            resident_bytes = int(rest.split()[0]) << 10
        elif word == "AnonHugePages:":
            yield addresses, resident_bytes, int(rest.split()[0]) << 10
        elif not word.endswith(":"):
            first, _, last = word.partition("-")
            addresses = range(int(first, 16), int(last, 16))


def _advice() -> str:
    """What stands in the way, as far as it can be seen."""
    if not _SETTINGS.exists():
        return "This kernel has none (CONFIG_TRANSPARENT_HUGEPAGE)"
    if _libc.prctl(_GET_THP_DISABLE, 0, 0, 0, 0) > 0:
        return "Something has barred this process from them (PR_SET_THP_DISABLE): start it without"
    for setting in (_SETTINGS / f"hugepages-{HUGE_PAGE_BYTES >> 10}kB" / "enabled", _SETTINGS / "enabled"):
        chosen = re.search(r"\[(\w+)\]", setting.read_text()) if setting.exists() else None
        if chosen is not None and chosen[1] == "never":
            return f"Set {setting} to madvise or always"
        if chosen is not None and chosen[1] != "inherit":
            break
    return "Memory is in pieces: free some, or write 1 to /proc/sys/vm/compact_memory"
