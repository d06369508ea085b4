"""Strict JSON: UTF-8, unique keys, and nothing that only Python accepts.

Python's parser takes the last of two equal keys, lone surrogates, and `-0` as an integer; other readers do not.
Two readers that disagree about a file are a way to load wrong weights silently. Pure functions, safe to use from
any thread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3.base.errors import K3Error
from k3.base.placeholder import placeholder
from k3.base.safe_text import shown


class _DuplicateKeyError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class _NegativeZeroError(Exception):
    pass


def parse_object(
    data: bytes, *, what: str, path: Path, error: type[K3Error], advice: str, offset: int = 0
) -> dict[str, Any]:
    """Parse `data` as one JSON object.

    `what` names the text in messages ("the header"), `offset` is its position in the file, and `advice` the next
    step when the text is invalid. Raises `error`, and nothing else.
    """

    def refuse(problem: str, at: int | None = None) -> K3Error:
        place = None if at is None else offset + at
        return error(f"{what} {problem}", path=path, offset=place, advice=advice)

    instead = placeholder(data)
    if instead is not None:
        raise error(instead[0], path=path, advice=instead[1])
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as bad:
        raise refuse("is not UTF-8", bad.start) from bad
    try:
        value = _loads(text)
    except _DuplicateKeyError as bad:
        raise refuse(f"has the key {shown(bad.key)} twice") from bad
    except _NegativeZeroError as bad:
        raise refuse("has the number -0, which is not an integer") from bad
    except RecursionError as bad:
        raise refuse("is nested too deeply") from bad
    except json.JSONDecodeError as bad:
        at = len(text[: bad.pos].encode())
        raise refuse(f"is not JSON: {bad.msg}", at) from bad
    except ValueError as bad:  # Python refuses integers this long
        raise refuse("has a number of thousands of digits") from bad
    if type(value) is not dict:
        raise refuse(f"is not a JSON object but {_json_kind(value)}", 0)
    if "\\u" in text and not _encodable(value):
        raise refuse("has half of a surrogate pair in a string")
    return value


def _loads(text: str) -> Any:
    if "-0" in text:  # rare outside of strings, and too slow to look for in every number
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def _integer(digits: str) -> int:
    if digits == "-0":
        raise _NegativeZeroError
    return int(digits)


def _encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _json_kind(value: Any) -> str:
    kinds = {list: "an array", str: "a string", int: "a number", float: "a number", bool: "a truth value"}
    return kinds.get(type(value), "null")
