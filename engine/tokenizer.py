"""Text to token ids and back to bytes, with the model's own vocabulary.

The vocabulary is `tiktoken.model` (lines of base64 bytes and a rank) followed by a fixed block of special
ids; their names come from tokenizer_config.json. The byte-pair merging itself is tiktoken's. Text of a user
is encoded with special tokens *disabled*: `<|close|>` in it becomes ordinary pieces and cannot end a message.

Immutable after loading; any thread may encode and decode.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3.container.direct import drive_error
from k3.container.errno_advice import Operation
from k3.container.errors import ConfigError

SPECIAL_COUNT = 256
"""Special ids after the ranks. The number is fixed by the model's code, not by any file."""

CUT_CHARS = 400_000
"""Text is cut into pieces of this length first, each encoded on its own (what the model was trained with)."""

CUT_RUN_CHARS = 25_000
"""A longer run of only whitespace, or of only other characters, is cut as well."""

PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How text is split before merging; `&&` is set intersection in tiktoken's regular expressions."""

_RUN = re.compile(r"\s+|\S+")
_IDS_STILL_WORK = "Without it only --ids works: token ids in, token ids out"


class Tokenizer:
    """One vocabulary. `specials` maps the name of a special token to its id."""

    def __init__(self, ranks: Mapping[bytes, int], special_names: Mapping[int, str], skipped: frozenset[int]):
        """`ranks` as `read_ranks` returns them; `special_names` for those of the 256 ids that have one;
        `skipped` are the special ids that plain text leaves out (`special: true` in the file)."""
        self.rank_count = len(ranks)
        self.vocab_size = self.rank_count + SPECIAL_COUNT
        self.specials = {
            special_names.get(token, f"<|reserved_token_{token}|>"): token
            for token in range(self.rank_count, self.vocab_size)
        }
        if len(self.specials) != SPECIAL_COUNT:
            raise ValueError("two special tokens have one name")
        self.skipped_ids = skipped
        import tiktoken  # a run on ids needs none of it

        self._encoding = tiktoken.Encoding(
            "k3", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=self.specials
        )
        self._special_bytes = {token: name.encode() for name, token in self.specials.items()}

    @classmethod
    def load(cls, ranks_path: Path | None, config_path: Path | None, vocab_size: int) -> Tokenizer:
        """Read the vocabulary and check it against the model's. ConfigError names the file and the line."""
        if ranks_path is None:
            raise ConfigError("the model has no tiktoken.model, so text cannot be encoded", advice=_IDS_STILL_WORK)
        if config_path is None:
            raise ConfigError(
                "the model has no tokenizer_config.json, so its special tokens have no names",
                advice=_IDS_STILL_WORK,
            )
        ranks = read_ranks(ranks_path)
        if len(ranks) + SPECIAL_COUNT != vocab_size:
            raise ConfigError(
                f"{len(ranks)} ranks and {SPECIAL_COUNT} special tokens do not make the model's vocabulary "
                f"of {vocab_size}",
                path=ranks_path,
                advice="The vocabulary belongs to another model",
            )
        names, skipped = read_special_names(config_path, len(ranks))
        return cls(ranks, names, skipped)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Token ids of `text`. Only with `allow_special` do names of special tokens become their ids."""
        ids: list[int] = []
        for piece in cut_text(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token stands for its name. ValueError outside the
        vocabulary."""
        if token in self._special_bytes:
            return self._special_bytes[token]
        if not 0 <= token < self.rank_count:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return self._encoding.decode_single_token_bytes(token)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens by name, bytes that are no UTF-8 as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


def cut_text(text: str) -> Iterator[str]:
    """Cut a text where the model's own tokenizer cuts it; joined, the pieces are the text again."""
    for start in range(0, len(text), CUT_CHARS):
        block = text[start : start + CUT_CHARS]
        begin = 0
        for run in _RUN.finditer(block):
            for cut in range(run.start() + CUT_RUN_CHARS, run.end(), CUT_RUN_CHARS):
                yield block[begin:cut]
                begin = cut
        yield block[begin:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Parse a tiktoken.model. Every rank from 0 up must be there once and every single byte must have one."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read_bytes(path).splitlines(), start=1):
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
            ) from error
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ConfigError("the vocabulary lacks single bytes, so it cannot spell every text", path=path)
    return ranks


def read_special_names(path: Path, first: int) -> tuple[dict[int, str], frozenset[int]]:
    """Names of the special ids that have one, and those that plain text leaves out (`special: true`)."""
    config = read_json_object(path)
    added = config.get("added_tokens_decoder")
    if not isinstance(added, dict):
        raise ConfigError("added_tokens_decoder is missing", path=path)
    names: dict[int, str] = {}
    skipped = set()
    for key, entry in added.items():
        name = entry.get("content") if isinstance(entry, dict) else None
        token = int(key) if key.isdecimal() else -1
        if not isinstance(name, str) or not name or not first <= token < first + SPECIAL_COUNT:
            raise ConfigError(
                f"added token {key!r} is not a named id from {first} to {first + SPECIAL_COUNT - 1}", path=path
            )
        if name in names.values():
            raise ConfigError(f"two added tokens are called {name!r}", path=path)
        names[token] = name
        if entry.get("special"):
            skipped.add(token)
    return names, frozenset(skipped)


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a small JSON file that holds one object. ConfigError otherwise."""
    try:
        value = json.loads(_read_bytes(path))
    except ValueError as error:
        raise ConfigError(f"not readable as JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", path=path)
    return value


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise ConfigError("does not exist", path=path, advice="Fetch the file") from error
        raise drive_error("cannot read", error, path, operation=Operation.READ) from error
