"""k3-chat: parse, call, print."""

from __future__ import annotations

import json
from pathlib import Path

import click

from k3.base.cli_support import Command, Group, echo, exit_code_help, run, version_option
from k3.base.errors import ExitCode
from k3.container.layout import VERSION
from k3.engine.chat.completion_stream import parse_completion
from k3.engine.chat.encoder import chat_prompt, prompt_ids
from k3.engine.definition.settings import ModelSettings
from k3.engine.definition.tokenizer import Tokenizer
from k3.serve.chat_files import (
    model_tokenizer,
    read_completion,
    read_request,
    read_tools,
    vocabulary_tokenizer,
)

_PARSE_CODES = (ExitCode.OK, ExitCode.USAGE, ExitCode.DRIVE)
_RENDER_CODES = (
    *_PARSE_CODES, ExitCode.DAMAGED, ExitCode.SOURCE, ExitCode.INCOMPLETE, ExitCode.NOT_A_CONTAINER,
)  # fmt: skip

_PLACE = click.Path(path_type=Path)


@click.group(cls=Group, epilog=exit_code_help(_RENDER_CODES))
@version_option(VERSION)
def main() -> None:
    """Show how conversations become prompts, and what completions mean."""


@main.command(cls=Command, epilog=exit_code_help(_RENDER_CODES))
@click.argument("request_file", metavar="REQUEST.json", type=_PLACE)
@click.option("--container", type=_PLACE, help="Take the vocabulary of this container.")
@click.option("--snapshot", type=_PLACE, help="Take the vocabulary of this snapshot.")
@click.option("--vocabulary", type=_PLACE, help="Take this tiktoken.model.")
def render(request_file: Path, container: Path | None, snapshot: Path | None, vocabulary: Path | None) -> None:
    """Print the prompt that an OpenAI chat request becomes, as {"ids": [...], "text": "..."}.

    REQUEST.json is a file, or - for stdin, with messages, tools, tool_choice, response_format and
    chat_template_kwargs. What the format leaves out of a conversation is told on stderr. An image is written as a
    placeholder, which the model cannot see.
    """

    def body() -> int:
        if sum(place is not None for place in (container, snapshot, vocabulary)) != 1:
            raise click.UsageError("Which vocabulary? Give one of --container, --snapshot and --vocabulary.")
        prompt = chat_prompt(read_request(request_file))
        ids = prompt_ids(prompt, _tokenizer(container, snapshot, vocabulary))
        for warning in prompt.warnings:
            echo(f"warning: {warning}", err=True)
        click.echo(json.dumps({"ids": ids, "text": prompt.text}))
        return 0

    run(body)


@main.command(cls=Command, epilog=exit_code_help(_PARSE_CODES))
@click.argument("completion_file", metavar="FILE", type=_PLACE)
@click.option(
    "--tools", type=_PLACE, help="JSON list of the tools that were offered: names and types of arguments."
)
@click.option("--thinking/--no-thinking", default=True, help="The prompt left the think section open (default).")
def parse(completion_file: Path, tools: Path | None, thinking: bool) -> None:
    """Print what a completion means, as {"reasoning", "content", "tool_calls", "warnings"}.

    FILE is a file, or - for stdin, with the text that the model wrote behind the prompt, markers written out.
    Calls are in the form of OpenAI's API.
    """

    def body() -> int:
        offered = None if tools is None else read_tools(tools)
        parsed = parse_completion(read_completion(completion_file), tools=offered, thinking=thinking)
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls
        ]
        found = {"reasoning": parsed.reasoning, "content": parsed.content, "tool_calls": calls}
        click.echo(json.dumps({**found, "warnings": parsed.warnings}))
        return 0

    run(body)


def _tokenizer(container: Path | None, snapshot: Path | None, vocabulary: Path | None) -> Tokenizer:
    if vocabulary is not None:
        return vocabulary_tokenizer(vocabulary)
    return model_tokenizer(ModelSettings(container=container, snapshot=() if snapshot is None else (snapshot,)))


if __name__ == "__main__":
    main()
