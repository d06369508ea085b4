"""Small file systems for tests: full, read-only, without O_DIRECT. Tests skip where mounting is not permitted."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _mount(*arguments: str | os.PathLike[str]) -> None:
    result = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting is not permitted: {result.stderr.strip()}")


@contextlib.contextmanager
def small_tmpfs(place: Path, size: str) -> Iterator[Path]:
    """Mount a file system in memory on `place` until the end of the block; `size` is as mount spells it (1m)."""
    place.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "k3-test", place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def resize(place: Path, size: str) -> None:
    """Change the size of a mounted `small_tmpfs`."""
    subprocess.run(["mount", "-o", f"remount,size={size}", place], check=True)


@contextlib.contextmanager
def read_only(directory: Path, place: Path) -> Iterator[Path]:
    """Mount `directory` a second time, read-only, on `place` until the end of the block."""
    place.mkdir(parents=True, exist_ok=True)
    _mount("--bind", directory, place)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
