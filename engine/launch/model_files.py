"""The files of a model, on disk or behind a daemon: opened, and checked as far as that needs no weights.

Runs before the first read of a weight, so it must not import NumPy, the kernels, or anything else that takes
longer to import than a container takes to open. Main thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3.base.errors import ConfigError
from k3.base.presence import is_file, is_there
from k3.checkpoint.hf_cache import snapshot_directory
from k3.container.reader import Container, unused_places
from k3.engine.definition.settings import ModelSettings, SettingsError
from k3.engine.definition.tokenizer import Tokenizer
from k3.model.architecture import ModelConfig, parse_layers
from k3.model.model_config import CONFIG_NAME, load_config
from k3.model.model_source import ModelSource
from k3.model.tensor_names import check_expert_layers, check_experts, check_tensors, needed_names
from k3.model.tensor_recipe import Recipe
from k3.model.vocabulary import (
    GENERATION_NAME,
    RANKS_NAME,
    SPECIAL_NAMES_NAME,
    parse_eos_ids,
    parse_vocabulary,
)

if TYPE_CHECKING:
    from k3.engine.launch.daemon_attachment import Attachment

DEFAULT_BITS = 8

_VOCABULARY_FILES = (RANKS_NAME, SPECIAL_NAMES_NAME)

_IDS_STILL_WORK = "Without it only --ids works: token ids in, token ids out"


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose files were found sound, with no weights loaded yet."""

    source: ModelSource
    config: ModelConfig
    names: tuple[str, ...]  # the dense tensors that a run reads
    warnings: tuple[str, ...]
    attachment: Attachment | None = None  # to the daemon that serves the model

    def close(self) -> None:
        """Close the files and the connection. Nothing can be read afterwards."""
        if self.attachment is not None:
            self.attachment.close()
        else:
            self.source.close()

    def daemon_status(self) -> dict[str, Any] | None:
        """Ask the daemon that serves the model for its status; None without a daemon. DaemonError."""
        return None if self.attachment is None else self.attachment.status()

    @property
    def has_vocabulary(self) -> bool:
        """True when the vocabulary's files exist."""
        paths = [self.source.text_file(name) for name in _VOCABULARY_FILES]
        return all(path is not None and is_file(path) for path in paths)

    def tokenizer(self) -> Tokenizer:
        """Read the model's vocabulary. ConfigError when its files are missing or contradict the configuration."""
        ranks, names = self._text_file(RANKS_NAME), self._text_file(SPECIAL_NAMES_NAME)
        if ranks is None:
            raise ConfigError(f"the model has no {RANKS_NAME}, so text cannot be encoded", advice=_IDS_STILL_WORK)
        if names is None:
            raise ConfigError(
                f"the model has no {SPECIAL_NAMES_NAME}, so its special tokens have no names",
                advice=_IDS_STILL_WORK,
            )
        return Tokenizer(parse_vocabulary(ranks[1], ranks[0], names[1], names[0], self.config.vocab))

    def eos_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a generation: those of generation_config.json, else of config.json."""
        file = self._text_file(GENERATION_NAME)
        ids = None if file is None else parse_eos_ids(file[1], file[0], self.config.vocab)
        return self.config.eos_ids if ids is None else ids

    def _text_file(self, name: str) -> tuple[Path, bytes] | None:
        """Return path and bytes of a small file of the model, None without it. Raises K3Error."""
        path, data = self.source.text_file(name), self.source.text_bytes(name)
        return None if path is None or data is None else (path, data)


def open_model_files(settings: ModelSettings) -> OpenedModel:
    """Open the model that the settings name, and check its configuration and names. Reads no weights.

    The caller closes what is returned. K3Error of the kind that fits.
    """
    if settings.store is not None:
        return _open_behind_daemon(settings)
    if settings.container is None:
        from k3.checkpoint.snapshot import Snapshot

        snapshot = Snapshot.open(settings.snapshot, recipe=_recipe(settings), layers=_snapshot_layers(settings))
        return _check_names(snapshot, settings, list(snapshot.warnings))
    container = Container.open(settings.container, settings.roots)
    try:
        _check_recipe(container, settings)
        warnings = [
            f"--dirs: {place} holds no root of this container"
            for place in unused_places(container.roots, settings.roots)
        ]
        return _check_names(container, settings, warnings)
    except BaseException:
        container.close()
        raise


def _open_behind_daemon(settings: ModelSettings) -> OpenedModel:
    """Open the model of the daemon that the settings name."""
    from k3.engine.launch.daemon_attachment import attach

    attachment = attach(settings)
    try:
        opened = _check_names(attachment.source, settings, [])
    except BaseException:
        attachment.close()
        raise
    return replace(opened, attachment=attachment)


def _snapshot_layers(settings: ModelSettings) -> range | None:
    """Return the layers that a snapshot is opened for, so that shards of others need not exist; None for all.

    SettingsError, before any shard is opened, when the model does not have these layers.
    """
    if settings.layers is None:
        return None
    for path in settings.snapshot:
        config_path = snapshot_directory(path) / CONFIG_NAME
        if is_there(config_path):
            return _configured(ModelConfig.from_raw(load_config(config_path), config_path), settings).layers
    return parse_layers(settings.layers)  # without a configuration; opening the snapshot raises for that


def _check_names(source: ModelSource, settings: ModelSettings, warnings: list[str]) -> OpenedModel:
    """Return the model if its names, shapes, dtypes and expert layers are those of its configuration. K3Error."""
    config_path = source.config_path
    config = _configured(ModelConfig.from_raw(source.config, config_path), settings)
    if config.unknown_keys:
        warnings.append(
            f"{config_path} has keys that this engine does not know and ignores: {', '.join(config.unknown_keys)}"
        )
    names = needed_names(source.tensor_names(), config)
    tensors = {name: source.dense(name) for name in names}
    check_tensors({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, config)
    check_expert_layers(source.expert_layers(), config)
    for layer in config.layers:
        if layer in config.moe_layers:
            check_experts(source.expert_layout(layer), config, layer)
    return OpenedModel(source, config, tuple(names), tuple(warnings))


def _recipe(settings: ModelSettings) -> Recipe:
    """Return the recipe that the options ask for; where they are silent it is 8 bits, as when repacking."""
    chosen = [settings.bits, settings.mla_bits, settings.head_bits]
    return Recipe(*(DEFAULT_BITS if bits is None else bits for bits in chosen))


def _check_recipe(container: Container, settings: ModelSettings) -> None:
    """Raise SettingsError when the options ask for other bits than the container was made with."""
    made = container.manifest.quantization
    for key in ("bits", "mla_bits", "head_bits"):
        asked = getattr(settings, key)
        if asked is not None and asked != made[key]:
            raise SettingsError(
                f"--{key.replace('_', '-')} {asked} was asked for, and this container was made with {made[key]}",
                path=container.home,
                advice="Leave the option (and its environment variable) out, or repack",
            )


def _configured(config: ModelConfig, settings: ModelSettings) -> ModelConfig:
    """Return the configuration as changed by the options. SettingsError for layers that do not exist."""
    if settings.mla_eps is not None:
        config = config.with_mla_eps(settings.mla_eps)
    config = config.with_latent_cache(settings.latent_type)
    if settings.layers is not None:
        try:
            config = config.truncated(settings.layers)
        except ValueError as error:
            raise SettingsError(f"--layers: {error}") from None
    return config
