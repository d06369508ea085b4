"""A conversation to encode, as a value, and the error for one that cannot be. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3.base.errors import ExitCode, K3Error
from k3.base.safe_text import shown

EFFORTS = ("low", "high", "max")


class ChatError(K3Error):
    """A conversation that the chat format cannot express."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages in OpenAI's form and what they ask for.

    `thinking` False leaves the think section out of every turn, and the effort with it. `thinking_effort` None
    says nothing about effort. `tool_choice` "required" and "none" become an instruction to the model; every other
    value gives none. `response_format` is "json_object", "json_schema", or an object of that `type`;
    `response_schema` stands in for the schema inside it. `image_placeholders` writes a placeholder, which this
    model cannot see, for an image; without it an image is refused. `image_prompts` are texts of special tokens
    that take the place of the placeholders, one each. ChatError for a setting that the format does not have.
    """

    messages: Sequence[object]
    tools: Sequence[object] = ()
    thinking: bool = True
    thinking_effort: str | None = None
    tool_choice: object = None
    response_format: object = None
    response_schema: object = None
    add_generation_prompt: bool = True
    image_placeholders: bool = False
    image_prompts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.thinking and self.thinking_effort is not None and self.thinking_effort not in EFFORTS:
            raise ChatError(
                f"thinking_effort {shown(self.thinking_effort)} is not one of low, high and max",
                advice="Use one of these, or leave it out",
            )
