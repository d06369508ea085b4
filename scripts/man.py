"""Writes the manual pages of all commands, from what they say under --help: packaging/man/*.1.

    python scripts/man.py

The pages are in the repository, so that a build needs no working program; a test says when they are out of date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click

import k3.engine.cli
import k3.repack.cli
import k3.serve.cli
import k3.store.cli
import k3.verify.cli
from k3.engine.report.bench_command import bench

PLACE = Path(__file__).parents[1] / "packaging" / "man"
PROGRAMS: dict[str, click.Command] = {
    "k3-repack": k3.repack.cli.main,
    "k3-verify": k3.verify.cli.main,
    "k3-store": k3.store.cli.main,
    "k3-run": k3.engine.cli.main,
    "k3-chat": k3.serve.cli.main,
    "k3-run bench": bench,
}

_EXIT_CODE = re.compile(r"^  (\d+) +(.+)$", re.MULTILINE)


def commands() -> dict[str, click.Command]:
    """Return every command by its name as it is typed, each group before the commands that are in it."""
    found: dict[str, click.Command] = {}
    for name, command in PROGRAMS.items():
        found[name] = command
        if isinstance(command, click.Group):
            found.update({f"{name} {below}": command.commands[below] for below in command.commands})
    return found


def page_name(name: str) -> str:
    """Return the name of a command's page: `k3-store-serve` for `k3-store serve`."""
    return name.replace(" ", "-")


def page(name: str, command: click.Command) -> str:
    """Return the manual page of the command `name`, in the man macros of roff."""
    context = command.context_class(command, info_name=name, **command.context_settings)
    summary = command.get_short_help_str(limit=200).rstrip(".")
    lines = [
        f'.\\" Written by scripts/man.py from {name} --help, as click {version("click")} says it.',
        f'.TH {page_name(name).upper()} 1 "" "k3-store {version("k3-store")}" "K3 store"',
        ".SH NAME",
        f"{page_name(name)} \\- {_text(summary)}",
        ".SH SYNOPSIS",
        f".B {_literal(name)}",
        *(_text(word) for word in command.collect_usage_pieces(context)),
        ".SH DESCRIPTION",
        *_paragraphs(command.help or ""),
        *_options(command, context),
        *_commands(name, command),
        *_environment(command),
        ".SH EXIT STATUS",
    ]
    for code, meaning in _EXIT_CODE.findall(command.epilog or ""):
        lines += [".TP", f".B {code}", _text(meaning)]
    lines.append(".SH SEE ALSO")
    others = [
        other for other in commands() if other != name and (" " not in other or other.startswith(f"{name} "))
    ]
    if " " in name:
        others = [name.split()[0]]
    lines += [f".BR {_literal(page_name(other))} (1){',' * (other != others[-1])}" for other in others]
    return "\n".join(lines) + "\n"


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    yield ".SH OPTIONS"
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            yield ".TP"
            yield _option_names(record[0])
            yield _text(record[1])


def _option_names(names: str) -> str:
    """Return "-h, --help" or "--dirs A,B,..." what is typed in bold, what stands for a value in italics."""
    typed = []
    for word in names.split(" "):
        is_option = word.startswith("-")
        typed.append(f"\\f{'B' if is_option else 'I'}{_literal(word)}\\fR")
    return " ".join(typed)


def _commands(name: str, command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        for below, inner in command.commands.items():
            yield ".TP"
            yield f".BR {_literal(page_name(f'{name} {below}'))} (1)"
            yield _text(inner.get_short_help_str(limit=200))


def _environment(command: click.Command) -> Iterator[str]:
    variables = {
        parameter.envvar: parameter.opts[-1]
        for parameter in command.params
        if isinstance(parameter, click.Option) and isinstance(parameter.envvar, str)
    }
    if variables:
        yield ".SH ENVIRONMENT"
        for variable, option in sorted(variables.items()):
            yield ".TP"
            yield f".B {_literal(variable)}"
            yield f"The value of \\fB{_literal(option)}\\fR where that is not given."


def _paragraphs(text: str) -> Iterator[str]:
    r"""Yield paragraphs; one that begins with \b keeps its lines, as under --help."""
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        lines = paragraph.split("\n")
        if lines[0].strip() == "\b":
            yield from (".nf", *map(_text, lines[1:]), ".fi")
        else:
            yield _text(" ".join(line.strip() for line in lines))


def _text(text: str) -> str:
    """Return prose for roff: escaped, with `code` in bold and options with hyphens that can be searched for."""
    text = text.replace("…", "...").replace("\\", "\\e")
    text = re.sub(r"(?<![\w-])--?[a-z][a-z0-9-]*", lambda found: found[0].replace("-", "\\-"), text)
    text = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _literal(text: str) -> str:
    return text.replace("\\", "\\e").replace("-", "\\-")


def main() -> None:
    """Write every page, and remove those of commands that there are no more."""
    PLACE.mkdir(parents=True, exist_ok=True)
    pages = {f"{page_name(name)}.1": page(name, command) for name, command in commands().items()}
    for path in PLACE.glob("*.1"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (PLACE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
