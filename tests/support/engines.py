"""Helpers for tests of the engine: the golden snapshots, loaded models, and the numbers to compare with."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.checkpoint.snapshot import Snapshot
from k3.engine.definition.model_options import ModelOptions
from k3.engine.forward.model import Model
from k3.engine.run.session import Session
from k3.model.architecture import ModelConfig
from k3.model.model_source import ModelSource
from k3.model.tensor_names import needed_names
from k3.model.tensor_recipe import Recipe
from k3.store.lending.file_source import FileSource
from k3.store.source import ExpertSource

VECTORS = Path(__file__).parents[1] / "vectors"
Array = npt.NDArray[Any]

GOLDEN_REL_L2 = 2e-5
"""Largest relative L2 distance of logits from the golden ones; independent implementations agree to 5e-6."""


def golden(name: str) -> dict[str, Array]:
    """Return the arrays of a golden file, by name."""
    with np.load(VECTORS / f"{name}.npz") as file:
        return {key: file[key] for key in file}


def rel_l2(found: Array, wanted: Array) -> float:
    """Return the L2 norm of the difference, divided by that of `wanted`."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def snapshot(name: str = "tiny_s1", bits: int = 16) -> Snapshot:
    """Open a golden snapshot whose dense matrices are read in this many bits."""
    return Snapshot.open([VECTORS / name], recipe=Recipe(bits, bits, bits))


def copied(name: str, target: Path) -> Path:
    """Copy a golden snapshot to `target`, writable, and return its path."""
    shutil.copytree(VECTORS / name, target, copy_function=shutil.copyfile)
    target.chmod(0o755)
    return target


def loaded_model(source: ModelSource, config: ModelConfig, experts: ExpertSource, options: ModelOptions) -> Model:
    """Return a model with all its dense weights in memory."""
    with contextlib.closing(source.begin_load(needed_names(source.tensor_names(), config))) as reading:
        model = Model(source, config, experts, options, reading)
        model.load()
    return model


@contextlib.contextmanager
def loaded(
    source: ModelSource,
    *,
    exact: bool = True,
    keep_share: float = 1.0,
    cache_bytes: int = 1 << 22,
    layers: str | None = None,
    wrap: Callable[[ExpertSource], ExpertSource] = lambda experts: experts,
) -> Iterator[Model]:
    """Load a model whose experts come from a FileSource, wrapped by `wrap`; close the source after the block."""
    config = ModelConfig.from_raw(source.config, Path("config.json"))
    if layers is not None:
        config = config.truncated(layers)
    experts = FileSource(source, cache_bytes=cache_bytes, threads=2)
    try:
        yield loaded_model(source, config, wrap(experts), ModelOptions(exact, keep_share))
    finally:
        experts.close()


def all_logits(model: Model, ids: Array, chunk: int) -> Array:
    """Return the logits [T, vocab] of a prompt that is taken in `chunk` tokens at a time."""
    rows: list[Array] = []
    Session(model, len(ids), chunk).prefill(ids.tolist(), rows.append)
    return np.concatenate(rows)
