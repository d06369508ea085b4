"""Holds up that every kind of `ModelSource` keeps the one contract, and that a run asks for nothing else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3.base.errors import UnsupportedError
from k3.base.memory_limit import Limit
from k3.container.reader import Container
from k3.engine.definition.model_options import ModelOptions
from k3.engine.definition.settings import ModelSettings
from k3.engine.forward.model import Model
from k3.engine.launch.loading import loading_weights
from k3.engine.launch.memory_plan import plan_memory
from k3.engine.launch.model_files import OpenedModel
from k3.engine.report.token_cost import forecast_pass
from k3.model.architecture import ModelConfig
from k3.model.model_source import ModelSource
from k3.model.tensor_names import needed_names
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.store.client.daemon_model import DaemonModel
from k3.store.client.socket_link import Link
from k3.store.lending.file_source import FileSource
from tests.support.daemons import daemon_inside
from tests.support.engines import VECTORS, all_logits, golden, loaded, snapshot


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a container of the golden model at 8 bits."""
    home = tmp_path_factory.mktemp("kinds") / "home"
    repack(RepackRequest((VECTORS / "tiny_s1",), home, direct=False), Watcher())
    return home


@pytest.fixture(params=["snapshot", "container", "daemon"])
def source(request: pytest.FixtureRequest, home: Path, tmp_path: Path) -> Iterator[ModelSource]:
    with contextlib.ExitStack() as stack:
        opened: ModelSource
        if request.param == "snapshot":
            opened = snapshot(bits=8)
        elif request.param == "container":
            opened = Container.open(home)
        else:
            daemon = stack.enter_context(daemon_inside(tmp_path / "socket", [home], max_clients=2))
            opened = DaemonModel(stack.enter_context(contextlib.closing(Link.open(daemon.socket, "a test"))))
        stack.callback(opened.close)
        yield opened


class OtherKind:
    """A `ModelSource` of no kind that the engine knows: it has the members of the contract and no others."""

    members = frozenset(name for name in vars(ModelSource) if not name.startswith("_"))

    def __init__(self, inner: ModelSource) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name not in self.members:
            raise AssertionError(f"the engine asked for {name}, which is not part of the contract")
        return getattr(self._inner, name)


def opened_model(source: ModelSource) -> OpenedModel:
    config = ModelConfig.from_raw(source.config, source.config_path)
    return OpenedModel(source, config, tuple(needed_names(source.tensor_names(), config)), ())


def test_a_tensor_is_what_was_said_before_it_was_read(source: ModelSource) -> None:
    for name in source.tensor_names():
        said, tensor = source.dense(name), source.read_tensor(name)
        assert (said.dtype, said.shape, said.encoding) == (tensor.dtype, tensor.shape, tensor.encoding)
        held_bytes = tensor.data.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)
        assert held_bytes <= said.stored_bytes
        assert said.kept_bytes <= said.resident_bytes <= said.stored_bytes
        assert not source.has_extents or said.resident_bytes == said.stored_bytes
    with pytest.raises(KeyError):
        source.dense("no such tensor")


@pytest.mark.parametrize("takes_all", [True, False])
def test_a_load_gives_each_tensor_and_ends_once(source: ModelSource, takes_all: bool) -> None:
    read: list[str] = []
    ends: list[int] = []
    names = list(source.tensor_names())
    with contextlib.closing(
        source.begin_load(names, on_read=read.append, on_end=lambda: ends.append(len(read)))
    ) as load:
        for name in names if takes_all else names[:3]:
            taken, wanted = load.take(name), source.read_tensor(name)
            assert name in read
            np.testing.assert_array_equal(taken.data, wanted.data)
            assert (taken.name, taken.encoding, taken.shape) == (name, wanted.encoding, wanted.shape)
        assert load.retries == 0
        assert load.load_s >= 0
        load.huge_pages()
    assert len(ends) == 1
    assert not takes_all or (sorted(read), ends) == (sorted(names), [len(names)])
    assert source.loading_bytes(names) >= source.loading_bytes(names[:1]) >= source.loading_bytes([]) == 0


def test_files_and_small_files(source: ModelSource) -> None:
    files = list(source.files())
    assert files
    for path in files:
        assert path.is_file()
        assert not set(source.directories).isdisjoint(path.parents)
    assert source.config_path.parent in source.directories
    for name in ("config.json", "generation_config.json", "tiktoken.model"):
        place = source.text_file(name)
        assert place is not None
        assert source.text_bytes(name) == place.read_bytes() == (VECTORS / "tiny_s1" / name).read_bytes()
    assert source.text_file("no such") is None
    assert source.text_bytes("no such") is None


def test_extents_or_leases(source: ModelSource) -> None:
    layer = source.expert_layers()[0]
    if source.has_extents:
        extents = source.expert_extents(layer, 0)
        assert sum(extent.payload_bytes for extent in extents) == source.expert_layout(layer).payload_bytes
    else:
        with pytest.raises(UnsupportedError, match="leases"):
            source.expert_extents(layer, 0)


def test_a_kind_that_the_engine_has_never_seen_runs() -> None:
    """The plan, the load, the forecast and the forward pass ask for members of the contract only."""
    ids = golden("tiny_s1")["input_ids"]
    with loaded(snapshot(bits=8), exact=False) as model:
        wanted = all_logits(model, ids, 9)
    other = OtherKind(snapshot(bits=8))
    opened = opened_model(other)
    plan = plan_memory(
        opened, ModelSettings(snapshot=(VECTORS / "tiny_s1",)), Limit(math.inf, "a test"),
        capacity=len(ids), chunk=9, every_logit=True,
    )  # fmt: skip
    plan.check()
    assert forecast_pass(other, opened.config, opened.names, hit_share=0, tokens=1, position=0).memory_bytes > 0
    with loading_weights(opened) as weights, contextlib.closing(FileSource(other, threads=2)) as experts:
        model = Model(other, opened.config, experts, ModelOptions(), weights)
        assert all_logits(model, ids, 9).tobytes() == wanted.tobytes()
    opened.close()
