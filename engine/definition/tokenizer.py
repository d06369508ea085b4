"""Text to token ids, and token ids to bytes, by the model's own vocabulary.

tiktoken merges the byte pairs. Text of a user is encoded with special tokens *disabled*: `<|close|>` in it becomes
ordinary tokens and cannot end a message. Immutable after loading; any thread may encode and decode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from k3.model.vocabulary import Vocabulary

CUT_CHARS = 400_000
"""Text is cut at multiples of this length and each cut is encoded on its own, as in the model's training."""

CUT_RUN_CHARS = 25_000
"""A longer run of whitespace, or of characters without whitespace, is cut into runs of this length."""

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
"""The expression that splits text before merging; `&&` is set intersection in tiktoken's expressions."""

_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """A vocabulary. `specials` maps the name of each special token to its id."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.rank_count = len(vocabulary.ranks)
        self.specials = {name: token for token, name in vocabulary.special_names.items()}
        self.vocab_size = self.rank_count + len(self.specials)
        self.skipped_ids = vocabulary.skipped
        import tiktoken  # imported here because a run on token ids does not need it

        self._encoding = tiktoken.Encoding(
            "k3", pat_str=PATTERN, mergeable_ranks=dict(vocabulary.ranks), special_tokens=self.specials
        )
        self._special_bytes = {token: name.encode() for name, token in self.specials.items()}

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Return the token ids of `text`. Names of special tokens become their ids only with `allow_special`."""
        ids: list[int] = []
        for piece in cut_text(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all")
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; those of a special token are its name.

        ValueError for an id outside the vocabulary.
        """
        if token in self._special_bytes:
            return self._special_bytes[token]
        if not 0 <= token < self.rank_count:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        return self._encoding.decode_single_token_bytes(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`: special tokens by name, bytes that are not UTF-8 as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


def cut_text(text: str) -> Iterator[str]:
    """Yield the text in the cuts that the model's own tokenizer makes; joined, they are the text."""
    for start in range(0, len(text), CUT_CHARS):
        block = text[start : start + CUT_CHARS]
        begin = 0
        for run in _RUN.finditer(block):
            for cut in range(run.start() + CUT_RUN_CHARS, run.end(), CUT_RUN_CHARS):
                yield block[begin:cut]
                begin = cut
        yield block[begin:]
