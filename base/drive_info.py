"""The drive under a directory, and the bytes that a process fetched from drives. Read-only; any thread."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class DriveInfo:
    """A block device as /sys describes it; None where /sys does not (overlay, network, inside a container)."""

    device: str | None
    model: str | None


def drive_info(path: Path, sys: Path = SYS) -> DriveInfo:
    """Return the drive that holds `path`; for a partition, the whole drive."""
    number = path.stat().st_dev
    node = sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not node.exists():
        return DriveInfo(None, None)
    place = node.resolve()
    if (place / "partition").exists():
        place = place.parent
    return DriveInfo(place.name, _line(place / "device" / "model"))


def is_spinning(path: Path, sys: Path = SYS) -> bool:
    """Return whether the drive that holds `path` has a head to move; False where that cannot be known."""
    try:
        device = drive_info(path, sys).device
    except OSError:
        return False
    return device is not None and _line(sys / "block" / device / "queue" / "rotational") == "1"


def device_read_bytes(pid: str = "self", proc: Path = PROC) -> int | None:
    """Return the bytes that a process fetched from block devices; None where the kernel does not say."""
    try:
        lines = (proc / pid / "io").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return None


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
