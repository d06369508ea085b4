"""What all tests share: the tiny snapshot, made once; what takes long only when asked for; no deadlines.

A slow machine is no failure: hypothesis must not judge by the clock. A failing example prints how to repeat it.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.zygote import Zygote

# A job that a script puts into the background ignores SIGINT, and so would every command that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What `nohup` ignores, commands ignore too: a daemon that a test hangs up would go on. A handler of ours keeps
# this process alive as before, and is none in the programs that it starts.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

settings.register_profile("k3", deadline=None, print_blob=True)
settings.load_profile("k3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless -m names its marker."""
    for marker in ("campaign", "sanitized"):
        left_out = [item for item in items if item.get_closest_marker(marker)]
        if left_out and marker not in (config.getoption("markexpr") or ""):
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of the garbage collector's sight: it stays until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model() -> SyntheticModel:
    """Return the shape of `tiny_snapshot`."""
    return SyntheticModel.tiny()


@pytest.fixture(scope="session")
def tiny_snapshot(tmp_path_factory: pytest.TempPathFactory, tiny_model: SyntheticModel) -> Path:
    """Return a snapshot of five layers in the published form, 2.8 MB. Only to be read."""
    return write_snapshot(tiny_model, tmp_path_factory.mktemp("tiny") / "snapshot")


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Commands of the project in processes of their own, without imports to wait for."""
    with Zygote(tmp_path_factory.mktemp("streams")) as made:
        yield made
