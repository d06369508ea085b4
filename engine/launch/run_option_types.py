"""Parameter types of `k3-run` options, with the messages for values that cannot be meant. Pure."""

from __future__ import annotations

import re
from typing import Any

import click

from k3.base.option_types import short

_IDS = re.compile(r"^\s*[0-9]+\s*(,\s*[0-9]+\s*)*$")
_MAX_DIGITS = 10  # no token id is longer, and Python parses very long numbers very slowly


class Ids(click.ParamType["tuple[int, ...]"]):
    """A list of token ids, such as 1,2,3."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the parsed value, or fail with a message. See `click.ParamType.convert`."""
        if isinstance(value, tuple):
            return value
        if not _IDS.match(value):
            self.fail(f"{short(value)} is not a list of token ids such as 1,2,3", param, ctx)
        items = [item.strip() for item in value.split(",")]
        if any(len(item) > _MAX_DIGITS for item in items):
            self.fail("a number in the list is too large for a token id", param, ctx)
        return tuple(int(item) for item in items)


class Layers(click.ParamType[str]):
    """A number of layers (4: the first four) or a range (2-5)."""

    name = "n|a-b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the parsed value, or fail with a message. See `click.ParamType.convert`."""
        from k3.model.architecture import parse_layers

        try:
            parse_layers(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Counts(click.ParamType["tuple[int, ...]"]):
    """A list of whole numbers of at least `least`, such as 32,128."""

    name = "n,n,..."

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the parsed value, or fail with a message. See `click.ParamType.convert`."""
        if isinstance(value, tuple):
            return value
        if not _IDS.match(value):
            self.fail(f"{short(value)} is not a list of whole numbers such as 32,128", param, ctx)
        counts = tuple(int(item) for item in value.split(",") if len(item.strip()) <= _MAX_DIGITS)
        if len(counts) < value.count(",") + 1:
            self.fail("a number in the list is too large", param, ctx)
        if min(counts) < self._least:
            self.fail(f"{min(counts)} is not at least {self._least}", param, ctx)
        return counts
