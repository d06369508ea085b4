"""The identity of a model: three names that stand for everything that decides which tokens it generates.

A container's UUID identifies weights. The same weights give other tokens under another configuration, and the same
token ids mean another text under another vocabulary, so these two have digests of their own. The digests are not
stored in a container: they are computed from its small files when it is opened (docs/container.md section 3.1).
Pure functions; safe to use from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from k3.base import checksum
from k3.base.errors import ConfigError
from k3.base.strict_json import parse_object
from k3.model.model_config import text_config

GENERATION_CONFIG_NAME = "generation_config.json"

TEXT_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "special_tokens_map.json",
    "tiktoken.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json",
)  # fmt: skip
"""Small files that map text to token ids, under every name in use."""

MEANINGLESS_KEYS = frozenset(("_from_model_config", "_name_or_path", "auto_map", "transformers_version"))
"""Keys of configurations that only record a file's origin or the program that wrote it. Every other key counts."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The name of exactly these weights, run with exactly this configuration and vocabulary."""

    weights: str  # a container's UUID, or "snapshot:" and a digest
    config: str
    text: str

    def __str__(self) -> str:
        return f"{self.weights} (configuration {self.config}, vocabulary {self.text})"

    def differences(self, other: ModelIdentity) -> str:
        """Return the fields that differ from `other`, with both values, for messages; empty if none does."""
        pairs = [(field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        return ", ".join(f"{name} {mine} instead of {theirs}" for name, mine, theirs in pairs if mine != theirs)


def config_identity(raw: Mapping[str, Any], generation: bytes | None, path: Path) -> str:
    """Return the digest of a parsed config.json and of the bytes of generation_config.json (None without one).

    The digest does not depend on the order and the alternative names of keys, on whitespace, on the spelling of a
    number, on keys that are null, or on MEANINGLESS_KEYS. `path` is config.json's, for messages. Raises
    ConfigError when one of the two contradicts itself.
    """
    value = None
    if generation is not None:
        value = _meaning(
            parse_object(
                generation, what="the generation settings", path=path.with_name(GENERATION_CONFIG_NAME),
                error=ConfigError, advice=f"Fetch {GENERATION_CONFIG_NAME} again",
            )
        )  # fmt: skip
    return _digest({"config": _meaning(text_config(raw, path)), "generation": value})


def text_identity(digests: Mapping[str, str]) -> str:
    """Return the digest of the vocabulary's files; `digests` are hexadecimal digests of small files by name."""
    return _digest({name: digests[name] for name in TEXT_FILES if name in digests})


def _digest(value: Any) -> str:
    return checksum.digest(checksum.canonical_json(value)).hex()


def _meaning(value: Any) -> Any:
    """Return a configuration without null values and MEANINGLESS_KEYS, and with every whole number as an int."""
    if isinstance(value, Mapping):
        return {
            key: _meaning(item) for key, item in value.items() if item is not None and key not in MEANINGLESS_KEYS
        }
    if isinstance(value, list):
        return [_meaning(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
