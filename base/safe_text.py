"""Words of messages: untrusted text, bounded and without power over a terminal, and counts with their noun.

Names and numbers in snapshots are anybody's; a message must neither be flooded by them nor forged.
Pure functions, safe to use from any thread.
"""

from __future__ import annotations

import re
import unicodedata

SHOWN_CHARACTERS_MAX = 120
NAME_CHARACTERS_MAX = 400
"""Longest name that is shown, and accepted, as it is: names become keys and lines on a terminal."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(value: object) -> str:
    """A value as Python writes it, cut to SHOWN_CHARACTERS_MAX; control characters come out escaped."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return "(a huge number)"
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 3] + "..."


def shown_text(text: str) -> str:
    """A message that may carry anybody's words, cut to a few lines and made visible."""
    text = visible(text[: 4 * SHOWN_CHARACTERS_MAX])
    return text if len(text) <= 3 * SHOWN_CHARACTERS_MAX else text[: 3 * SHOWN_CHARACTERS_MAX - 3] + "..."


def visible(text: str) -> str:
    """Text in which every character that a terminal may act upon, or nobody can see, is written as an escape.

    Spaces of every kind stay; line ends, control characters and those that turn the writing direction do not.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def visible_lines(text: str) -> str:
    """As `visible` for the control characters alone, of which line ends and tabs stay: for a model's text."""
    return _CONTROLS.sub(lambda match: _escape(match[0]), text)


def visible_text(text: str) -> str:
    """As `visible`, but of several lines: for what commands print for people."""
    return "\n".join(visible(line) for line in text.split("\n"))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def is_plain(name: str) -> bool:
    """Whether a name is neither empty nor too long and has only printable characters."""
    return 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable()


def shown_name(name: str) -> str:
    """A name itself if it is plain, else as `shown`."""
    return name if is_plain(name) else shown(name)


def counted(count: int, noun: str) -> str:
    """A count with its noun: "1 finding", "2 findings", "1,000 findings"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
