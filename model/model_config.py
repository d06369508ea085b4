"""Parser of config.json: it finds the text model, unifies the names of keys and refuses contradictions.

K3 nests the text model's keys under `text_config`; derived checkpoints have them at the top level, and some keys
have two names in circulation. A file that gives two values for one key is refused: choosing one would be a guess.

Pure functions apart from `load_config`; safe to use from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3.base.errors import ConfigError
from k3.base.regular_file import read_small_file
from k3.base.safe_text import shown, shown_name
from k3.base.strict_json import parse_object

CONFIG_NAME = "config.json"
CONFIG_BYTES_MAX = 16 << 20

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "num_shared_experts": ("n_shared_experts",),
}
"""Keys with more than one name in circulation: the name that `text_config` returns, and the others."""

_CANONICAL = {other: name for name, others in SPELLINGS.items() for other in others}

TEXT_TABLES = frozenset(("linear_attn_config", "quantization_config"))
"""Tables of the text model that are named like those of other parts (`vision_config`)."""

DESCRIPTIVE_KEYS = frozenset(
    ("_name_or_path", "architectures", "auto_map", "model_type", "torch_dtype", "transformers_version")
)
"""Keys that describe the wrapper at the top level and the text model below it, so that two values are correct."""


def load_config(path: Path) -> dict[str, Any]:
    """Return config.json as parsed. Raises ConfigError when it is missing, too large or not a JSON object."""
    return parse_config(read_small_file(path, CONFIG_BYTES_MAX, ConfigError), path)


def parse_config(data: bytes, path: Path) -> dict[str, Any]:
    """Return the bytes of a config.json as an object. Raises ConfigError when they are not a JSON object."""
    return parse_object(
        data, what="the configuration", path=path, error=ConfigError, advice="Fetch config.json again"
    )


def text_config(raw: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the text model's configuration: one flat table with one name for each key.

    `raw` is the whole config.json, nested or flat. Keys of the top level are included (token ids are often only
    there), tables of other parts (`vision_config`) are not. Raises ConfigError naming both keys and both values
    when two levels or two names of a key disagree.
    """
    nested = raw.get("text_config")
    if nested is None:
        nested = {}
    if not isinstance(nested, Mapping):
        raise ConfigError("text_config is not an object", path=path, advice="Fetch config.json again")
    found: dict[str, tuple[str, Any]] = {}
    for key, value in nested.items():
        _claim(found, key, f"text_config.{key}", value, path)
    for key, value in raw.items():
        if not _is_other_part(key, value) and not (key in DESCRIPTIVE_KEYS and key in nested):
            _claim(found, key, key, value, path)
    return {key: value for key, (_, value) in found.items()}


def _is_other_part(key: str, value: Any) -> bool:
    """Return True if a key of the top level configures something else than the text model."""
    return key.endswith("_config") and key not in TEXT_TABLES and (key == "text_config" or isinstance(value, dict))


def _claim(found: dict[str, tuple[str, Any]], key: str, place: str, value: Any, path: Path) -> None:
    """Enter a key under its one name. `found` maps the name to (full key, value); null counts as missing."""
    name = _CANONICAL.get(key, key)
    known = found.get(name)
    if known is None or (known[1] is None and value is not None):
        found[name] = (place, value)
    elif value is not None and not _same(known[1], value):
        raise _conflict(known, (place, value), path)


def _same(one: Any, other: Any) -> bool:
    """Return True for values that are equal and alike: 1 is not True, but 1 and 1.0 are the same number."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _conflict(one: tuple[str, Any], other: tuple[str, Any], path: Path) -> ConfigError:
    return ConfigError(
        f"{shown_name(one[0])} is {shown(one[1])} but {shown_name(other[0])} is {shown(other[1])}",
        path=path,
        advice="They mean the same: correct the one that is wrong, or remove it",
    )
