"""The tools that a request offers: which there are, which arguments they take, and of which JSON types.

Schemas come from clients: every access is checked, a reference is followed a bounded number of times, and what
cannot be understood restricts nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})

_DEPTH_MAX = 16

Types = frozenset[str]


class ToolSchemas:
    """The parameters of each tool by its name. Immutable."""

    def __init__(self, tools: Iterable[object] = ()) -> None:
        """`tools` are in OpenAI's form; what is no tool is passed over."""
        self._parameters: dict[str, object] = {}
        for tool in tools:
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(function, Mapping) and isinstance(name, str):
                self._parameters[name] = function.get("parameters", function.get("input_schema"))

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def knows(self, name: str, key: str) -> bool:
        """Tell whether a tool's schema has a place for this argument; a tool without a schema has for any."""
        parameters = self._parameters.get(name)
        if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties"), Mapping):
            return True
        return key in parameters["properties"] or parameters.get("additionalProperties") not in (None, False)

    def types(self, name: str, key: str) -> Types:
        """Return the JSON types that a schema allows an argument; none when it does not say."""
        parameters = self._parameters.get(name)
        if not isinstance(parameters, Mapping):
            return frozenset()
        properties = parameters.get("properties")
        if isinstance(properties, Mapping) and key in properties:
            return _types(properties[key], parameters, 0)
        return _types(parameters.get("additionalProperties"), parameters, 0)


def type_of(value: object) -> str:
    """Return the JSON type of a parsed value; an integral number is an "integer"."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def allows(types: Types, kind: str) -> bool:
    """Tell whether a value of a JSON type is among those allowed; an integer is a number too."""
    return kind in types or (kind == "integer" and "number" in types)


def _types(schema: object, root: Mapping[str, object], depth: int) -> Types:
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return frozenset()
    if isinstance(schema.get("$ref"), str):
        return _types(_referenced(schema["$ref"], root), root, depth + 1)
    given = schema.get("type")
    found: set[str] = set()
    if isinstance(given, str) and given in JSON_TYPES:
        found = {given}
    elif isinstance(given, list | tuple):
        found = {one for one in given if isinstance(one, str) and one in JSON_TYPES}
    elif isinstance(schema.get("enum"), list | tuple):
        found = {type_of(value) for value in schema["enum"]}
    elif "const" in schema:
        found = {type_of(schema["const"])}
    else:
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            if isinstance(options, list | tuple):
                each = [_types(option, root, depth + 1) for option in options]
                if not all(each):
                    return frozenset()  # one of them allows anything
                found.update(*each)
        parts = schema.get("allOf")
        if not found and isinstance(parts, list | tuple):
            found = set(next(filter(None, (_types(part, root, depth + 1) for part in parts)), frozenset()))
    if found and schema.get("nullable") is True:
        found.add("null")
    return frozenset(found)


def _referenced(reference: str, root: Mapping[str, object]) -> object:
    found: object = root
    if not reference.startswith("#"):
        return None
    for name in reference[1:].split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name.replace("~1", "/").replace("~0", "~"))
    return found
