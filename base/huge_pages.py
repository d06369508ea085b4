"""Huge pages that large buffers were granted, as the kernel reports them, and the note for the user.

`page_buffers.huge_memory` only requests them. Where the kernel grants none (its setting, a flag of the process,
fragmented memory) buffers are in 4 KiB pages, and everything works, slower. The owner of such buffers asks once,
after its work: the kernel then lists every mapping of the process and walks those in small pages.
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
    """Bytes of some buffers: those in use for which huge pages were requested (whole pages), and those granted."""

    asked_bytes: int = 0
    granted_bytes: int = 0

    def __add__(self, other: HugePages) -> HugePages:
        """Return the sums of both."""
        return HugePages(self.asked_bytes + other.asked_bytes, self.granted_bytes + other.granted_bytes)

    @property
    def refused(self) -> bool:
        """True if at least one huge page was not granted."""
        return self.granted_bytes < self.asked_bytes

    def line(self) -> str:
        """Return a note for the user: bytes granted, the cost of the rest, and the remedy."""
        return (
            f"huge pages: granted {format_size(self.granted_bytes)} of {format_size(self.asked_bytes)} requested; "
            "direct reads into the rest, in 4 KiB pages, can take more than twice as long. "
            f"{_advice()}"
        )


def huge_pages(buffers: Iterable[Bytes | memoryview]) -> HugePages:
    """Return the huge pages granted to buffers made by `huge_buffer`, counting the pages in use now.

    Buffers smaller than a huge page are not counted, and neither is anything where the kernel does not report it
    (no /proc/self/smaps, or no file descriptor free for it): a note on speed must not make results fail.
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
                # A buffer is a mapping of its own; only kernels without huge pages merge several.
                for start in filter(addresses.__contains__, sizes):
                    used_bytes = min(resident_bytes, sizes[start]) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
                    found += HugePages(max(used_bytes, huge_bytes), huge_bytes)
    return found


def _mappings(lines: Iterable[str]) -> Iterator[tuple[range, int, int]]:
    """Yield each mapping's addresses, bytes in memory, and bytes in huge pages."""
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
    """Return the remedy for the most likely cause of the refusal."""
    if not _SETTINGS.exists():
        return "This kernel has no huge pages (CONFIG_TRANSPARENT_HUGEPAGE)"
    if _libc.prctl(_GET_THP_DISABLE, 0, 0, 0, 0) > 0:
        return "This process was started with huge pages disabled (PR_SET_THP_DISABLE): start it without"
    for setting in (_SETTINGS / f"hugepages-{HUGE_PAGE_BYTES >> 10}kB" / "enabled", _SETTINGS / "enabled"):
        chosen = re.search(r"\[(\w+)\]", setting.read_text()) if setting.exists() else None
        if chosen is not None and chosen[1] == "never":
            return f"Set {setting} to madvise or always"
        if chosen is not None and chosen[1] != "inherit":
            break
    return "Memory is fragmented: free some, or write 1 to /proc/sys/vm/compact_memory"
