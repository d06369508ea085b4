"""The two kinds of model that a directory can hold, recognised by the names of its files."""

from __future__ import annotations

from pathlib import Path

from k3.base.presence import is_file

MANIFEST_NAME = "manifest.json"
CATALOG_NAME = "catalog.mdb"


def is_container(directory: Path) -> bool:
    """Return True when a directory is the home of a finished container. Raises DriveError when stat fails."""
    return is_file(directory / MANIFEST_NAME) and is_file(directory / CATALOG_NAME)
