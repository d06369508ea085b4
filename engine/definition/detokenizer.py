"""Token ids to text, token by token, without breaking a character.

The bytes of a token may begin or end inside a UTF-8 character. The decoder keeps such bytes until the character is
complete; bytes that are still incomplete at the end become U+FFFD, as when all bytes are decoded at once. One
instance per stream of tokens, used by one thread.
"""

from __future__ import annotations

import codecs

from k3.engine.definition.tokenizer import Tokenizer


class Detokenizer:
    """An incremental decoder: the texts that it returns, joined, are the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        """Decode with `tokenizer`; with `skip_special`, special tokens of the model give no text."""
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.skipped_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """Return the text that `token` completes, possibly empty. ValueError for an id outside the vocabulary."""
        piece = self._tokenizer.token_bytes(token)
        if token in self._skipped_ids:
            return ""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """Return U+FFFD if an incomplete character is left, else nothing; then begin a new text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
