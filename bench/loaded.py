"""The parts that benchmarks of the engine share: a slice of K3, a loaded model, a session with a past."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3.container.reader import Container
from k3.engine.definition.settings import ModelSettings
from k3.engine.forward.model import Model
from k3.engine.forward.state import MlaState
from k3.engine.launch.model_files import open_model_files
from k3.engine.report.bytes_per_pass import Traffic
from k3.engine.run.ready import ready_model
from k3.engine.run.session import Session
from k3.store.source import ExpertSource

CHUNK = 32

SLICE = ("--preset", "slice", "--experts", "64", "--experts-per-token", "16", "--vocab", "8192")
"""Hidden 7168; KDA over dense, KDA over MoE twice, MLA over MoE; a token takes 16 of a layer's 64 experts."""

TINY = ("--preset", "tiny", "--experts", "16", "--vocab", "512")


@dataclass(frozen=True)
class Loaded:
    """A model that can run, and the bytes it touches."""

    model: Model
    experts: ExpertSource
    traffic: Traffic
    container: Container

    @property
    def moe_layers(self) -> list[int]:
        """Layers with routed experts, of those that are run."""
        return [layer for layer in self.model.config.layers if layer in self.model.config.moe_layers]

    def warm(self) -> None:
        """Have every expert read once; with a cache for all they are in memory from then on."""
        for layer in self.moe_layers:
            for lease in self.experts.lease(layer, range(self.container.expert_count(layer))):
                lease.release()

    def session(self, past: int, more: int) -> Session:
        """Return a session that holds `past` tokens and takes `more`.

        The past is made up: latent caches hold some number, KDA memories are empty. Computing from them takes as
        long as with real ones.
        """
        session = Session(self.model, max(1, past + more), CHUNK)
        for layer in session.state.layers.values():
            if isinstance(layer, MlaState):
                for field in dataclasses.fields(layer):
                    values = getattr(layer, field.name)
                    if isinstance(values, np.ndarray):
                        values.view(np.uint8)[:] = 0x3C  # 0.0115 as float32 and as bfloat16, 1.06 as float16
        session.state.position = past
        return session

    def ids(self, count: int, seed: int) -> list[int]:
        """Random token ids."""
        dice = random.Random(seed)
        return [dice.randrange(self.model.config.vocab) for _ in range(count)]


@contextlib.contextmanager
def loaded(
    home: Path, *, cache_bytes: int | None = None, threads: int | None = None, tokens: int = 8192, **more: Any
) -> Iterator[Loaded]:
    """Return a container's model, with a cache for all its experts or for so many bytes of them."""
    with contextlib.closing(Container.open(home)) as container:
        layers = container.expert_layers()
        expert_bytes = container.expert_layout(layers[0]).payload_bytes
        if cache_bytes is None:
            count = sum(container.expert_count(layer) for layer in layers)
            cache_bytes = count * (expert_bytes + (1 << 16))  # a slot is a little larger than an expert
        settings = ModelSettings(container=home, expert_bytes=cache_bytes, threads=threads, **more)
        with (
            contextlib.closing(open_model_files(settings)) as opened,
            ready_model(opened, settings, capacity=tokens, chunk=CHUNK) as ready,
        ):
            model = ready.model
            traffic = Traffic(
                model.config, model.resident_bytes - model.embedding_bytes,
                model.embedding_bytes // model.config.vocab, expert_bytes,
            )  # fmt: skip
            yield Loaded(model, ready.experts, traffic, container)


def make_container(work: Path, *, tiny: bool = False) -> Path:
    """Return a container of a slice in `work`, made now unless it is there; the snapshot is removed behind it."""
    home = work / ("tiny.k3" if tiny else "slice.k3")
    if not home.exists():
        snapshot = work / "snapshot"
        shutil.rmtree(snapshot, ignore_errors=True)
        kind = TINY if tiny else SLICE
        _run("-m", "k3.verify.synthetic", str(snapshot), *kind)
        _run("-m", "k3.repack.cli", str(snapshot), str(home))
        shutil.rmtree(snapshot)
    return home


def _run(*arguments: str) -> None:
    began_s = time.monotonic()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    sys.stderr.write(f"{' '.join(arguments[:2])}: {time.monotonic() - began_s:.0f} s\n")
