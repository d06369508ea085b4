"""docs/manual.md: every command has a page that man accepts, with all of --help; shells complete what there is."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "packaging" / "man"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("man_pages", ROOT / "scripts" / "man.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAN = _script()
COMMANDS: dict[str, click.Command] = MAN.commands()
PATHS = {name: PAGES / f"{MAN.page_name(name)}.1" for name in COMMANDS}


def plain(page: str) -> str:
    """Return a page's words as a reader sees them."""
    text = re.sub(r"\\f[BIR]", "", page).replace("\\-", "-").replace("\\e", "\\").replace("\\&", "")
    text = re.sub(r"^\.(B|BR|TP|PP|nf|fi)\b ?", "", text, flags=re.MULTILINE)
    return " ".join(text.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_has_every_option_argument_variable_and_exit_code(name: str) -> None:
    command = COMMANDS[name]
    page = PATHS[name].read_text(encoding="utf-8")
    words = plain(page)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            for option in (*parameter.opts, *parameter.secondary_opts):
                assert re.search(rf"^\\fB.*{re.escape(MAN._literal(option))}[\\ ,]", page, re.MULTILINE), option
            assert " ".join((parameter.help or "").replace("…", "...").split()) in words, parameter.opts
            if isinstance(parameter.envvar, str):
                assert parameter.envvar in words.split(" ENVIRONMENT ")[-1]
        else:
            assert parameter.human_readable_name in words
    codes = re.findall(r"^  (\d+) ", command.epilog or "", re.MULTILINE)
    assert len(codes) > 5
    assert re.findall(r"^\.B (\d+)$", page.split(".SH EXIT STATUS")[1], re.MULTILINE) == codes


def test_there_is_a_page_for_every_command_and_no_other() -> None:
    assert sorted(PAGES.glob("*.1")) == sorted(PATHS.values())
    assert {"k3-repack", "k3-verify", "k3-store", "k3-store serve", "k3-run", "k3-run bench"} <= set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_is_what_the_script_writes(name: str) -> None:
    written = PATHS[name].read_text(encoding="utf-8")
    if f"click {version('click')} " not in written.splitlines()[0]:
        pytest.skip("written with another release of click, which may say the same in another form")
    assert MAN.page(name, COMMANDS[name]) == written, "run: .venv/bin/python scripts/man.py"


@pytest.mark.parametrize("name", COMMANDS)
def test_man_has_nothing_to_complain_of(name: str) -> None:
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "100", "MANPAGER": "cat"}
    if shutil.which("groff"):
        command = ["groff", "-man", "-Tutf8", "-ww", "-z", str(PATHS[name])]
    elif shutil.which("mandoc"):
        command = ["mandoc", "-T", "lint", "-W", "warning", str(PATHS[name])]
    else:
        pytest.skip("neither groff nor mandoc is installed")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def completed(words: str) -> list[str]:
    """Return what a shell would offer at the end of a command line."""
    program = words.split(" ")[0]
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    module = {
        "k3-run": "engine",
        "k3-store": "store",
        "k3-repack": "repack",
        "k3-verify": "verify",
        "k3-chat": "serve",
    }[program]
    code = f"import sys; sys.argv[0] = {program!r}; from k3.{module}.cli import main; main()"
    environment = {
        **os.environ, variable: "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_shells_complete_options_and_commands() -> None:
    assert completed("k3-run --ng") == ["--ngen"]
    assert completed("k3-store se") == ["serve"]
    assert completed("k3-store serve --cache") == ["--cache-gb"]
    assert completed("k3-verify --read") == ["--read-data"]
    assert "8" in completed("k3-repack --bits ")


def test_shells_complete_the_benchmark_and_not_the_prompt() -> None:
    assert "--repetitions" in completed("k3-run bench --rep")
    assert completed("k3-run bench --ngen") == []
    assert completed("k3-run --repet") == []


@pytest.mark.parametrize("shell", ["bash_source", "zsh_source", "fish_source"])
def test_the_line_of_the_page_prints_a_script(shell: str) -> None:
    page = (ROOT / "docs" / "manual.md").read_text(encoding="utf-8")
    assert f"_K3_RUN_COMPLETE={shell} k3-run" in page
    environment = {**os.environ, "_K3_RUN_COMPLETE": shell}
    if shell == "bash_source" and shutil.which("bash") is None:
        pytest.skip("no bash")
    code = "import sys; sys.argv[0] = 'k3-run'; from k3.engine.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "k3-run" in done.stdout
