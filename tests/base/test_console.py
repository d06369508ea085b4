"""Holds up how commands end: one line and the right exit code for every error, and sizes that mean one thing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from k3.base import errors
from k3.base.cli_support import Command, Progress, emit_json, exit_code_help, run
from k3.base.errors import EXIT_CODE_HELP, DamageError, ExitCode, K3Error
from k3.base.option_types import SizeType, parse_size

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@given(st.integers(0, 10**30), st.sampled_from(sorted({**_UNITS, **_BINARY})), st.booleans(), st.booleans())
def test_whole_numbers_are_exact_in_every_spelling(number: int, unit: str, lower: bool, b: bool) -> None:
    text = f"{number}{' ' * lower}{unit.lower() if lower else unit}{'B' * b}"
    assert parse_size(text) == number * {**_UNITS, **_BINARY}[unit]


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(_UNITS.keys() - {""})))
def test_decimals_are_exact(whole: int, thousandths: int, unit: str) -> None:
    assert parse_size(f"{whole}.{thousandths:03}{unit}") == (whole * 1000 + thousandths) * _UNITS[unit] // 1000


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("50G", 50 * 10**9), ("2.5 GiB", 5 << 29), (" 1kb ", 1000), ("1.5", 1), ("7B", 7)],
)
def test_examples(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "abc", "-1", "+1", "1e3", "1.2.3", ".5", "5.", "1GG", "1iB", "5i", "0x10", "1_000", "٣", "1,5G", "G",
     "nan", "inf", "1P", "1 2", "9" * 5000],
)  # fmt: skip
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size|digits"):
        parse_size(text)


def test_as_an_option_nonsense_is_a_usage_error() -> None:
    @click.command()
    @click.option("--size", type=SizeType(), default=5)
    def command(size: int) -> None:
        click.echo(size)

    assert CliRunner().invoke(command, []).output == "5\n"
    assert CliRunner().invoke(command, ["--size", "1Ki"]).output == "1024\n"
    result = CliRunner().invoke(command, ["--size", "lots"])
    assert result.exit_code == ExitCode.USAGE
    assert "'lots' is not a size" in result.output


def every_error() -> list[type[K3Error]]:
    found = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, K3Error)]
    assert len(found) > 15
    return found


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_is_one_line_and_its_exit_code(
    kind: type[K3Error], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = kind("it is broken", path="/x/y", tensor="t", layer=3, expert=0, offset=0, advice="Mend it")

    def body() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(body, as_json=as_json)
    assert ended.value.code == int(kind.exit_code)
    assert kind.exit_code in EXIT_CODE_HELP
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    if as_json:
        message = json.loads(err)
        assert message == {
            "type": "error", "error": kind.__name__, "exit_code": int(kind.exit_code), "problem": "it is broken",
            "path": "/x/y", "tensor": "t", "layer": 3, "expert": 0, "offset": 0, "advice": "Mend it",
        }  # fmt: skip
    else:
        assert err == "error: it is broken (file /x/y, tensor t, layer 3, expert 0, offset 0). Mend it\n"


@pytest.mark.parametrize(("code", "ended"), [(None, 0), (0, 0), (1, 1), (ExitCode.SPACE, 7)])
def test_a_body_ends_with_its_code(code: int | None, ended: int) -> None:
    with pytest.raises(SystemExit) as caught:
        run(lambda: code)
    assert caught.value.code == ended


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_says_what_it_leaves(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run(body, as_json=as_json, on_interrupt="all is well")
    assert caught.value.code == 130
    err = capsys.readouterr().err
    assert "interrupted: all is well" in (json.loads(err)["problem"] if as_json else err)


def test_a_fault_of_the_program_is_not_taken_for_damage(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise AssertionError("never")

    with pytest.raises(SystemExit) as caught:
        run(body)
    assert caught.value.code == ExitCode.INTERNAL
    assert int(ExitCode.INTERNAL) == 70
    assert "AssertionError: never" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_refusal_of_the_system_is_one_line(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        Path("/no/such/file").read_bytes()

    with pytest.raises(SystemExit) as caught:
        run(body, as_json=as_json)
    assert caught.value.code == ExitCode.DRIVE
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "/no/such/file" in err
    assert "No such file" in err


@pytest.mark.parametrize(
    ("error", "words"), [(MemoryError(), "more memory"), (RuntimeError("can't start new thread"), "more threads")]
)
def test_what_the_system_does_not_give_is_one_line(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        run(body)
    assert caught.value.code == ExitCode.UNSUPPORTED
    said = capsys.readouterr().err
    assert said.startswith(f"error: the system gave no {words}. Raise the limit")
    assert said.count("\n") == 1


@pytest.mark.parametrize("where", ["parsing", "invoking"])
def test_an_interrupt_before_the_body_is_not_taken_for_damage(where: str) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    option = click.Option(["--x"], callback=interrupted if where == "parsing" else None)
    command = Command("c", params=[option], callback=lambda x: interrupted())
    result = CliRunner().invoke(command, ["--x", "1"])
    assert result.exit_code == ExitCode.INTERRUPTED
    assert result.output == "\ninterrupted\n"


def test_usage_errors_from_inside_stay_usage_errors() -> None:
    @click.command()
    def command() -> None:
        def body() -> None:
            raise click.UsageError("no")

        run(body)

    assert CliRunner().invoke(command, []).exit_code == 2


PIPE = """
import sys
from k3.base.cli_support import run, emit_json
from k3.base.errors import DamageError

