"""The checks of an engine, made on a snapshot's headers and small files before any weights are copied.

A model that no engine could run is refused, naming the tensor or the file: a tensor that is missing, has another
shape than config.json gives or holds no real numbers, a vocabulary that is invalid. A model that only this
project's engine cannot run is noted: its copy equals the original, and another program may be able to run it.

Reads the small files and nothing else. Safe to use from any thread.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from k3.base.errors import UnsupportedError
from k3.checkpoint.snapshot import Snapshot
from k3.model.architecture import ModelConfig
from k3.model.tensor_names import (
    check_dtype,
    check_expert_layers,
    check_experts,
    check_shape,
    expected_tensors,
    listing,
    present_names,
    text_prefix,
    unknown_names,
)
from k3.model.tensor_recipe import is_known
from k3.model.vocabulary import (
    GENERATION_NAME,
    RANKS_NAME,
    SPECIAL_COUNT,
    SPECIAL_NAMES_NAME,
    parse_eos_ids,
    parse_ranks,
    parse_special_names,
    parse_vocabulary,
)

_CANNOT_RUN = "k3-run cannot run this model"


def check_model(snapshot: Snapshot, layers: Collection[int] | None) -> list[str]:
    """Check a snapshot of some layers (None: of all), and return a sentence for each obstacle to k3-run.

    Raises SourceError, with the file and the tensor, for a model that no engine could run.
    """
    notes: list[str] = []
    _check_dtypes(snapshot)
    config = _config(snapshot, notes)
    if config is not None:
        _check_tensors(snapshot, config, range(config.layer_count) if layers is None else layers, notes)
    notes += check_text(snapshot, None if config is None else config.vocab)
    return notes


def check_text(snapshot: Snapshot, vocab_size: int | None) -> list[str]:
    """Check the files that text and the end of a generation need; `vocab_size` is None when it is not known.

    Returns a sentence for each missing file. Raises ConfigError for an invalid one.
    """
    generation = _read(snapshot, GENERATION_NAME)
    ranks, names = _read(snapshot, RANKS_NAME), _read(snapshot, SPECIAL_NAMES_NAME)
    if generation is not None:
        parse_eos_ids(generation[1], generation[0], vocab_size)
    if ranks is not None and names is not None:
        parse_vocabulary(ranks[1], ranks[0], names[1], names[0], vocab_size)
    elif ranks is not None:
        parse_ranks(ranks[1], ranks[0])
    elif names is not None and vocab_size is not None:
        parse_special_names(names[1], names[0], vocab_size - SPECIAL_COUNT)
    missing = [name for name, file in ((RANKS_NAME, ranks), (SPECIAL_NAMES_NAME, names)) if file is None]
    return [f"there is no {name}: k3-run will take token ids only, no text" for name in missing]


def _read(snapshot: Snapshot, name: str) -> tuple[Path, bytes] | None:
    path, data = snapshot.text_file(name), snapshot.text_bytes(name)
    return None if path is None or data is None else (path, data)


def _check_dtypes(snapshot: Snapshot) -> None:
    """Check that every known dense tensor holds real numbers, even if config.json is not supported."""
    for name in snapshot.tensor_names():
        if is_known(name):
            check_dtype(name, snapshot.tensors[name].dtype, _shard_path(snapshot, name))


def _config(snapshot: Snapshot, notes: list[str]) -> ModelConfig | None:
    try:
        return ModelConfig.from_raw(snapshot.config, snapshot.config_path)
    except UnsupportedError as error:
        notes.append(f"{_CANNOT_RUN}: {error}")
        return None


def _check_tensors(snapshot: Snapshot, config: ModelConfig, layers: Collection[int], notes: list[str]) -> None:
    """Check that the layers' dense tensors exist, and that they and the experts' tensors have the right shapes."""
    names = snapshot.tensor_names()
    prefix = text_prefix(names, snapshot.config_path)
    unknown = unknown_names(names, config)
    if unknown:
        notes.append(f"{_CANNOT_RUN}: it does not know {listing(unknown)}")
    expected = expected_tensors(config, layers)
    for name in present_names(names, config, layers, snapshot.config_path):
        shape = expected[name.removeprefix(prefix)]
        check_shape(name, snapshot.tensors[name].shape, shape, _shard_path(snapshot, name))
    try:
        check_expert_layers(snapshot.expert_layers(), config)
        for layer in sorted(config.moe_layers.intersection(layers)):
            check_experts(snapshot.expert_layout(layer), config, layer, snapshot.expert_extents(layer, 0)[0].path)
    except UnsupportedError as error:
        notes.append(f"{_CANNOT_RUN}: {error}")


def _shard_path(snapshot: Snapshot, name: str) -> Path:
    return snapshot.shards[snapshot.tensors[name].shard].path
