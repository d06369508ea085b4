"""Attacks on config.json and on its agreement with the shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from k3.base.errors import ConfigError, ExpertError, SourceError
from tests.attacks.builders import CONFIG, SHARD, add, attack, edit_json, shard_name


@attack(ConfigError, "does not exist; it holds", file=CONFIG)
def config_missing(directory: Path) -> None:
    """Not a snapshot, or not all of it; the message says what the directory holds."""
    (directory / CONFIG).unlink()


for _name, _bytes, _says, _why in (
    ("config_empty", b"", "is not JSON", "A file of no bytes."),
    ("config_cut", b'{"model_type": "kimi', "is not JSON", "A download that broke off."),
    ("config_zeros", bytes(4096), "is not JSON", "A file of zeros, after a power cut."),
    ("config_utf16", '{"a": 1}'.encode("utf-16"), "is not UTF-8", "Another encoding."),
    ("config_array", b"[1]", "not a JSON object but an array", "The configuration is an object."),
    ("config_string", b'"kimi"', "not a JSON object but a string", "The configuration is an object."),
    ("config_deep", b'{"a":' * 100_000, "nested too deeply", "Nested until the parser's stack ends."),
    ("config_key_twice", b'{"num_experts": 4, "num_experts": 8}', "twice", "Two answers to one question."),
    (
        "config_text_not_object",
        b'{"text_config": [1]}',
        "text_config is not an object",
        "The text model's table is an object.",
    ),
):

    def _content(directory: Path, content: bytes = _bytes) -> None:
        (directory / CONFIG).write_bytes(content)

    add(_name, _why, ConfigError, _says, _content, file=CONFIG)


@attack(ConfigError, "more than the 16777216 allowed", file=CONFIG)
def config_enormous(directory: Path) -> None:
    """Refused by its size, before it is read."""
    os.truncate(directory / CONFIG, (16 << 20) + 1)


@attack(ConfigError, "a pipe", file=CONFIG)
def config_is_pipe(directory: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    (directory / CONFIG).unlink()
    os.mkfifo(directory / CONFIG)


for _name, _nested, _flat, _says, _why in (
    (
        "config_two_spellings",
        {"num_experts_per_tok": 3},
        {},
        "text_config.num_experts_per_token is 2 but text_config.num_experts_per_tok is 3",
        "Two names of one number with two values.",
    ),
    (
        "config_two_places",
        {},
        {"hidden_size": 64},
        "text_config.hidden_size is 32 but hidden_size is 64",
        "Nested and flat disagree.",
    ),
    (
        "config_both",
        {},
        {"n_routed_experts": 8},
        "text_config.num_experts is 4 but n_routed_experts is 8",
        "Another name in another place.",
    ),
    (
        "config_bool_for_number",
        {},
        {"num_shared_experts": True, "tie_word_embeddings": 0},
        "but",
        "True is 1 for Python only.",
    ),
    ("config_experts_string", {"num_experts": "4"}, {}, "num_experts is '4', not a count", "A count is a number."),
    (
        "config_experts_float",
        {"num_experts": 4.0},
        {},
        "num_experts is 4.0, not a count",
        "A count is a whole number.",
    ),
    (
        "config_experts_negative",
        {"num_experts": -4},
        {},
        "num_experts is -4, not a count",
        "A count is not negative.",
    ),
    (
        "config_experts_enormous",
        {"num_experts": 10**18},
        {},
        "not a count",
        "Nothing may be sized by such a number.",
    ),
    (
        "config_layers_enormous",
        {"num_hidden_layers": 10**18},
        {},
        "not a count",
        "Nothing may be sized by such a number.",
    ),
):

    def _edit(directory: Path, nested: dict[str, Any] = _nested, flat: dict[str, Any] = _flat) -> None:
        def change(config: dict[str, Any]) -> None:
            config.update(flat)
            config["text_config"].update(nested)

        edit_json(directory / CONFIG, change)

    add(_name, _why, ConfigError, _says, _edit, file=CONFIG)


@attack(SourceError, "the layer has no tensors", file=CONFIG)
def more_layers_than_shards(directory: Path) -> None:
    """config.json of a deeper model: the missing layers would be left out or made up."""
    edit_json(directory / CONFIG, lambda config: config["text_config"].update(num_hidden_layers=4))


@attack(ExpertError, "the expert is missing; the layer has 4 of 5", file=SHARD, tensor=True)
def more_experts_than_shards(directory: Path) -> None:
    """config.json promises more experts than the shards hold: the router will ask for them."""
    edit_json(directory / CONFIG, lambda config: config["text_config"].update(num_experts=5))


@attack(ExpertError, "the configuration has 3 experts, the layer 4", file=SHARD, tensor=True)
def fewer_experts_than_shards(directory: Path) -> None:
    """config.json promises fewer experts than the shards hold: it belongs to another model."""
    edit_json(directory / CONFIG, lambda config: config["text_config"].update(num_experts=3))


@attack(SourceError, "numbers for 4096 heads", file=shard_name(1), tensor=True, offset=True)
def more_heads_than_numbers(directory: Path) -> None:
    """A per-head parameter with fewer numbers than heads: the rest would be read from what follows."""

    def change(config: dict[str, Any]) -> None:
        config["text_config"]["linear_attn_config"]["num_heads"] = 4096

    edit_json(directory / CONFIG, change)


@attack(
    SourceError,
    "the padding behind the 1 heads is not zero",
    file=shard_name(1),
    tensor=True,
    offset=True,
)
def fewer_heads_than_numbers(directory: Path) -> None:
    """A number of heads that cuts off numbers in use."""

    def change(config: dict[str, Any]) -> None:
        config["text_config"]["linear_attn_config"]["num_heads"] = 1

    edit_json(directory / CONFIG, change)
