"""The output of a generation: text or ids on stdout as they come, or JSON lines.

The timing line goes to stderr, so that stdout holds the answer and nothing else. Main thread only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from k3.base.cli_support import emit_json
from k3.base.safe_text import visible_lines
from k3.engine.definition.detokenizer import Detokenizer
from k3.engine.definition.run_report import Report
from k3.engine.definition.settings import SamplerOptions
from k3.engine.definition.tokenizer import Tokenizer


class Output(Protocol):
    """A receiver of every token, and of the end or an interruption."""

    @property
    def mid_line(self) -> bool:
        """True unless the cursor is at the start of a line."""

    def token(self, token: int, *, is_stop: bool) -> None:
        """Show a token; `is_stop` when it ends the generation."""

    def interrupt(self) -> None:
        """End the output in the middle, and leave the terminal readable."""

    def finish(self, ids: list[int], stop: str, report: Report, sampler: SamplerOptions) -> None:
        """Show the end of a generation that ended as it should."""


class TextOutput:
    """Shows text as its characters become complete; without a tokenizer, ids separated by commas.

    A stop token has no text, but it has an id. On a terminal, control characters other than line ends and tabs
    are written as escapes, since a terminal would obey them; a pipe or a file receives the text as it is.
    """

    def __init__(self, tokenizer: Tokenizer | None, before: Sequence[int] = ()) -> None:
        """Begin after the tokens `before`, whose last may end inside a character."""
        self._detokenizer = None if tokenizer is None else _detokenizer(tokenizer, before)
        self._begun = False
        self._mid_line = False
        self._shows_controls = sys.stdout.isatty()

    @property
    def mid_line(self) -> bool:
        """See `Output.mid_line`."""
        return self._mid_line

    def token(self, token: int, *, is_stop: bool) -> None:
        """See `Output.token`."""
        if self._detokenizer is None:
            self._write(f",{token}" if self._begun else str(token))
        elif not is_stop:
            self._write(self._detokenizer.push(token))

    def interrupt(self) -> None:
        """See `Output.interrupt`."""
        if self._detokenizer is not None:
            self._write(self._detokenizer.finish())
        if self._begun:
            self._write("\n")

    def finish(self, ids: list[int], stop: str, report: Report, sampler: SamplerOptions) -> None:
        """See `Output.finish`."""
        if self._detokenizer is not None:
            self._write(self._detokenizer.finish())
        self._write("\n")
        sys.stderr.write(report.line() + "\n")

    def _write(self, text: str) -> None:
        self._begun = self._begun or bool(text)
        self._mid_line = not text.endswith("\n") if text else self._mid_line
        # A character that the terminal's encoding lacks becomes a question mark; generation continues.
        encoding = sys.stdout.encoding or "utf-8"
        if self._shows_controls:
            text = visible_lines(text)
        sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()


class JsonOutput:
    """Shows a JSON line per token, then a summary.

        {"type": "token", "index": 0, "id": 17, "text": "Hel"}      text is null when the prompt was ids
        {"type": "summary", "ids": [...], "text": "...", "stop": "eos" | "length", "temperature": 0.0,
         "top_p": 1.0, "seed": 0, ...}                              and the numbers of `run_report.Report`

    The lines of `cli_support.Progress` come before them, while weights are loaded.

    Characters that a token leaves incomplete come with the token that completes them; bytes that are incomplete
    at the end are in the summary's text only. The text of a stop token is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, before: Sequence[int] = ()) -> None:
        """Begin after the tokens `before`, as `TextOutput` does."""
        self._detokenizer = None if tokenizer is None else _detokenizer(tokenizer, before)
        self._pieces: list[str] = []
        self._count = 0

    @property
    def mid_line(self) -> bool:
        """See `Output.mid_line`."""
        return False

    def token(self, token: int, *, is_stop: bool) -> None:
        """See `Output.token`."""
        text = None
        if self._detokenizer is not None:
            text = "" if is_stop else self._detokenizer.push(token)
            self._pieces.append(text)
        emit_json("token", index=self._count, id=token, text=text)
        self._count += 1

    def interrupt(self) -> None:
        """See `Output.interrupt`. Every line is complete already."""

    def finish(self, ids: list[int], stop: str, report: Report, sampler: SamplerOptions) -> None:
        """See `Output.finish`."""
        text = None if self._detokenizer is None else "".join(self._pieces) + self._detokenizer.finish()
        emit_json(
            "summary", ids=ids, text=text, stop=stop, temperature=sampler.temperature, top_p=sampler.top_p,
            seed=sampler.seed, **report.as_dict(),
        )  # fmt: skip


def _detokenizer(tokenizer: Tokenizer, before: Sequence[int]) -> Detokenizer:
    """Return a detokenizer that continues after the tokens `before`."""
    detokenizer = Detokenizer(tokenizer)
    for token in before:
        detokenizer.push(token)
    return detokenizer
