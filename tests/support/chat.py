"""The golden conversations and completions, the tokenizer of their ids, and messages reduced to their content."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

from k3.engine.chat.chat_request import ChatRequest
from k3.engine.chat.completion import Completion
from k3.engine.definition.tokenizer import Tokenizer
from k3.model.vocabulary import SPECIAL_PLACES, Vocabulary, complete_names, parse_ranks

VECTORS = Path(__file__).parents[1] / "vectors"
GOLDEN: dict[str, Any] = json.loads((VECTORS / "chat_golden.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = GOLDEN["cases"]
COMPLETIONS: list[dict[str, Any]] = GOLDEN["completions"]


def tokenizer_of(ranks: dict[bytes, int]) -> Tokenizer:
    """Return a tokenizer of these ranks, with the published special tokens numbered after them."""
    names = {len(ranks) + place: name for name, place in SPECIAL_PLACES.items()}
    return Tokenizer(Vocabulary(ranks, complete_names(names, len(ranks)), frozenset()))


@cache
def synthetic_tokenizer() -> Tokenizer:
    """Return the tokenizer that made `ids_synthetic` in the golden file."""
    path = VECTORS / "synthetic.tiktoken.model"
    return tokenizer_of(parse_ranks(path.read_bytes(), path))


def rank_lines(pieces: list[bytes]) -> bytes:
    """Return the bytes of a tiktoken.model file; `pieces` are in the order of their ranks, from 0."""
    return b"".join(b"%s %d\n" % (base64.b64encode(piece), rank) for rank, piece in enumerate(pieces))


def request_of(case: dict[str, Any]) -> ChatRequest:
    """Return the request of a golden case, with placeholders for images as the makers' encoder writes them."""
    return ChatRequest(case["messages"], image_placeholders=True, **case["kwargs"])


def meaning(message: dict[str, Any], thinking: bool) -> tuple[str, str, list[tuple[str, object]]]:
    """Return reasoning, content and calls (name, arguments) of an assistant's message in OpenAI's form.

    Without `thinking`, the reasoning is empty. Arguments that are no JSON stay text.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls: list[tuple[str, object]] = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = arguments.strip()  # no JSON: the text is the argument
        calls.append((function["name"], arguments or {}))
    return reasoning if thinking and reasoning.strip() else "", content, calls


def understood(completion: Completion) -> tuple[str, str, list[tuple[str, object]]]:
    """Return reasoning, content and calls of a parsed completion, in the form of `meaning`."""
    calls: list[tuple[str, object]] = [(call.name, json.loads(call.arguments)) for call in completion.tool_calls]
    return completion.reasoning, completion.content, calls
