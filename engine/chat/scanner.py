"""Text cut at its markers, as it comes.

A text that ends in the beginning of a marker is held back until the rest is there. One instance per stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from k3.engine.chat.markup import MARKERS

_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_LONGEST = max(map(len, MARKERS))


class Piece(NamedTuple):
    """A marker, or text between markers, never empty."""

    text: str
    is_marker: bool


class MarkerScanner:
    """Joined, the pieces that come out are the text that went in."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> Iterator[Piece]:
        """Yield the pieces that are complete with this text."""
        text = self._held + text
        at = 0
        for match in _MARKER.finditer(text):
            if match.start() > at:
                yield Piece(text[at : match.start()], False)
            yield Piece(match[0], True)
            at = match.end()
        keep = _begun_marker(text, at)
        if len(text) - keep > at:
            yield Piece(text[at : len(text) - keep], False)
        self._held = text[len(text) - keep :]

    def finish(self) -> str:
        """Return what was held back and became no marker. Then ready to start anew."""
        rest, self._held = self._held, ""
        return rest


def _begun_marker(text: str, at: int) -> int:
    """Return the length of the longest end of `text[at:]` that is the beginning of a marker."""
    for length in range(min(_LONGEST - 1, len(text) - at), 0, -1):
        if any(marker.startswith(text[len(text) - length :]) for marker in MARKERS):
            return length
    return 0
