"""The files of `k3-chat render` and `parse`: requests in OpenAI's form, completions, tools and vocabularies."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3.base.errors import ConfigError, DriveError, K3Error
from k3.base.presence import is_file
from k3.base.regular_file import RegularFile
from k3.base.safe_text import shown
from k3.base.strict_json import parse_object
from k3.engine.chat.chat_request import ChatError, ChatRequest
from k3.engine.definition.settings import ModelSettings
from k3.engine.definition.tokenizer import Tokenizer
from k3.engine.launch.model_files import open_model_files
from k3.model.vocabulary import (
    SPECIAL_NAMES_NAME,
    SPECIAL_PLACES,
    Vocabulary,
    complete_names,
    parse_ranks,
    parse_special_names,
)

FILE_BYTES_MAX = 64 << 20
"""A longer file is refused. The longest context is a million tokens."""

STDIN = Path("-")

_BODY_KEYS = ("tools", "tool_choice", "response_format")
_TEMPLATE_KEYS: dict[str, type] = {
    "add_generation_prompt": bool,
    "thinking": bool,
    "thinking_effort": str,
    "response_schema": object,
    "image_prompts": list,
    "tools": list,
    "tool_choice": object,
    "response_format": object,
}


def read_request(path: Path) -> ChatRequest:
    """Read an OpenAI chat request, of which only what shapes the prompt counts.

    `chat_template_kwargs` count before the request's own `tools`, `tool_choice`, `response_format` and
    `reasoning_effort` ("none" is no thinking). ChatError for a request that is not sound; DriveError.
    """
    raw = _object(path, "the request")
    messages = raw.get("messages")
    if not isinstance(messages, list):
        raise ChatError("the request has no list of messages", path=path)
    given = raw.get("chat_template_kwargs", {})
    if not isinstance(given, Mapping):
        raise ChatError("chat_template_kwargs is no object", path=path)
    settings: dict[str, Any] = {key: raw[key] for key in _BODY_KEYS if raw.get(key) is not None}
    effort = raw.get("reasoning_effort")
    if effort == "none":
        settings["thinking"] = False
    elif effort is not None:
        settings["thinking_effort"] = effort
    for key, value in given.items():
        if key not in _TEMPLATE_KEYS:
            raise ChatError(
                f"chat_template_kwargs has {shown(key)}, which the chat format does not know",
                path=path,
                advice=f"It knows {', '.join(_TEMPLATE_KEYS)}",
            )
        settings[key] = value
    settings = {key: value for key, value in settings.items() if value is not None}
    for key, value in settings.items():
        if not isinstance(value, _TEMPLATE_KEYS[key]):
            raise ChatError(f"{key} is {shown(value)}, which is of the wrong type", path=path)
    prompts = settings.get("image_prompts", [])
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ChatError("image_prompts holds something other than text", path=path)
    return ChatRequest(messages, image_placeholders=True, **settings)


def read_tools(path: Path) -> list[object]:
    """Read tools: a list, or an object that has it as `tools`. ChatError, DriveError."""
    data = read_bounded(path)
    if data.lstrip()[:1] == b"[":
        data = b'{"tools": ' + data + b"}"
    tools = parse_object(data, what="the file of tools", path=path, error=ChatError, advice=_ADVICE).get("tools")
    if not isinstance(tools, list):
        raise ChatError("the file of tools has no list of them", path=path)
    return tools


def read_completion(path: Path) -> str:
    """Read a completion. ChatError when it is no UTF-8; DriveError."""
    data = read_bounded(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ChatError(
            "the completion is not UTF-8",
            path=path,
            offset=error.start,
            advice="Decode it with its own encoding first",
        ) from error


def vocabulary_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a tiktoken.model.

    The special tokens have the names in the tokenizer_config.json beside it, or the published ones without that.
    ConfigError for files that are not sound; DriveError.
    """
    ranks = parse_ranks(read_bounded(path, ConfigError, ConfigError), path)
    names_path = path.parent / SPECIAL_NAMES_NAME
    if is_file(names_path):
        names, skipped = parse_special_names(
            read_bounded(names_path, ConfigError, ConfigError), names_path, len(ranks)
        )
        return Tokenizer(Vocabulary(ranks, names, skipped))
    places = {len(ranks) + place: name for name, place in SPECIAL_PLACES.items()}
    return Tokenizer(Vocabulary(ranks, complete_names(places, len(ranks)), frozenset()))


def model_tokenizer(settings: ModelSettings) -> Tokenizer:
    """Return the tokenizer of a container or snapshot. Raises what opening it raises."""
    opened = open_model_files(settings)
    try:
        return opened.tokenizer()
    finally:
        opened.close()


def read_bounded(path: Path, unfit: type[K3Error] = ChatError, missing: type[K3Error] = DriveError) -> bytes:
    """Return the bytes of a file, or of stdin for `-`. `missing` when it is not there, `unfit` when it is long."""
    if path == STDIN:
        data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        if len(data) <= FILE_BYTES_MAX:
            return data
    else:
        with RegularFile(path, missing, "Check its name") as file:
            if file.size_bytes <= FILE_BYTES_MAX:
                return file.read(0, file.size_bytes)
    raise unfit(f"the file is longer than {FILE_BYTES_MAX:,} bytes", path=path, advice="Give a shorter one")


_ADVICE = "Give JSON as OpenAI's chat API has it"


def _object(path: Path, what: str) -> dict[str, Any]:
    return parse_object(read_bounded(path), what=what, path=path, error=ChatError, advice=_ADVICE)
