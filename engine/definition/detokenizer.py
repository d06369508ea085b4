"""Token ids to text as they come, without ever breaking a character.

A token is a run of bytes and may begin or end inside a character. The decoder holds such bytes back until
the character is complete; what is still incomplete at the end becomes U+FFFD, exactly as decoding all bytes
at once would give. One instance per stream, one thread.
"""

from __future__ import annotations

import codecs

from k3.engine.definition.tokenizer import Tokenizer


class Detokenizer:
    """An incremental decoder. The pieces it returns, joined, are the decoded whole."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        """With `skip_special`, ids that the model's files mark as special give no text."""
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.skipped_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly empty. ValueError for an id outside the vocabulary."""
        piece = self._tokenizer.token_bytes(token)
        if token in self._skipped_ids:
            return ""
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What was held back and can no longer be completed: U+FFFD or nothing. Then ready to start anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
