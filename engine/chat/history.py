"""The messages of a conversation, read: text of contents, calls of tools, and tool results in the order of calls.

Messages come from clients as parsed JSON: every access is checked, and ChatError names the message. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from k3.base.safe_text import shown
from k3.engine.chat.chat_request import ChatError

IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of an assistant's message. `arguments` None: `raw` is text that is no JSON."""

    name: str
    call_id: str | None
    arguments: Mapping[str, object] | None
    raw: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """One result with the name of its tool and its place, from 1, behind the latest assistant message."""

    tool: str
    index: int
    content: object
    number: int  # of the message


IMAGE = object()
"""A part of a content that is an image."""


def content_parts(content: object, number: int) -> Iterator[str | object]:
    """Yield the texts of a content in order, and IMAGE for each image. ChatError for any other part."""
    if content is None:
        return
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list | tuple):
        raise ChatError(f"message {number}: content {shown(content)} is neither text nor a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            yield part
        elif kind in IMAGE_PARTS:
            yield IMAGE
        elif isinstance(part, Mapping) and kind in ("text", "input_text", "output_text"):
            text = part.get("text")
            if not isinstance(text, str):
                raise ChatError(f"message {number}: a text part holds {shown(text)}, which is no text")
            yield text
        else:
            raise ChatError(
                f"message {number}: a content part of type {shown(kind)} cannot be given to this model",
                advice="Send text parts only",
            )


def reasoning_of(message: Mapping[str, object], number: int) -> str:
    """Return an assistant's reasoning, "" when there is none but white space."""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    text = "".join(part for part in content_parts(reasoning, number) if isinstance(part, str))
    return text if text.strip() else ""


def calls_of(message: Mapping[str, object], number: int) -> list[CallRecord]:
    """Return the calls of an assistant's message, in order. ChatError for a call that is not sound."""
    calls = message.get("tool_calls")
    if not calls:
        return []
    if not isinstance(calls, list | tuple):
        raise ChatError(f"message {number}: tool_calls is not a list")
    return [_call(call, number) for call in calls]


def _call(call: object, number: int) -> CallRecord:
    if not isinstance(call, Mapping):
        raise ChatError(f"message {number}: the tool call {shown(call)} is not an object")
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise ChatError(f"message {number}: a tool call has no function name")
    call_id = call.get("id")
    given = function.get("arguments")
    identity = call_id if isinstance(call_id, str) else None
    if given is None:
        return CallRecord(name, identity, {})
    if isinstance(given, Mapping):
        return CallRecord(name, identity, given)
    if not isinstance(given, str):
        raise ChatError(
            f"message {number}: the arguments of {shown(name)} are neither an object nor the text of one",
            advice="Send arguments as a JSON object, or as its text",
        )
    if not given.strip():
        return CallRecord(name, identity, {})
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return CallRecord(name, identity, None, given)
    if isinstance(value, str):  # what the parser made of a block that was no JSON
        return CallRecord(name, identity, None, value)
    if not isinstance(value, dict):
        raise ChatError(
            f"message {number}: the arguments of {shown(name)} are JSON, but no object",
            advice="Send arguments as a JSON object, or as its text",
        )
    return CallRecord(name, identity, value)


def ordered_results(
    run: Sequence[tuple[int, Mapping[str, object]]], calls: Sequence[CallRecord], before: int
) -> list[ToolResult]:
    """Return a run of tool messages, given with their numbers, in the order of the calls that they answer.

    `before` results answered the same assistant message already. The run is sorted only when every
    `tool_call_id` belongs to one of `calls`, whose name then counts. Else it stays as it is, and a result is
    named by its `tool`, its `name` or the call at its place; ChatError when there is none.
    """
    place: dict[str, int] = {}
    for index, call in enumerate(calls):
        if call.call_id is not None:
            place.setdefault(call.call_id, index)
    ids = [message.get("tool_call_id") for _, message in run]
    places = [place.get(one) if isinstance(one, str) else None for one in ids]
    known = [at for at in places if at is not None]
    results = []
    named: list[tuple[tuple[int, Mapping[str, object]], str | None]]
    if len(known) == len(run):
        in_order = sorted(range(len(run)), key=lambda one: known[one])
        named = [(run[one], calls[known[one]].name) for one in in_order]
    else:
        named = [(one, _own_name(one[1])) for one in run]
    for offset, ((number, message), name) in enumerate(named):
        index = before + offset
        if name is None and index < len(calls):
            name = calls[index].name
        if name is None:
            raise ChatError(
                f"message {number}: nothing tells which tool this result is of",
                advice="Give it the tool_call_id of a call in the assistant message before it, or a name",
            )
        results.append(ToolResult(name, index + 1, message.get("content"), number))
    return results


def _own_name(message: Mapping[str, object]) -> str | None:
    for key in ("tool", "name"):
        value = message.get(key)
        if isinstance(value, str) and value:
            return value
    return None
