"""The four control tokens, the tags between them, and how attribute values are escaped. Pure.

Only the markers are control tokens; tag names, attributes and all text between are ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END = "<|end_of_msg|>"

MARKERS = (OPEN, CLOSE, SEP, END)

OPENED_TAGS = frozenset({"message", "think", "response", "tools", "call", "argument", "json"})
"""The sections that a message is made of; each is closed by the same name."""

_ATTRIBUTE = re.compile(r'\s+([A-Za-z_][\w.-]*)\s*=\s*"(.*?)"(?=\s|$)', re.DOTALL)
_ENTITY = re.compile("&(amp|quot);")


class Segment(NamedTuple):
    """A piece of a prompt that is encoded on its own; specials are recognised in it only with `allow_special`."""

    text: str
    allow_special: bool


class Tag(NamedTuple):
    """The head of a section: its name, and its attributes with their values unescaped."""

    name: str
    attributes: Mapping[str, str]


def escaped(value: str) -> str:
    """Return an attribute's value as it is written between quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescaped(value: str) -> str:
    """Return the value that is written between quotes; an ampersand that begins no escape stays as it is."""
    return _ENTITY.sub(lambda match: "&" if match[1] == "amp" else '"', value)


def parse_tag(head: str) -> Tag | None:
    """Parse what stands between `<|open|>` or `<|close|>` and `<|sep|>`. None when it is no known tag.

    Attributes may come in any order, with any white space between them. Of an attribute given twice the first
    counts.
    """
    text = head.strip()
    name = text.split(maxsplit=1)[0] if text else ""
    if name not in OPENED_TAGS:
        return None
    attributes: dict[str, str] = {}
    at = len(name)
    while at < len(text):
        match = _ATTRIBUTE.match(text, at)
        if match is None:
            return None
        attributes.setdefault(match[1], unescaped(match[2]))
        at = match.end()
    return Tag(name, attributes)


def may_become_tag(head: str) -> bool:
    """Tell whether text behind `<|open|>` or `<|close|>` can still grow into a known tag."""
    text = head.lstrip()
    name = text.split(maxsplit=1)[0] if text else ""
    if len(name) < len(text):
        return name in OPENED_TAGS
    return any(tag.startswith(name) for tag in OPENED_TAGS)


def quote_is_open(head: str) -> bool:
    """Tell whether the head of a tag ends inside a quoted value."""
    return head.count('"') % 2 == 1
