"""Safe text for messages: untrusted strings, bounded and without terminal control, and counts with their noun.

Names and numbers in snapshots come from strangers: they must neither flood a message nor forge one. Pure
functions, safe to use from any thread.
"""

from __future__ import annotations

import re
import unicodedata

SHOWN_CHARACTERS_MAX = 120
NAME_CHARACTERS_MAX = 400
"""Longest name that is accepted, and printed whole: names become keys and lines on a terminal."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(value: object) -> str:
    """Return `repr(value)` cut to SHOWN_CHARACTERS_MAX; control characters are escaped."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return "(a huge number)"
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 3] + "..."


def shown_text(text: str) -> str:
    """Return a message that may quote untrusted text, cut to a few lines and escaped."""
    text = visible(text[: 4 * SHOWN_CHARACTERS_MAX])
    return text if len(text) <= 3 * SHOWN_CHARACTERS_MAX else text[: 3 * SHOWN_CHARACTERS_MAX - 3] + "..."


def visible(text: str) -> str:
    """Return text with every character escaped that is invisible or that a terminal may act on.

    Spaces of every kind stay; line ends, control characters and bidirectional controls do not.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def visible_lines(text: str) -> str:
    """Return text with control characters escaped, except line ends and tabs: for a model's output."""
    return _CONTROLS.sub(lambda match: _escape(match[0]), text)


def visible_text(text: str) -> str:
    """Return text of several lines with each line as `visible` makes it: for output to people."""
    return "\n".join(visible(line) for line in text.split("\n"))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def is_plain(name: str) -> bool:
    """Return True if a name is not empty, not too long and printable."""
    return 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable()


def shown_name(name: str) -> str:
    """Return a plain name as it is, any other as `shown`."""
    return name if is_plain(name) else shown(name)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 finding", "2 findings", "1,000 findings"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
