"""Arguments as the model wrote them, as JSON: the type of each, and the text of the whole as it grows. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from k3.base.safe_text import shown
from k3.engine.chat.tool_schema import JSON_TYPES, Types, allows, type_of

_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A value's JSON text, and a warning when it is a string only because it did not validate."""

    text: str
    warning: str | None = None


def certainly_string(types: Types, given_type: str) -> bool:
    """Tell whether an argument is a string whatever its text is, so that the text may be passed on as it comes.

    `types` are those that the tool's schema allows (none: it does not say), `given_type` is the tag's own.
    """
    if len(types) == 1:
        return "string" in types
    return given_type == "string" and (not types or "string" in types)


def json_value(text: str, types: Types, given_type: str) -> JsonValue:
    """Return an argument's value as JSON.

    A schema of one type decides; else the tag's own type, if the schema allows it; else the text is read as
    JSON, and kept as a string when it is none or of a type that the schema does not allow. A value that is
    not of the type that was decided becomes a string, with a warning.
    """
    if certainly_string(types, given_type):
        return JsonValue(quoted(text))
    wanted = types
    if len(types) != 1 and given_type in JSON_TYPES:
        wanted = _narrowed(types, given_type)
    parsed = parsed_json(text)
    if parsed is not None and (not wanted or allows(wanted, type_of(parsed[0]))):
        return JsonValue(text.strip())
    if not wanted or "string" in wanted:
        return JsonValue(quoted(text))
    names = " or ".join(sorted(wanted))
    return JsonValue(quoted(text), f"{shown(text)} is not of type {names} and is passed as a string")


def parsed_json(text: str) -> tuple[object] | None:
    """Parse JSON strictly, with nothing that Python alone would accept. None when it is none."""
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def quoted(text: str) -> str:
    """Return text as a JSON string."""
    return f'"{escaped_text(text)}"'


def escaped_text(text: str) -> str:
    """Return text as it stands inside a JSON string. Escaping pieces and joining them is escaping the whole."""
    return _SURROGATES.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False)[1:-1])


class ObjectText:
    """The JSON text of one call's arguments, member by member. Each method returns the text to append.

    A key that comes again is renamed (`key#2`), so that no value is lost. A text that should have been the whole
    object and is none waits: it becomes the whole as a string when nothing else comes, else the member `json`.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._waiting: list[str] = []

    def member(self, key: str) -> tuple[str, str]:
        """Begin a member: the text up to its value, and the key that it got."""
        before = self._write_waiting()
        text, name = self._named(key)
        return before + text, name

    def block(self, text: str) -> tuple[str, str | None]:
        """Add a text that should be an object: the text to append, and a warning when it is none."""
        members = _members(text)
        if members is None:
            self._waiting.append(text)
            return "", f"the json block {shown(text)} is no JSON object and is passed as a string"
        if not members:
            return "", None
        if len({*members}) < len(members) or self._keys.intersection(members) or self._waiting:
            appended, name = self.member("json")
            return appended + text.strip(), f"the json block comes beside other arguments and is passed as {name}"
        inner = text.strip()[1:-1].strip()
        appended = (", " if self._keys else "{") + inner
        self._keys.update(members)
        return appended, None

    def finish(self) -> str:
        """End the object."""
        if self._waiting and not self._keys and len(self._waiting) == 1:
            return quoted(self._waiting.pop())
        before = self._write_waiting()
        return before + ("}" if self._keys else "{}")

    def _write_waiting(self) -> str:
        pieces = []
        for text in self._waiting:
            pieces.append(self._named("json")[0] + quoted(text))
        self._waiting.clear()
        return "".join(pieces)

    def _named(self, key: str) -> tuple[str, str]:
        name, again = key, 1
        while name in self._keys:
            again += 1
            name = f"{key}#{again}"
        text = (", " if self._keys else "{") + quoted(name) + ": "
        self._keys.add(name)
        return text, name


def _members(text: str) -> list[str] | None:
    """Return the keys of an object in the order of its text, or None when the text is no object."""
    parsed = parsed_json(text)
    if parsed is None or not isinstance(parsed[0], dict):
        return None
    depth_one: list[list[str]] = []
    json.loads(text, object_pairs_hook=lambda pairs: depth_one.append([key for key, _ in pairs]))
    return depth_one[-1]  # the outermost object is finished last


def _narrowed(types: Types, given_type: str) -> Types:
    """Return the types of a schema that a tag's own type can mean; all of them when it can mean none."""
    if not types:
        return frozenset({given_type})
    numbers = frozenset({"integer", "number"})
    same = numbers if given_type in numbers else frozenset({given_type})
    return types & same or types


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
