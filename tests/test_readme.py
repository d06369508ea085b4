"""README.md: its transcript is what the commands print, and its parts are where they belong."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
MARK = "<!-- transcript: tests/test_readme.py runs these lines -->\n```console\n"
FIRST_SCREEN_LINES = 30
SNAPSHOT = re.compile(r"`python (-m k3\.verify\.synthetic snapshot [^`]+)`")

VARYING = [
    (re.compile(r"\d+(\.\d+)? [kMGT]?B/s"), "RATE"),
    (re.compile(r"\d+(\.\d+)? tok/s"), "RATE"),
    (re.compile(r"\b(in|load) \d+(\.\d+)? s\b"), r"\1 TIME"),
    (re.compile(r"\bpeak (memory|RSS) \d+(\.\d+)? [kMG]?B\b"), r"peak \1 SIZE"),
    (re.compile(r"\bread \d+(\.\d+)? GB\b"), "read SIZE"),  # experts read on a guess count too
]
"""Figures that differ from run to run."""


def transcript() -> list[tuple[str, list[str]]]:
    """Return the commands of the README's transcript, each with the lines that it is said to print."""
    text = README.read_text(encoding="utf-8")
    assert text.count(MARK) == 1
    steps: list[tuple[str, list[str]]] = []
    for line in text.split(MARK)[1].split("\n```")[0].splitlines():
        if line.startswith("$ "):
            steps.append((line.removeprefix("$ "), []))
        else:
            steps[-1][1].append(line)
    return steps


def normalised(line: str) -> str:
    """Return a line with words in place of the figures that vary."""
    for pattern, word in VARYING:
        line = pattern.sub(word, line)
    return line


def is_shown_as(printed: str, shown: str) -> bool:
    """Tell whether a printed line is the one that is shown, where `…` at its end stands for the rest."""
    shown = normalised(shown)
    if shown.endswith("…"):
        return normalised(printed).startswith(shown.removesuffix("…"))
    return normalised(printed) == shown


def run(words: list[str], place: Path) -> list[str]:
    """Run one of the project's commands in `place`; return what it prints, stderr among stdout."""
    if words[0] == "python":
        command = [sys.executable, *words[1:]]
    else:
        (script,) = entry_points(group="console_scripts", name=words[0])
        code = (
            f"import sys; sys.argv[0] = {words[0]!r}; from {script.module} import {script.attr}; {script.attr}()"
        )
        command = [sys.executable, "-c", code, *words[1:]]
    done = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_the_transcript_is_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("K3_")]:
        monkeypatch.delenv(name)
    made_by = SNAPSHOT.search(README.read_text(encoding="utf-8"))
    assert made_by
    run(["python", *shlex.split(made_by[1])], tmp_path)
    for command, shown in transcript():
        printed = run(shlex.split(command), tmp_path)
        printed = [line for line in printed if not line.startswith("note: ")]  # of this machine, not of the job
        assert len(printed) == len(shown), "\n".join(printed)
        for printed_line, shown_line in zip(printed, shown, strict=True):
            assert is_shown_as(printed_line, shown_line), (
                f"{command}\nprinted {printed_line}\nshown   {shown_line}"
            )


def test_figures_that_vary_are_no_difference_and_others_are() -> None:
    shown = "read 3 shards in 0.5 s (5.4 MB/s), peak memory 60.7 MB"
    assert is_shown_as("read 3 shards in 12 s (1.4 kB/s), peak memory 1.1 GB", shown)
    assert not is_shown_as("read 4 shards in 0.5 s (5.4 MB/s), peak memory 60.7 MB", shown)
    assert is_shown_as("EQUAL: all of it", "EQUAL: …")
    assert not is_shown_as("DIFFERENT: all of it", "EQUAL: …")


def test_the_first_screen_shows_what_it_is_and_what_it_prints() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    shown = sum(1 + len(printed) for _, printed in transcript())
    assert shown == 12
    assert lines.index("```", lines.index("```console") + 1) < FIRST_SCREEN_LINES
    assert all(len(line) <= 100 for step in transcript() for line in step[1]), "no line is cut on a narrow screen"


def test_its_parts_come_in_the_order_in_which_a_reader_decides() -> None:
    text = README.read_text(encoding="utf-8")
    parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert parts == [
        "Install", "Four commands", "What it needs", "A real snapshot, two drives", "Guarantees", "Measured",
        "Documentation",
    ]  # fmt: skip
    section = dict(zip(parts, re.split(r"^## .+$", text, flags=re.MULTILINE)[1:], strict=True))
    commands = re.findall(
        r"^- \*\*`(k3-\w+)`\*\* [^\n]+\n  [^\n]+\n(?!  )", section["Four commands"], re.MULTILINE
    )
    assert commands == ["k3-repack", "k3-verify", "k3-store", "k3-run"]
    assert len(re.findall(r"^- \[", section["Guarantees"], re.MULTILINE)) == 6
    assert len(re.findall(r"^\| \[[^|]+ \| [\d.]+ \|$", section["Measured"], re.MULTILINE)) == 5
