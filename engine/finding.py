"""The files of a model, on disk or behind a daemon: opened, and checked as far as that needs no weights.

Runs before the first read of a weight, so it must not import NumPy, the kernels or anything else that takes longer
to import than a container takes to open. Main thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from k3.container import checksum
from k3.container.direct import drive_error
from k3.container.errors import ConfigError, DamageError
from k3.container.hf_cache import snapshot_directory
from k3.container.modelconfig import CONFIG_NAME, load_config
from k3.container.reader import Container, unused_places
from k3.container.recipe import Recipe
from k3.engine.config import ModelConfig, parse_layers, token_ids
from k3.engine.plan import Source
from k3.engine.settings import ModelSettings, SettingsError
from k3.engine.tensor_names import check_shapes, needed_names
from k3.engine.tokenizer import Tokenizer, read_json_object

if TYPE_CHECKING:
    from k3.engine.attaching import Attachment

DEFAULT_BITS = 8

_VOCABULARY_FILES = ("tiktoken.model", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that can be run by its files, with nothing loaded yet."""

    source: Source
    config: ModelConfig
    names: list[str]  # dense tensors that a run reads
    warnings: list[str]
    attachment: Attachment | None = None  # to the daemon that the model comes from

    def close(self) -> None:
        """Close the files and the connection; nothing can be read afterwards."""
        if self.attachment is not None:
            self.attachment.close()
        elif isinstance(self.source, Container):
            self.source.close()

    @property
    def has_vocabulary(self) -> bool:
        """Whether the vocabulary's files are there."""
        paths = [self.source.text_file(name) for name in _VOCABULARY_FILES]
        return all(path is not None and path.is_file() for path in paths)

    def tokenizer(self) -> Tokenizer:
        """The model's vocabulary. ConfigError when its files are missing or do not fit."""
        ranks, names = map(self._text_file, _VOCABULARY_FILES)
        return Tokenizer.load(ranks, names, self.config.vocab)

    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation: generation_config.json's, else config.json's."""
        path = self._text_file("generation_config.json")
        value = None if path is None else read_json_object(path).get("eos_token_id")
        if path is None or value is None:
            return self.config.eos_ids
        ids = token_ids(value, "eos_token_id", path)
        if max(ids) >= self.config.vocab:
            raise ConfigError(f"eos_token_id {max(ids)} is outside the vocabulary", path=path)
        return ids

    def _text_file(self, name: str) -> Path | None:
        """A small file of the model, or None. In a container it must be what its digest says: DamageError."""
        path = self.source.text_file(name)
        if path is None or not isinstance(self.source, Container):
            return path
        wanted = next(file.digest for file in self.source.manifest.text_files if file.path == name)
        try:
            found = checksum.digest(path.read_bytes()).hex()
        except OSError as error:
            raise drive_error("cannot read", error, path) from error
        if found != wanted:
            raise DamageError("file does not match its digest", path=path, advice="Restore it, or repack")
        return path


def open_model_files(settings: ModelSettings) -> OpenedModel:
    """Open the container or snapshot and check configuration and names. Reads no weights.

    What it returns is the caller's to close.
    """
    if settings.store is not None:
        return _attached(settings)
    if settings.container is None:
        from k3.container.snapshot import Snapshot

        snapshot = Snapshot.open(settings.snapshot, recipe=_recipe(settings), layers=_snapshot_layers(settings))
        return _checked(snapshot, snapshot.config_path, settings, list(snapshot.warnings))
    container = Container.open(settings.container, settings.roots)
    try:
        _check_recipe(container, settings)
        warnings = [
            f"--dirs: {place} holds no root of this container"
            for place in unused_places(container.roots, settings.roots)
        ]
        return _checked(container, settings.container / "config.json", settings, warnings)
    except BaseException:
        container.close()
        raise


def _attached(settings: ModelSettings) -> OpenedModel:
    """The model of the daemon that the settings name."""
    from k3.engine.attaching import attach

    attachment = attach(settings)
    try:
        opened = _checked(attachment.source, attachment.source.home / CONFIG_NAME, settings, [])
    except BaseException:
        attachment.close()
        raise
    return replace(opened, attachment=attachment)


def _snapshot_layers(settings: ModelSettings) -> range | None:
    """Layers that a snapshot is opened for, so that shards of others need not be there; None for all.

    That the model has them is checked here, before the shards are looked at.
    """
    if settings.layers is None:
        return None
    for path in settings.snapshot:
        config_path = snapshot_directory(path) / CONFIG_NAME
        if config_path.exists():
            return _configured(ModelConfig.from_raw(load_config(config_path), config_path), settings).layers
    return parse_layers(settings.layers)  # there is no configuration; opening will say so


def _checked(source: Source, config_path: Path, settings: ModelSettings, warnings: list[str]) -> OpenedModel:
    config = _configured(ModelConfig.from_raw(source.config, config_path), settings)
    if config.unknown_keys:
        warnings.append(
            f"{config_path} has keys that this engine does not know and does not follow: "
            f"{', '.join(config.unknown_keys)}"
        )
    names = needed_names(source.tensor_names(), config)
    if isinstance(source, Container):
        check_shapes({name: source.tensor(name).shape for name in names}, config)
    return OpenedModel(source, config, names, warnings)


def _recipe(settings: ModelSettings) -> Recipe:
    """What the options ask for; what they leave open is 8 bits, as when repacking."""
    chosen = [settings.bits, settings.mla_bits, settings.head_bits]
    return Recipe(*(DEFAULT_BITS if bits is None else bits for bits in chosen))


def _check_recipe(container: Container, settings: ModelSettings) -> None:
    """A container was quantized when it was made; asking for other bits now cannot be honoured."""
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
    if settings.mla_eps is not None:
        config = config.with_mla_eps(settings.mla_eps)
    config = config.with_latent_cache(settings.latent_type)
    if settings.layers is not None:
        try:
            config = config.truncated(settings.layers)
        except ValueError as error:
            raise SettingsError(f"--layers: {error}") from None
    return config
