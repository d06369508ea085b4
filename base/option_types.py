"""Option types that several commands share; absurd values are refused by name, with exit code 2.

Pure, except that a leading `~` in a directory is resolved to a home directory, as in a shell. Imports nothing
heavy.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])

WHOLE_MAX = (1 << 63) - 1
"""Largest whole number that any option accepts: the maximum of a signed 64-bit integer."""

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?))?B?\s*$", re.IGNORECASE | re.ASCII)
_COMMA = re.compile(r"(?<!\\),")
_SHOWN_CHARACTERS = 60


def short(value: Any) -> str:
    """Return a user's input quoted for an error message, cut if it is very long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def parse_size(text: str) -> int:
    """Return the bytes meant by "50G", "2.5 GiB" or "4096": powers of 1000, with an i of 1024. Else ValueError."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{short(text)} is not a size such as 500M, 2G or 1.5GiB")
    base = 1024 if match[3] else 1000
    return int(Fraction(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))


class SizeType(click.ParamType[int]):
    """A size in bytes, written as `parse_size` reads it and of at least `least` bytes."""

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the size in bytes; see click.ParamType."""
        if isinstance(value, int):
            return value
        try:
            nbytes = parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not self._least <= nbytes <= WHOLE_MAX:
            bound = f"less than {self._least}" if nbytes < self._least else f"more than {WHOLE_MAX}"
            self.fail(f"{short(value)} is {bound} bytes", param, ctx)
        return nbytes


class Whole(click.ParamType[int]):
    """A whole number between two bounds."""

    name = "integer"

    def __init__(self, least: int = 0, most: int = WHOLE_MAX) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; see click.ParamType."""
        try:
            number = value if isinstance(value, int) else int(str(value))
        except ValueError:
            self.fail(f"{short(value)} is not a whole number", param, ctx)
        if not self._least <= number <= self._most:
            most = "" if self._most == WHOLE_MAX and number < self._least else f" and at most {self._most}"
            self.fail(f"{short(value)} is not at least {self._least}{most}", param, ctx)
        return number


class Real(click.ParamType[float]):
    """A finite number between two bounds; with `above` it must exceed the lower one."""

    name = "number"

    def __init__(self, least: float, most: float = math.inf, *, above: bool = False) -> None:
        self._least, self._most, self._above = least, most, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number; see click.ParamType."""
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{short(value)} is not a number", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{short(value)} is not a finite number", param, ctx)
        low = number <= self._least if self._above else number < self._least
        if low or number > self._most:
            bound = f"above {self._least:g}" if self._above else f"at least {self._least:g}"
            most = "" if math.isinf(self._most) else f" and at most {self._most:g}"
            self.fail(f"{short(value)} is not {bound}{most}", param, ctx)
        return number


class DirectoryList(click.ParamType["tuple[Path, ...]"]):
    r"""Directories separated by commas; `\,` is a comma in a name, and a leading `~` a home directory.

    The option may be repeated (`directories_option`). An empty entry is refused.
    """

    name = "A,B,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Path, ...]:
        """Return the directories; see click.ParamType."""
        if isinstance(value, tuple):
            return value
        names = [name.strip().replace("\\,", ",") for name in _COMMA.split(str(value))]
        if "" in names:
            self.fail(f"{short(value)} has an empty entry", param, ctx)
        expanded = [os.path.expanduser(name) for name in names]  # noqa: PTH111 - Path takes ./~ for ~
        if any(name.startswith("~") for name in expanded):
            self.fail(f"{short(value)}: there is no such home directory; write ./~ for a name", param, ctx)
        return tuple(map(Path, expanded))

    def split_envvar_value(self, rv: str) -> list[str]:
        """Return the value whole, for `convert` to split: click would split an environment variable at spaces."""
        return [rv]


def directories_option(*names: str, help: str, **more: Any) -> Callable[[_Command], _Command]:  # noqa: A002
    """Return a click option for a list of distinct directories."""
    return click.option(
        *names, type=DirectoryList(), multiple=True, callback=_joined, metavar="A,B,...",
        help=f"{help} Commas separate them, or the option is repeated.", **more,
    )  # fmt: skip


def _joined(
    context: click.Context, option: click.Parameter, lists: tuple[tuple[Path, ...], ...]
) -> tuple[Path, ...]:
    paths = tuple(chain.from_iterable(lists))
    places = [_resolved(path) for path in paths]
    twice = next((path for path, place in zip(paths, places, strict=True) if places.count(place) > 1), None)
    if twice is not None:
        raise click.BadParameter(f"{short(str(twice))} is a directory named twice", context, option)
    return paths


def _resolved(path: Path) -> Path:
    """Return the path without links; a loop of links is left to the code that opens it."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()
