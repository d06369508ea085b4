"""A conversation as segments, exactly as the model was trained to read it (`docs/chat.md`). Pure.

Markers alone may become control tokens. Whatever a user, a tool or an assistant wrote is a segment of ordinary
text, so no text can end a message or begin one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from k3.base.safe_text import counted, shown
from k3.engine.chat.chat_request import ChatError, ChatRequest
from k3.engine.chat.history import (
    IMAGE,
    CallRecord,
    calls_of,
    content_parts,
    ordered_results,
    reasoning_of,
)
from k3.engine.chat.markup import CLOSE, END, OPEN, SEP, Segment, escaped
from k3.engine.definition.tokenizer import Tokenizer

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The segments of a prompt in order, and what the format left out of the conversation, in words."""

    segments: tuple[Segment, ...]
    warnings: tuple[str, ...]

    @property
    def text(self) -> str:
        """The prompt to read. It is not to be encoded: other ids would come of it."""
        return "".join(segment.text for segment in self.segments)


def chat_prompt(request: ChatRequest) -> ChatPrompt:
    """Encode a conversation. ChatError, naming the message, for one that the format cannot express."""
    encoder = _Encoder(request)
    segments = tuple(encoder.segments())
    return ChatPrompt(segments, tuple(encoder.warnings))


