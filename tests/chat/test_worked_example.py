"""Holds up docs/chat.md: its examples are what the encoder and the parser make of them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from k3.engine.chat.chat_request import ChatRequest
from k3.engine.chat.completion_stream import parse_completion
from k3.engine.chat.encoder import chat_prompt
from k3.engine.chat.markup import MARKERS
from k3.engine.chat.parser import HEAD_CHARS_MAX

PAGE = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
TOOL = {
    "name": "get_weather",
    "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}


def block(name: str) -> str:
    found = re.findall(rf"^```\w+ worked-example-{name}\n(.*?)\n```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, name
    return str(found[0])


def test_the_prompt() -> None:
    prompt = chat_prompt(ChatRequest(json.loads(block("messages"))))
    lines = [f"{'*' if special else ' '} {text}" for text, special in prompt.segments]
    assert lines == block("segments").split("\n")


def test_the_completion() -> None:
    parsed = parse_completion(block("completion"), tools=[{"type": "function", "function": TOOL}])
    wanted = json.loads(block("parsed"))
    assert json.loads(json.dumps(asdict(parsed))) == wanted


def test_the_page_names_the_markers_and_the_limit() -> None:
    table = PAGE.replace("\\|", "|")
    assert all(f"| `{marker}` |" in table for marker in MARKERS)
    assert f"longer than {HEAD_CHARS_MAX:,} characters" in PAGE
