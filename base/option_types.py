"""Types of options that several commands share. Every value that is absurd is refused by name, with exit code 2.

Pure, but for directory names: a leading `~` is the home directory, as in a shell. Imports nothing heavy.
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
"""Largest whole number that any option takes: what a signed 64-bit integer holds."""

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([KMGT])(i?))?B?\s*$", re.IGNORECASE | re.ASCII)
_COMMA = re.compile(r"(?<!\\),")
_SHOWN_CHARACTERS = 60


def short(value: Any) -> str:
    """Return a user's word for an error message, cut if it is very long."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def parse_size(text: str) -> int:
    """Bytes meant by "50G", "2.5 GiB" or "4096": powers of 1000, of 1024 with an i. ValueError otherwise."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{short(text)} is not a size such as 500M, 2G or 1.5GiB")
    base = 1024 if match[3] else 1000
    return int(Fraction(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))


class SizeType(click.ParamType[int]):
    """A click parameter in bytes with the spellings of `parse_size`, of at least `least`."""

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See click.ParamType."""
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
        """See click.ParamType."""
        try:
            number = value if isinstance(value, int) else int(str(value))
        except ValueError:
            self.fail(f"{short(value)} is not a whole number", param, ctx)
        if not self._least <= number <= self._most:
            most = "" if self._most == WHOLE_MAX and number < self._least else f" and at most {self._most}"
            self.fail(f"{short(value)} is not at least {self._least}{most}", param, ctx)
        return number


class Real(click.ParamType[float]):
    """A finite number between two bounds, the lower one possibly excluded."""

    name = "number"

    def __init__(self, least: float, most: float = math.inf, *, above: bool = False) -> None:
        self._least, self._most, self._above = least, most, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click.ParamType."""
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

    The option may be given several times (`directories_option`). An empty entry is refused.
    """

    name = "A,B,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Path, ...]:
        """See click.ParamType."""
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
        """One value, which `convert` splits: click would split a variable's value at spaces."""
        return [rv]


def directories_option(*names: str, help: str, **more: Any) -> Callable[[_Command], _Command]:  # noqa: A002
    """Return a click option for a list of directories, of which none may be named twice."""
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
    """The path without links, as far as it can be told; a loop of links is somebody else's finding."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.absolute()
