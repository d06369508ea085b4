"""The container that a test's own `built` describes, opened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from k3.container.reader import Container
from tests.support.containers import Built


@pytest.fixture
def model(built: Built) -> Iterator[Container]:
    container = Container.open(built.home)
    yield container
    container.close()