def prompt_ids(prompt: ChatPrompt, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids of a prompt, each segment encoded on its own."""
    ids: list[int] = []
    for text, allow_special in prompt.segments:
        ids += tokenizer.encode(text, allow_special=allow_special)
    return ids


class _Encoder:
    """One conversation on its way; `warnings` grows while `segments` is consumed."""

    def __init__(self, request: ChatRequest) -> None:
        self.warnings: list[str] = []
        self._request = request
        self._image_count = 0
        self._calls: list[CallRecord] = []  # of the latest assistant message
        self._result_count = 0  # behind it

    def segments(self) -> Iterator[Segment]:
        """Yield the segments of the whole prompt."""
        asked = self._request
        if asked.tools:
            yield from _system("tool-declare", _TOOLS.format(_compact(list(asked.tools))))
        if asked.thinking and asked.thinking_effort is not None:
            yield from _system("thinking-effort", _EFFORT.format(asked.thinking_effort))
        yield from self._conversation()
        if isinstance(asked.tool_choice, str) and asked.tool_choice in _CHOICES:
            yield from _system("tool-choice", _CHOICES[asked.tool_choice])
        yield from self._response_format()
        if asked.add_generation_prompt:
            yield from _opened("message", role="assistant")
            yield from _opened("think" if asked.thinking else "response")
        if asked.image_prompts is not None and len(asked.image_prompts) != self._image_count:
            raise ChatError(
                f"{counted(len(asked.image_prompts), 'image prompt')} for "
                f"{counted(self._image_count, 'image')} in the conversation",
                advice="Give one for each image",
            )

    def _conversation(self) -> Iterator[Segment]:
        run: list[tuple[int, Mapping[str, object]]] = []
        for number, message in enumerate(self._request.messages):
            if not isinstance(message, Mapping):
                self.warnings.append(f"message {number} is not an object and is left out")
                continue
            if "role" not in message:
                raise ChatError(
                    f"message {number} has no role", advice="Give it one of system, user, assistant, tool"
                )
            role = message["role"]
            if role == "tool":
                run.append((number, message))
                continue
            yield from self._results(run)
            run = []
            if role == "system":
                yield from self._system_message(message, number)
            elif role == "user":
                yield from _opened("message", role="user", name=_name(message, number))
                yield from self._content(message.get("content"), number)
                yield from _message_end()
            elif role == "assistant":
                yield from self._assistant_message(message, number)
            else:
                self.warnings.append(
                    f"message {number} has the role {shown(role)}, which the format does not know, and is left out"
                )
        yield from self._results(run)

    def _system_message(self, message: Mapping[str, object], number: int) -> Iterator[Segment]:
        tools = message.get("tools")
        if not tools:
            yield from _opened("message", role="system", name=_name(message, number))
            yield from self._content(message.get("content"), number)
            yield from _message_end()
            return
        if message.get("content"):
            self.warnings.append(f"message {number} declares tools, and its content is left out")
        yield from _system("tool-declare", _MORE_TOOLS.format(_compact(tools)))

    def _assistant_message(self, message: Mapping[str, object], number: int) -> Iterator[Segment]:
        self._calls = calls_of(message, number)
        self._result_count = 0
        yield from _opened("message", role="assistant", name=_name(message, number))
        if self._request.thinking:
            yield from _opened("think")
            yield from _text(reasoning_of(message, number))
            yield from _closed("think")
        yield from _opened("response")
        yield from self._content(message.get("content"), number)
        yield from _closed("response")
        if self._calls:
            yield from _opened("tools")
            for index, call in enumerate(self._calls, start=1):
                yield from _call(call, index)
            yield from _closed("tools")
        yield from _message_end()

    def _results(self, run: list[tuple[int, Mapping[str, object]]]) -> Iterator[Segment]:
        for result in ordered_results(run, self._calls, self._result_count):
            yield from _opened("message", role="tool", tool=result.tool, index=str(result.index))
            yield from self._content(result.content, result.number)
            yield from _message_end()
        self._result_count += len(run)

    def _content(self, content: object, number: int) -> Iterator[Segment]:
        for part in content_parts(content, number):
            if part is IMAGE:
                yield self._image(number)
                continue
            assert isinstance(part, str)
            if self._request.image_prompts is None:
                yield from _text(part)
                continue
            first, *more = part.split(IMAGE_PLACEHOLDER)
            yield from _text(first)
            for text in more:
                yield self._image(number)
                yield from _text(text)

    def _image(self, number: int) -> Segment:
        prompts = self._request.image_prompts
        if prompts is None:
            if not self._request.image_placeholders:
                raise ChatError(
                    f"message {number} holds an image, and this program runs the model's text part only",
                    advice="Send text parts only",
                )
            return Segment(IMAGE_PLACEHOLDER, True)
        self._image_count += 1
        if self._image_count > len(prompts):
            raise ChatError(
                f"{counted(len(prompts), 'image prompt')} for more images (message {number})",
                advice="Give one for each image",
            )
        return Segment(prompts[self._image_count - 1], True)

    def _response_format(self) -> Iterator[Segment]:
        given = self._request.response_format
        kind = given.get("type") if isinstance(given, Mapping) else given
        if kind not in ("json_object", "json_schema"):
            return
        text = _FORMAT.format(kind)
        if kind == "json_schema":
            schema = self._request.response_schema
            if schema is None and isinstance(given, Mapping):
                schema = given.get("json_schema")
                if isinstance(schema, Mapping) and "schema" in schema:
                    schema = schema["schema"]
            if schema is None:
                raise ChatError(
                    "response_format json_schema comes without a schema", advice="Give it as json_schema.schema"
                )
            text += _SCHEMA.format(_compact(schema))
        yield from _system("response-format", text)


def _name(message: Mapping[str, object], number: int) -> str | None:
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise ChatError(f"message {number}: the name {shown(name)} is no text")
    return name or None


def _text(text: str) -> Iterator[Segment]:
    if text:
        yield Segment(text, False)


def _opened(tag: str, **attributes: str | None) -> Iterator[Segment]:
    yield Segment(OPEN, True)
    yield Segment(tag, False)
    for key, value in attributes.items():
        if value is not None:
            yield Segment(f" {key}", False)
            yield Segment('="', False)
            yield from _text(escaped(value))
            yield Segment('"', False)
    yield Segment(SEP, True)


def _closed(tag: str) -> Iterator[Segment]:
    yield Segment(CLOSE, True)
    yield Segment(tag, False)
    yield Segment(SEP, True)


def _message_end() -> Iterator[Segment]:
    yield from _closed("message")
    yield Segment(END, True)


def _system(kind: str, text: str) -> Iterator[Segment]:
    yield from _opened("message", role="system", type=kind)
    yield from _text(text)
    yield from _message_end()


def _call(call: CallRecord, index: int) -> Iterator[Segment]:
    yield from _opened("call", tool=call.name, index=str(index))
    if call.arguments is None:
        yield from _opened("json", type="object")
        yield from _text(call.raw)
        yield from _closed("json")
    for key, value in (call.arguments or {}).items():
        yield from _opened("argument", key=str(key), type=_type_name(value))
        yield from _text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        yield from _closed("argument")
    yield from _closed("call")


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _compact(value: object) -> str:
    """Return JSON as declarations hold it: keys sorted at every depth, no white space, characters as they are."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