def body():
    for number in range(100_000):
        {line}
    raise DamageError("never reached")

run(body)
"""


@pytest.mark.parametrize(
    ("line", "shell"),
    [
        ("emit_json('x', n=number)", "| head -n 2"),
        ("print(number)", "| head -n 2"),
        ("sys.stderr.write('x' * 100 + chr(10))", "2>&1 >/dev/null | head -n 2"),
    ],
)
def test_a_closed_pipe_is_quiet(line: str, shell: str) -> None:
    command = f'set -o pipefail; {sys.executable} -c "$0" {shell} | wc -l; echo ${{PIPESTATUS[0]}}'
    result = subprocess.run(
        ["bash", "-c", command, PIPE.format(line=line)], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == ["2", "141"]
    assert result.stderr == ""


def test_every_exit_code_is_explained() -> None:
    assert set(EXIT_CODE_HELP) == set(ExitCode)
    text = exit_code_help([ExitCode.OK, ExitCode.SPACE])
    assert text.startswith("\b\n")
    assert "7   not enough space" in text


def test_progress_lines_are_json_and_the_last_one_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("reading", 100, as_json=True)
    progress.item("shard-漢")
    for _ in range(10):
        progress.advance(10)
    progress.close()
    progress.close()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 1
    assert lines[0]["type"] == "progress"
    assert (lines[0]["done_bytes"], lines[0]["total_bytes"], lines[0]["item"]) == (100, 100, "shard-漢")
    Progress("nothing", 0, as_json=True).close()
    assert json.loads(capsys.readouterr().out)["eta_s"] is None


def test_progress_without_a_terminal_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("reading", 100)
    progress.item("x")
    progress.advance(50)
    progress.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_that_is_made_late_shows_the_rate_since_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    began_s = time.monotonic()
    progress = Progress("reading", 1000)
    monkeypatch.setattr(time, "monotonic", lambda: began_s + 100.0)
    progress.advance(200)
    bar = progress._bar()
    assert bar is not None
    assert 90 <= bar.format_dict["elapsed"] < 200
    progress.close()
    assert "reading" in terminal.getvalue()
    progress.advance(1)  # after the end, nothing is drawn again
    assert progress._bar() is None


def test_json_lines_can_be_written_to_any_terminal() -> None:
    """Names are text from files and from the file system; neither may end a run that was going well."""
    code = """
import click
from k3.base.cli_support import emit_json, run
run(lambda: (emit_json('x', path='\\udcff/漢'), click.echo('… \\udcff'))[1])
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={"PYTHONIOENCODING": "ascii"}, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[0])["path"] == "\udcff/漢"


def test_emit_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json("x", text="two\nlines")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"type": "x", "text": "two\nlines"}
    assert str(DamageError("plain")) == "plain"


def test_links_in_a_circle_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").symlink_to("a")

    def body() -> None:
        (tmp_path / "a").resolve(strict=True)

    with pytest.raises(SystemExit) as caught:
        run(body)
    assert caught.value.code == ExitCode.DRIVE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "a loop of links" in said


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor has one thread")
@pytest.mark.parametrize("room", ["engine", "repack", "store", "verify"])
def test_no_command_has_a_thread_for_each_processor(room: str) -> None:
    code = f"import k3.{room}.cli, numpy, os; print(len(os.listdir('/proc/self/task')))"
    environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert ended.stdout == "1\n"
