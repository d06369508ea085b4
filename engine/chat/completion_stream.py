"""Completions as they come: text in pieces, or token ids, to the events of the parser. One thread each."""

from __future__ import annotations

from collections.abc import Iterable

from k3.engine.chat.completion import Completion, Event, joined
from k3.engine.chat.markup import MARKERS
from k3.engine.chat.parser import ChatParser, Observer
from k3.engine.chat.scanner import MarkerScanner
from k3.engine.definition.detokenizer import Detokenizer
from k3.engine.definition.tokenizer import Tokenizer


class TextCompletion:
    """A completion as text in which markers are written out. It may be cut anywhere."""

    def __init__(
        self, *, tools: Iterable[object] | None = None, thinking: bool = True, observe: Observer | None = None
    ) -> None:
        """Arguments as for `ChatParser`."""
        self._scanner = MarkerScanner()
        self._parser = ChatParser(tools=tools, thinking=thinking, observe=observe)

    def push(self, text: str) -> list[Event]:
        """Take more text and return the events that it gave."""
        events: list[Event] = []
        for piece in self._scanner.push(text):
            events += self._parser.marker(piece.text) if piece.is_marker else self._parser.text(piece.text)
        return events

    def finish(self) -> list[Event]:
        """End the completion."""
        return self._parser.finish(self._scanner.finish())


class TokenCompletion:
    """A completion as token ids: only control tokens are markers, whatever the text between them spells."""

    def __init__(
        self, tokenizer: Tokenizer, *, tools: Iterable[object] | None = None, thinking: bool = True
    ) -> None:
        """Arguments as for `ChatParser`. ValueError when the vocabulary lacks a marker."""
        missing = [marker for marker in MARKERS if marker not in tokenizer.specials]
        if missing:
            raise ValueError(f"the vocabulary has no {', '.join(missing)}")
        self._markers = {tokenizer.specials[marker]: marker for marker in MARKERS}
        self._detokenizer = Detokenizer(tokenizer)
        self._parser = ChatParser(tools=tools, thinking=thinking, exact_markers=True)

    def push(self, token: int) -> list[Event]:
        """Take a token and return the events that it gave. ValueError for an id outside the vocabulary."""
        marker = self._markers.get(token)
        if marker is None:
            return self._parser.text(self._detokenizer.push(token))
        return self._parser.text(self._detokenizer.finish()) + self._parser.marker(marker)

    def finish(self) -> list[Event]:
        """End the completion."""
        return self._parser.text(self._detokenizer.finish()) + self._parser.finish()


def parse_completion(text: str, *, tools: Iterable[object] | None = None, thinking: bool = True) -> Completion:
    """Parse a whole completion: the text behind the prompt, with or without what ends the message."""
    stream = TextCompletion(tools=tools, thinking=thinking)
    return joined(stream.push(text) + stream.finish())
