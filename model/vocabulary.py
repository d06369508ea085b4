"""Parsers of the vocabulary's small files: tiktoken.model, tokenizer_config.json, generation_config.json.

The vocabulary is `tiktoken.model` (lines of base64 bytes and a rank) followed by a fixed block of special ids;
their names come from tokenizer_config.json. The caller has read the files. Everything here is pure, and raises
ConfigError with the file's path, and nothing else, whatever the files contain.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3.base.errors import ConfigError
from k3.base.placeholder import placeholder
from k3.base.safe_text import shown
from k3.base.strict_json import parse_object
from k3.model.architecture import token_ids

RANKS_NAME = "tiktoken.model"
SPECIAL_NAMES_NAME = "tokenizer_config.json"
GENERATION_NAME = "generation_config.json"

SPECIAL_COUNT = 256
"""Number of special ids after the ranks. The model's code fixes it, no file does."""

SPECIAL_PLACES: dict[str, int] = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
"""Special tokens that have a name, and their positions counted from the first special id."""

_ID_DIGITS_MAX = 12
_REFETCH = "Fetch the file again"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ranks of the pieces, the name of every special id, and the special ids that plain text leaves out."""

    ranks: Mapping[bytes, int]
    special_names: Mapping[int, str]
    skipped: frozenset[int]


def parse_vocabulary(
    ranks_data: bytes, ranks_path: Path, names_data: bytes, names_path: Path, vocab_size: int | None
) -> Vocabulary:
    """Return the vocabulary of a model of `vocab_size` tokens; None allows any size.

    Raises ConfigError when a file is invalid or the sizes differ.
    """
    ranks = parse_ranks(ranks_data, ranks_path)
    if vocab_size is not None and len(ranks) + SPECIAL_COUNT != vocab_size:
        raise ConfigError(
            f"{len(ranks)} ranks and {SPECIAL_COUNT} special tokens do not make the model's vocabulary "
            f"of {vocab_size}",
            path=ranks_path,
            advice="The vocabulary belongs to another model",
        )
    names, skipped = parse_special_names(names_data, names_path, len(ranks))
    return Vocabulary(ranks, names, skipped)


def parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    """Return the pieces of a tiktoken.model and their ranks.

    Raises ConfigError unless the ranks count up from 0 without a gap and every single byte has one.
    """
    instead = placeholder(data)
    if instead is not None:
        raise ConfigError(instead[0], path=path, advice=instead[1])
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            piece = base64.b64decode(encoded, validate=True)
            if int(rank) != len(ranks) or piece in ranks or not piece:
                raise ValueError
            ranks[piece] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(
                f"line {number} of the vocabulary is not a new base64 piece with the next rank {len(ranks)}",
                path=path,
                advice=_REFETCH,
            ) from error
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ConfigError(
            "the vocabulary lacks single bytes, so it cannot spell every text", path=path, advice=_REFETCH
        )
    return ranks


def parse_special_names(data: bytes, path: Path, first: int) -> tuple[dict[int, str], frozenset[int]]:
    """Return the names of the special ids from `first` on, and the ids that plain text omits (`special: true`).

    An id without a name of its own is called `<|reserved_token_ID|>`, so no other id may be called that. Raises
    ConfigError for invalid, repeated and foreign ids.
    """
    added = _object(data, "the tokenizer's configuration", path).get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise ConfigError("added_tokens_decoder is missing", path=path, advice=_REFETCH)
    names: dict[int, str] = {}
    skipped = set()
    for key, entry in added.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        token = _token_of(key)
        if not isinstance(name, str) or not name or not first <= token < first + SPECIAL_COUNT:
            raise ConfigError(
                f"added token {shown(key)} is not a named id from {first} to {first + SPECIAL_COUNT - 1}",
                path=path,
                advice="The vocabulary belongs to another model, or the file is damaged",
            )
        if token in names:
            raise ConfigError(f"added token {token} is named twice", path=path, advice=_REFETCH)
        names[token] = name
        if entry.get("special"):
            skipped.add(token)
    every = complete_names(names, first)
    tokens: dict[str, int] = {}
    for token, name in every.items():
        other = tokens.setdefault(name, token)
        if other != token:
            raise ConfigError(
                f"two added tokens are called {shown(name)}: {other} and {token}", path=path, advice=_REFETCH
            )
    return every, frozenset(skipped)


def complete_names(names: Mapping[int, str], first: int) -> dict[int, str]:
    """Return the name of every special id: its own in `names`, or the one that the model's code gives it."""
    ids = range(first, first + SPECIAL_COUNT)
    return {token: names.get(token, f"<|reserved_token_{token}|>") for token in ids}


def parse_eos_ids(data: bytes, path: Path, vocab_size: int | None) -> tuple[int, ...] | None:
    """Return the tokens that end a generation according to a generation_config.json, None when it names none.

    Raises ConfigError for ids outside the vocabulary.
    """
    value = _object(data, "the generation's configuration", path).get("eos_token_id")
    if value is None:
        return None
    ids = token_ids(value, "eos_token_id", path)
    if vocab_size is not None and max(ids) >= vocab_size:
        raise ConfigError(f"eos_token_id {max(ids)} is outside the vocabulary", path=path, advice=_REFETCH)
    return ids


def _token_of(key: str) -> int:
    """Return the id that a key spells in plain decimal, -1 for any other key."""
    plain = key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS_MAX
    token = int(key) if plain else -1
    return token if str(token) == key else -1


def _object(data: bytes, what: str, path: Path) -> dict[str, Any]:
    return parse_object(data, what=what, path=path, error=ConfigError, advice=_REFETCH)
