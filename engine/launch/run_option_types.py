"""Parameter types of `k3-run` and the words for what is wrong with a value. Pure; imports nothing heavy."""

from __future__ import annotations

import re
from typing import Any

import click

from k3.base.option_types import short

_IDS = re.compile(r"^\s*[0-9]+\s*(,\s*[0-9]+\s*)*$")
_MAX_DIGITS = 10  # a longer number cannot be a token id; Python would take very long to parse a very long one


class Ids(click.ParamType["tuple[int, ...]"]):
    """Token ids: 1,2,3."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        if not _IDS.match(value):
            self.fail(f"{short(value)} is not a list of token ids such as 1,2,3", param, ctx)
        items = [item.strip() for item in value.split(",")]
        if any(len(item) > _MAX_DIGITS for item in items):
            self.fail("a number in the list is too large for a token id", param, ctx)
        return tuple(int(item) for item in items)


class Layers(click.ParamType[str]):
    """4 (the first four) or 2-5."""

    name = "n|a-b"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from k3.model.architecture import parse_layers

        try:
            parse_layers(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Counts(click.ParamType["tuple[int, ...]"]):
    """A list of numbers of at least `least`: 32,128."""

    name = "n,n,..."

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
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
