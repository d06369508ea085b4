"""The container that a test's own `built` describes, opened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from containers import Built

from k3.container.reader import Container


@pytest.fixture
def model(built: Built) -> Iterator[Container]:
    container = Container.open(built.home)
    yield container
    container.close()
