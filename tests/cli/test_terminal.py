"""Holds up that nothing foreign has power over a terminal: not a name in a file, not a model's text."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pty
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base.cli_support import Progress, echo, report_error
from k3.base.errors import K3Error
from k3.base.safe_text import visible, visible_lines, visible_text
from k3.base.streams import say
from k3.engine.definition.tokenizer import Tokenizer
from k3.engine.run.token_output import TextOutput
from k3.model.vocabulary import Vocabulary, complete_names
from k3.store.daemon.log_output import PlainFormatter
from k3.verify.finding import Finding, Kind

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b]52;c;eA==\x07\x9b31m\u202egpj.exe\r\x7f\x00"
"""A title, a clear screen, a clipboard, a colour by one C1 character, a turned direction, an overwritten line."""


def powerless(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


@given(st.text())
@settings(derandomize=True, deadline=None)
def test_what_is_made_visible_is_printable_and_plain_text_stays(text: str) -> None:
    assert all(c.isprintable() or c in "\u3000\xa0" or c.isspace() for c in visible(text))
    assert "\n" not in visible(text)
    assert visible_text("a\n" + text).startswith("a\n")
    assert not any(c < " " and c not in "\n\t" for c in visible_lines(text))
    if text.isprintable():
        assert visible(text) == visible_lines(text) == text


def test_spaces_of_all_kinds_stay_and_half_characters_show() -> None:
    assert visible("a\u3000b\xa0c") == "a\u3000b\xa0c"
    assert visible("\udc80\x1b\n") == "\\udc80\\x1b\\n"


def test_an_error_shows_every_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    error = K3Error(EVIL, path=f"/x/{EVIL}", tensor=EVIL, advice=EVIL)
    report_error(error, as_json=False)
    report_error(error, as_json=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert lines[1].isascii()
    assert json.loads(lines[1])["path"] == f"/x/{EVIL}"


def test_a_finding_shows_every_part_of_it() -> None:
    assert str(Finding(Kind.DAMAGED, EVIL, EVIL, tensor=EVIL, advice=EVIL)).isprintable()


def test_what_commands_print_and_say_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    echo(f"{EVIL}\nnext line")
    say(f"{EVIL}\n")
    output, error = capsys.readouterr()
    assert powerless(output)
    assert powerless(error)
    assert output.endswith("\nnext line\n")


def test_the_daemons_log_is_visible() -> None:
    record = logging.LogRecord("k3.store", logging.INFO, "x", 1, "client %s", (EVIL,), None)
    assert powerless(PlainFormatter().format(record))


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_the_item_of_a_progress_bar_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = Progress("reading", 100)
    progress.item("\x1b]0;owned\x07\x9bshard")
    progress.advance(50)
    progress.close()
    assert "\x07" not in terminal.getvalue()
    assert "\x1b]" not in terminal.getvalue()
    assert "\x9b" not in terminal.getvalue()


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    """Return a vocabulary of single bytes: any text is a sequence of its tokens."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    return Tokenizer(Vocabulary(ranks, complete_names({}, 256), frozenset()))


def shown_on(stream: Any, tokenizer: Tokenizer, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        output = TextOutput(tokenizer)
        for byte in data:
            output.token(byte, is_stop=False)
        output.interrupt()
        stream.flush()


def all_of(leader: int) -> bytes:
    """Everything that came out of a terminal whose other end is closed: a read gives what has arrived by then."""
    found = b""
    with contextlib.suppress(OSError):  # the system's word for its end
        while data := os.read(leader, 65536):
            found += data
    return found


def test_a_models_text_has_no_power_over_a_terminal(bytewise: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"two\nlines\tand a tab, {EVIL} 漢字"
    leader, follower = pty.openpty()
    with open(follower, "w", encoding="utf-8", newline="\n") as stream:
        assert stream.isatty()
        shown_on(stream, bytewise, text.encode(), monkeypatch)
    found = all_of(leader).decode().replace("\r\n", "\n")
    os.close(leader)
    assert not [c for c in found if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    assert found.startswith("two\nlines\tand a tab, \\x1b]0;owned\\x07")
    assert found.endswith("漢字\n")


def test_a_models_text_goes_into_a_pipe_as_it_is(
    bytewise: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(tmp_path / "text", "w", encoding="utf-8", newline="\n") as stream:
        shown_on(stream, bytewise, EVIL.encode(), monkeypatch)
    assert (tmp_path / "text").read_bytes() == EVIL.encode() + b"\n"
