"""Holds up: experts through the daemon are what the container holds, under every promise of an expert source."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from containers import Built, build_container
from daemons import Inside, daemon_inside
from store.source_suite import Opened, SourceSuite

from k3.store.client import DaemonSource


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("container")
    return build_container(place / "home", [place / "a", place / "b"], [1, 2, 3])


@pytest.fixture(scope="module")
def daemon(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with daemon_inside(tmp_path_factory.mktemp("s") / "s", built.directories, quota=10) as inside:
        yield inside


class TestDaemonSource(SourceSuite):
    @pytest.fixture
    def opened(self, built: Built, daemon: Inside) -> Iterator[Opened]:
        open_source = partial(DaemonSource, daemon.socket)
        source = open_source()
        yield Opened(source, built.payloads, open_source)
        source.close()
