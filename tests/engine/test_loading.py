"""Holds up that a model computes the same while its weights are still on their way, and nothing from bad ones."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from k3.base.errors import DamageError
from k3.base.pages import PAGE_BYTES
from k3.container.dense_load import DenseLoad
from k3.container.reader import Container
from k3.engine.cli import main
from k3.engine.definition.model_options import ModelOptions
from k3.engine.forward.model import Model
from k3.engine.run.session import Session
from k3.model.architecture import ModelConfig
from k3.model.model_source import EncodedTensor, ModelSource
from k3.model.tensor_names import needed_names
from k3.model.tensor_recipe import Recipe
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.store.lending.file_source import FileSource
from tests.support.containers import flip
from tests.support.engines import VECTORS, Array, all_logits, golden, loaded, snapshot
from tests.support.faults import DriveFaults

IDS = golden("tiny_s1")["input_ids"]
LATE = "language_model.model.layers.4.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a container of the golden model."""
    home = tmp_path_factory.mktemp("loading") / "home"
    repack(RepackRequest((VECTORS / "tiny_s1",), home, recipe=Recipe(8, 8, 8), direct=False), Watcher())
    return home


@pytest.fixture
def container(home: Path) -> Iterator[Container]:
    container = Container.open(home)
    yield container
    container.close()


@pytest.fixture(scope="module")
def whole() -> Array:
    """Logits of the same model from its snapshot, all weights in memory first."""
    with loaded(snapshot("tiny_s1", 8), exact=False) as model:
        return all_logits(model, IDS, 9)


def config_of(source: ModelSource) -> ModelConfig:
    return ModelConfig.from_raw(source.config, Path("config.json"))


class Permuted:
    """A reader whose tensors become available one at a time, in an order of its own."""

    def __init__(self, source: ModelSource, names: Sequence[str], seed: int) -> None:
        self._source = source
        self._order = random.Random(seed).sample(names, len(names))
        self._arrived = threading.Condition()
        self._there: dict[str, EncodedTensor] = {}
        self.taken: list[str] = []
        self.waits = 0
        self._waiting = 0
        self._thread = threading.Thread(target=self._arrive, daemon=True)
        self._thread.start()

    def _arrive(self) -> None:
        for name in self._order:
            tensor = self._source.read_tensor(name)
            with self._arrived:
                self._arrived.wait_for(lambda: self._waiting > 0)  # nothing comes before it is waited for
                self._there[name] = tensor
                self._arrived.notify_all()

    def take(self, name: str) -> EncodedTensor:
        with self._arrived:
            self.waits += name not in self._there
            self._waiting += 1
            self._arrived.notify_all()
            self._arrived.wait_for(lambda: name in self._there)
            self._waiting -= 1
        self.taken.append(name)
        return self._there.pop(name)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_arrival_changes_no_bit(container: Container, whole: Array, seed: int) -> None:
    names = needed_names(container.tensor_names(), config_of(container))
    reader = Permuted(container, names, seed)
    experts = FileSource(container, threads=2)
    try:
        model = Model(container, config_of(container), experts, ModelOptions(), reader)
        assert not reader.taken  # made at once
        assert all_logits(model, IDS, 9).tobytes() == whole.tobytes()
        assert sorted(reader.taken) == sorted(names)  # each once
        assert reader.waits > 0
    finally:
        reader.join()
        experts.close()


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_and_noisy_drive_changes_no_bit(container: Container, whole: Array, seed: int) -> None:
    names = needed_names(container.tensor_names(), config_of(container))
    drive = DriveFaults(noise=0.3, seed=seed)
    experts = FileSource(container, threads=2)
    try:
        with DenseLoad(container, names, read_bytes_max=PAGE_BYTES, opener=drive.open) as loading:
            model = Model(container, config_of(container), experts, ModelOptions(), loading)
            assert all_logits(model, IDS, 9).tobytes() == whole.tobytes()
            assert loading.ended_s is not None
            resident_bytes = model.resident_bytes
        assert all_logits(model, IDS, 7).tobytes() == whole.tobytes()  # and goes on when the load is closed
        assert model.resident_bytes == resident_bytes <= loading.nbytes
    finally:
        experts.close()


def test_early_layers_compute_and_a_damaged_late_one_stops_the_pass(home: Path, container: Container) -> None:
    extent = container.tensor(LATE).weights
    path = container.file_path(extent.file)
    names = needed_names(container.tensor_names(), config_of(container))
    flip(path, extent.offset)
    experts = FileSource(container, threads=2)
    try:
        with DenseLoad(container, names) as loading:
            model = Model(container, config_of(container), experts, ModelOptions(), loading)
            with pytest.raises(DamageError) as caught:
                Session(model, 8, 8).prefill([1, 2, 3])
            assert caught.value.tensor == LATE
            assert experts.stats().misses > 0  # earlier layers were computed meanwhile
        result = CliRunner().invoke(main, ["--container", str(home), "--ids", "1,2", "--ngen", "3"])
        assert (result.exit_code, result.stdout) == (1, "")
        assert LATE in result.stderr
        nothing = CliRunner().invoke(main, ["--container", str(home), "--ids", "1,2", "--ngen", "0"])
        assert nothing.exit_code == 1
    finally:
        flip(path, extent.offset)
        experts.close()


def test_ctrl_c_while_loading(home: Path) -> None:
    stalled = (
        "import sys, k3.base.direct_io as direct; from k3.engine.cli import main\n"
        "read = direct.ReadFile.read\n"
        "def slow(self, offset, *rest):\n"
        "    if self.path.name.startswith('dense'):\n"
        "        sys.stderr.write('reading\\n'); sys.stderr.flush(); sys.stdin.read()\n"
        "    return read(self, offset, *rest)\n"
        "direct.ReadFile.read = slow\n"
        "main(prog_name='k3-run')"
    )
    command = [sys.executable, "-c", stalled, "--container", str(home), "--ids", "1", "--ngen", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        assert "reading" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=20)  # which ends the read that hangs
    assert (process.returncode, printed) == (130, "")
    assert "interrupted" in said
    assert "Traceback" not in said
