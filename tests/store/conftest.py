"""The container that a test's own `built` describes, opened; and a place for other users."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3.container.reader import Container
from tests.support.containers import Built


@pytest.fixture
def open_place() -> Iterator[Path]:
    """Return a directory that any user may enter; pytest's own may lie below one that only this user may."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def model(built: Built) -> Iterator[Container]:
    container = Container.open(built.home)
    yield container
    container.close()
