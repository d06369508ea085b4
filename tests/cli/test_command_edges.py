"""Holds up that every command, however absurdly it is started, ends with words and a documented exit code.

Closed and full standard streams, absurd values for every option of every type, names that are not UTF-8. Exit code
1 means damaged bytes, so none of these may end with it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from k3.base.option_types import DirectoryList, Real, SizeType, Whole
from k3.engine.cli import main as run
from k3.engine.report.bench_command import bench
from k3.repack.cli import main as repack
from k3.serve.cli import main as chat
from k3.store.cli import main as store
from k3.verify.cli import main as verify
from tests.support.zygote import BROKEN_PIPE, Ended, Zygote
from tests.sweep.cases import documented_codes

SUBCOMMANDS = store.commands
NOWHERE = "/no/such/place"

# A command line of each command that is right but for its places, which are not there.
COMMANDS: dict[tuple[str, ...], tuple[click.Command, list[str]]] = {
    ("k3-repack",): (repack, [NOWHERE, "/no/such/target"]),
    ("k3-verify",): (verify, [NOWHERE]),
    ("k3-run",): (run, ["--container", NOWHERE, "--ids", "1"]),
    ("k3-run", "bench"): (bench, ["--container", NOWHERE]),
    ("k3-store", "serve"): (SUBCOMMANDS["serve"], ["--dirs", NOWHERE, "--socket", "/no/such/socket"]),
    ("k3-store", "status"): (SUBCOMMANDS["status"], ["--socket", "/no/such/socket"]),
    ("k3-store", "ps"): (SUBCOMMANDS["ps"], ["--socket", "/no/such/socket"]),
    ("k3-store", "bench"): (SUBCOMMANDS["bench"], ["--dirs", NOWHERE, "--no-daemon"]),
    ("k3-store", "warm"): (SUBCOMMANDS["warm"], ["--socket", "/no/such/socket"]),
    ("k3-chat", "render"): (chat.commands["render"], [NOWHERE, "--vocabulary", NOWHERE]),
    ("k3-chat", "parse"): (chat.commands["parse"], [NOWHERE]),
    ("k3-store", "simulate"): (SUBCOMMANDS["simulate"], ["--trace", NOWHERE]),
}  # fmt: skip
NAMES = {name: " ".join(name) for name in COMMANDS}

ABSURD = (
    "", " ", "nan", "-nan", "inf", "-inf", "-1", "1e300", "-1e300", "1" + "0" * 400, "1" * 5000, "0x10", "1_0",
    "٣", "1,,2", "1,nan", "\udcff", "~no-such-user/x", "a" * 300, "5-1", "0-999999999", "9/0", "101%",
)  # fmt: skip
NOT_NUMBERS = ("", " ", "nan", "-nan", "inf", "-inf", "-1", "1e300", "-1e300", "1" + "0" * 400, "1" * 5000, "x")


@pytest.fixture(autouse=True)
def aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands of this process set signal handlers and take any word for a path: no other test may meet them."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def check(code: object, text: str, name: tuple[str, ...], what: object) -> None:
    """Fail unless the exit code is one that the command documents, neither damage nor a fault of ours."""
    allowed = documented_codes(COMMANDS[name][0]) - {1, 70}
    assert code in allowed, f"{NAMES[name]} {what!r}: exit {code}: {text[-2000:]}"
    assert "Traceback" not in text, f"{NAMES[name]} {what!r}: {text[-2000:]}"


@pytest.mark.parametrize("name", COMMANDS, ids=NAMES.get)
def test_absurd_values_of_every_option_are_told(name: tuple[str, ...]) -> None:
    command, right = COMMANDS[name]
    runner = CliRunner()
    options = [option for option in command.params if isinstance(option, click.Option) and not option.is_flag]
    assert options
    for option in options:
        for value in ABSURD:
            words = [
                *right,
                f"{option.opts[0]}={value}" if option.opts[0].startswith("--") else option.opts[0] + value,
            ]
            result = runner.invoke(command, words, prog_name="k3")
            check(result.exit_code, result.output + str(result.exc_info), name, words)


@pytest.mark.parametrize("name", COMMANDS, ids=NAMES.get)
def test_what_is_no_number_is_refused_by_the_options_name(name: tuple[str, ...]) -> None:
    command, right = COMMANDS[name]
    runner = CliRunner()
    for option in command.params:
        number = isinstance(option.type, (Real, Whole, SizeType))
        assert number or not isinstance(option.type, (click.types.FloatParamType, click.types.IntParamType)), (
            f"{option.opts}: nan and 400 digits pass click's own types"
        )
        if not number:
            continue
        for value in NOT_NUMBERS:
            result = runner.invoke(command, [*right, f"{option.opts[0]}={value}"], prog_name="k3")
            assert result.exit_code == 2, (option.opts, value, result.output)
            assert option.opts[-1] in result.output or option.opts[0] in result.output


@pytest.mark.parametrize("name", COMMANDS, ids=NAMES.get)
def test_variables_are_checked_as_options_are(name: tuple[str, ...]) -> None:
    command, right = COMMANDS[name]
    for option in command.params:
        if isinstance(option, click.Option) and isinstance(option.envvar, str):
            for value in ("nan", "1e300", "x,,y", "\udcff"):
                result = CliRunner().invoke(command, right, prog_name="k3", env={option.envvar: value})
                check(result.exit_code, result.output, name, (option.envvar, value))


@pytest.mark.parametrize("name", COMMANDS, ids=NAMES.get)
def test_closed_and_full_streams(name: tuple[str, ...], zygote: Zygote) -> None:
    right = [*name, *COMMANDS[name][1]]
    ends = set()
    for streams in ({0: None, 1: None, 2: None}, {1: "/dev/full", 2: "/dev/full"}):
        ended = zygote.run(right, streams=streams)
        check(ended.code, ended.out + ended.err, name, streams)
        ends.add(ended.code)
    assert len(ends) == 1  # that nothing can be told changes nothing
    assert ends.isdisjoint({0, 2})
    ended = zygote.run([*name, "--help"], streams={1: "/dev/full"})
    check(ended.code, ended.err, name, "--help > /dev/full")
    assert (ended.code, "No space left" in ended.err) == (7, True)
    assert zygote.run([*name, "--help"], streams={0: None, 1: None, 2: "/dev/full"}).code == 0
    assert zygote.run([*name, "--no-such-option"], streams={2: "/dev/full"}).code == 2


@pytest.mark.parametrize("name", COMMANDS, ids=NAMES.get)
def test_a_reader_that_has_gone_is_not_damage(name: tuple[str, ...], zygote: Zygote) -> None:
    ended = zygote.run([*name, "--help"], streams={1: BROKEN_PIPE})
    assert (ended.code, ended.err) == (141, "")
    for line in ([*name, *COMMANDS[name][1]], [*name, "--no-such-option"]):
        told = zygote.run(line)
        assert (
            zygote.run(line, streams={2: BROKEN_PIPE}).code == told.code
        )  # the status is all that is left to tell


def test_a_prompt_from_a_closed_stdin_is_an_empty_prompt(zygote: Zygote) -> None:
    line = ["k3-run", "--container", NOWHERE, "--prompt-file", "-"]
    closed = zygote.run(line, streams={0: None})
    assert closed.code == 2
    assert "is empty" in closed.err


def run_in(zygote: Zygote, place: Path) -> list[tuple[tuple[str, ...], Ended]]:
    """Every command on `place` in the stead of what it wants."""
    lines: dict[tuple[str, ...], list[str | Path]] = {
        ("k3-repack",): [place, place], ("k3-verify",): [place], ("k3-run",): ["--container", place, "--ids", "1"],
        ("k3-run", "bench"): ["--container", place], ("k3-store", "serve"): ["--dirs", place, "--socket", place],
        ("k3-store", "status"): ["--socket", place], ("k3-store", "ps"): ["--socket", place],
        ("k3-store", "bench"): ["--dirs", place, "--no-daemon"], ("k3-store", "warm"): ["--socket", place],
        ("k3-store", "simulate"): ["--trace", place],
    }  # fmt: skip
    return [(name, zygote.run([*name, *map(os.fsdecode, words)])) for name, words in lines.items()]


def test_places_that_are_not_utf_8_are_named(zygote: Zygote, tmp_path: Path) -> None:
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    for name, ended in run_in(zygote, place):
        check(ended.code, ended.out + ended.err, name, place)
        assert ended.code != 0
        assert "udcff" in ended.err + ended.out or "xff" in ended.err + ended.out, (name, ended)


def test_a_directory_where_a_socket_or_a_file_is_wanted(zygote: Zygote, tmp_path: Path) -> None:
    for name, ended in run_in(zygote, tmp_path):
        check(ended.code, ended.out + ended.err, name, tmp_path)
        assert ended.code != 0
        if name in (("k3-store", "status"), ("k3-store", "ps"), ("k3-store", "warm")):
            assert "this is a directory, and no socket of k3-store" in ended.err, ended


def test_a_sound_container_under_a_name_that_is_not_utf_8(
    zygote: Zygote, tiny_snapshot: Path, tmp_path: Path
) -> None:
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    made = tmp_path / "made"
    ended = zygote.run(["k3-repack", str(tiny_snapshot), str(made), "--no-direct"])
    assert ended.code == 0, ended
    made.rename(home)
    for line in (
        ["k3-verify", str(home), "--read-data", "all"], ["k3-verify", str(home), "--json"],
        ["k3-run", "--container", str(home), "--ids", "1", "--ngen", "1"],
        ["k3-run", "--container", str(home), "--ids", "1", "--ngen", "1", "--json"],
        ["k3-run", "--container", str(home), "--ids", "1", "--plan", "--drive-gb-per-s=1", "--memory-gb-per-s=1"],
    ):  # fmt: skip
        ended = zygote.run(line, env={"PYTHONIOENCODING": "utf-8"})
        assert ended.code == 0, (line, ended)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["a,b"], ["a", "b"]),
        (["a", "b,c"], ["a", "b", "c"]),
        ([r"d\,a/x"], ["d,a/x"]),
        ([r"a\b"], [r"a\b"]),
        (["~/n0,~/n1"], ["/home/k3/n0", "/home/k3/n1"]),
        (["./~/n0"], ["~/n0"]),
        (["a , b"], ["a", "b"]),
    ],
)
def test_lists_of_directories(words: list[str], wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from k3.base.option_types import directories_option

    @click.command()
    @directories_option("--dirs", help="Places.", envvar="DIRS")
    def command(dirs: tuple[Path, ...]) -> None:
        click.echo("\n".join(map(str, dirs)))

    monkeypatch.setenv("HOME", "/home/k3")
    given = [part for word in words for part in ("--dirs", word)]
    assert CliRunner().invoke(command, given).output.split("\n")[:-1] == wanted
    if len(words) == 1:
        assert CliRunner().invoke(command, [], env={"DIRS": words[0]}).output.split("\n")[:-1] == wanted
    for twice in (["a", "./a"], ["a,b,a"], ["a", "b/../a"]):
        result = CliRunner().invoke(command, [part for word in twice for part in ("--dirs", word)])
        assert result.exit_code == 2
        assert "named twice" in result.output
    assert isinstance(command.params[0].type, DirectoryList)


def test_a_prompt_that_the_locale_cannot_decode_is_told_so() -> None:
    result = CliRunner().invoke(run, ["--container", NOWHERE, "M\udcfcnchen"], prog_name="k3")
    assert result.exit_code == 2
    assert "this locale's encoding" in " ".join(result.output.split())
    assert "--prompt-file" in result.output
