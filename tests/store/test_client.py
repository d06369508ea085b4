"""Holds up: experts through the daemon are what the container holds, under every promise of an expert source."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from k3.store.client.daemon_source import DaemonSource
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, daemon_inside
from tests.support.source_suite import Opened, SourceSuite


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


def test_what_had_arrived_is_not_handed_out_after_close(daemon: Inside) -> None:
    source = DaemonSource(daemon.socket)
    for lease in source.lease(1, range(3)):  # from here on all are in RAM, and arrive together
        lease.release()
    stream = source.lease(1, range(3))
    next(stream).release()
    source.close()
    with pytest.raises(ValueError, match="closed"):
        next(stream)


def test_what_had_arrived_is_given_back_by_a_stream_given_up(daemon: Inside) -> None:
    source = DaemonSource(daemon.socket)
    for _ in range(20):  # more than the quota if anything were lost
        stream = source.lease(1, range(3))
        next(stream).release()
        stream.close()
    assert source._session is not None
    assert source._session.free == source._session.quota
    source.close()
