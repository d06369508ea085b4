"""Documents name files, sections and options that are there."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import k3.engine.cli
import k3.repack.cli
import k3.store.cli
import k3.verify.cli
import k3.verify.synthetic.__main__
from k3.engine.report.bench_command import bench

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]\b")

OF_OTHER_PROGRAMS = {
    "--create": "systemd-tmpfiles", "--now": "systemctl", "--offline": "systemd-analyze", "--param": "gcc",
    "--seccomp-bpf": "strace", "--unix-socket": "curl", "--warnings": "man", "--fix": "ruff",
    "--fast": "scripts/check", "--cpp": "scripts/check",
}  # fmt: skip
"""Options of programs that are not the project's, and of its shell scripts."""


@cache
def tracked() -> frozenset[str]:
    """Return every path that git knows, and every directory above one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    files = [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    return frozenset({path.as_posix() for file in files for path in (file, *file.parents)} - {"."})


@cache
def documents() -> tuple[Path, ...]:
    """Return every Markdown document of the repository."""
    return tuple(ROOT / name for name in sorted(tracked()) if name.endswith(".md"))


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a document with its place."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield f"{path.relative_to(ROOT)}:{number}", line


def named_paths(line: str) -> Iterator[str]:
    """Yield what reads like a path of this repository: the name of a folder at its root, a slash, and more."""
    folders = "|".join(sorted(re.escape(name) for name in tracked() if "/" not in name and (ROOT / name).is_dir()))
    for found in re.finditer(rf"(?<![\w./~$*>-])(?:{folders})/[\w./*{{}},-]*", line):
        yield found[0].rstrip(".,")


def is_there(name: str) -> bool:
    """Tell whether a path is in the repository, a pattern matches something there, and so for each of `{a,b}`."""
    braces = re.match(r"(.*)\{([^}]*)\}(.*)", name)
    if braces:
        return all(is_there(braces[1] + each + braces[3]) for each in braces[2].split(","))
    if "*" in name:
        return any(path.relative_to(ROOT).as_posix() in tracked() for path in ROOT.glob(name.rstrip("/")))
    return name.rstrip("/") in tracked()


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def command_options(command: click.Command) -> Iterator[str]:
    """Yield every option of a command and of the commands below it."""
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from command_options(below)


def script_options(path: Path) -> Iterator[str]:
    """Yield the options that a script declares with argparse."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def options() -> set[str]:
    """Return every option that some program of this repository takes."""
    programs = (
        k3.repack.cli.main, k3.verify.cli.main, k3.store.cli.main, k3.engine.cli.main, bench,
        k3.verify.synthetic.__main__.main,
    )  # fmt: skip
    found = {option for program in programs for option in command_options(program)} | {"--help"}
    paths = (*ROOT.glob("bench/*.py"), *ROOT.glob("examples/**/*.py"), *ROOT.glob("scripts/*"))
    for script in filter(Path.is_file, paths):  # scripts/ may hold what Python has compiled
        if script.suffix == ".py" or script.read_bytes().startswith(b"#!/usr/bin/env python"):
            found.update(script_options(script))
    return found | set(OF_OTHER_PROGRAMS)


def test_every_file_that_a_document_names_is_there() -> None:
    missing = [
        f"{place}: {name}"
        for document in documents()
        for place, line in lines(document)
        for name in named_paths(line)
        if not is_there(name)
    ]
    assert not missing, "\n".join(missing)


def test_every_link_leads_to_a_file_and_to_a_section_of_it() -> None:
    broken = []
    for document in documents():
        for place, line in lines(document):
            for target in LINK.findall(line):
                if "://" in target:
                    continue
                name, _, anchor = target.partition("#")
                path = (document.parent / name).resolve() if name else document
                if not path.exists() or (anchor and anchor not in anchors(path)):
                    broken.append(f"{place}: {target}")
    assert not broken, "\n".join(broken)


def test_every_option_that_a_document_names_is_some_programs() -> None:
    known = options()
    unknown = [
        f"{place}: {option}"
        for document in documents()
        for place, line in lines(document)
        for option in OPTION.findall(line)
        if option not in known and "-->" not in line  # an arrow with a word in it
    ]
    assert not unknown, "\n".join(unknown)


def test_what_is_missing_would_be_seen() -> None:
    assert list(named_paths("see `docs/figures.md`, tests/no_such.py and store/src/bind*.cpp.")) == [
        "docs/figures.md", "tests/no_such.py", "store/src/bind*.cpp",
    ]  # fmt: skip
    assert is_there("docs/figures.md")
    assert is_there("store/src/bind*.cpp")
    assert is_there("tests/{base,model}")
    assert not is_there("tests/no_such.py")
    assert not is_there("tests/{base,no_such}")
    assert "metrics-of-k3-store" in anchors(ROOT / "docs" / "metrics.md")
    assert OPTION.findall("give `--no-such`, or --dirs a--b") == ["--no-such", "--dirs"]
    assert "--no-such" not in options()
    assert {"--cache-gb", "--read-data", "--in-place", "--ngen", "-n", "--rounds", "--sparse"} <= options()
