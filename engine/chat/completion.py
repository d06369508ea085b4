"""A completion as it is understood: the events of a stream, and the message that they add up to. Values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool is called; calls are numbered from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """More of a call's arguments; all pieces of a call, joined, are one JSON value."""

    call: int
    text: str


@dataclass(frozen=True, slots=True)
class ParseWarning:
    """Something about the completion was not as the format has it; the text itself is kept elsewhere."""

    text: str


Event = ReasoningText | ContentText | CallBegun | ArgumentsText | ParseWarning


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: the tool's name, and its arguments as JSON text, an object unless the model wrote none."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One assistant message, parsed."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    warnings: tuple[str, ...]


def joined(events: Iterable[Event]) -> Completion:
    """Add the events of a whole stream up to the message that they stand for."""
    reasoning: list[str] = []
    content: list[str] = []
    warnings: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, ReasoningText):
            reasoning.append(event.text)
        elif isinstance(event, ContentText):
            content.append(event.text)
        elif isinstance(event, CallBegun):
            names.append(event.name)
            arguments.append([])
        elif isinstance(event, ArgumentsText):
            arguments[event.call].append(event.text)
        else:
            warnings.append(event.text)
    calls = tuple(ToolCall(name, "".join(pieces)) for name, pieces in zip(names, arguments, strict=True))
    return Completion("".join(reasoning), "".join(content), calls, tuple(warnings))
