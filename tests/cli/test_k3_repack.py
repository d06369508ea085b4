"""Holds up the k3-repack command as people meet it: options, output, plans, signals, pipes and exit codes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from k3.repack.cli import main
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import SMALL, WIDE, check_container, command, repacked, tree
from tests.support.waiting import wait_until, wait_until_taken
from tests.support.zygote import Zygote

PROGRAM = str(Path(sys.executable).with_name("k3-repack"))


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(WIDE, tmp_path_factory.mktemp("source") / "snapshot")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, snapshot: Path) -> dict[str, str]:
    place = tmp_path_factory.mktemp("undisturbed")
    repacked(snapshot, place / "out")
    return tree(place / "out")


def program(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the installed program."""
    words = [PROGRAM, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options)


# --- usage


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bits", "5"], ["--bits", "abc"], ["--mla-bits", ""], ["--head-bits", "-8"], ["--no-such-option"],
        ["--dirs", "a,,b"], ["--dirs", "a,a"], ["--dirs", "a,./a"], ["--dirs", ""], ["--shares", "1,2"],
        ["--dirs", "a,b", "--shares", "1"], ["--dirs", "a,b", "--shares", "1,0"], ["--layers", "x"],
        ["--dirs", "a,b", "--shares", "1,x"], ["--dirs", "a,b", "--shares", "1,-1"], ["--shares", "1000001"],
        ["--layers", "3-1"], ["--layers", ""], ["--layers", "1,,2"], ["--layers", "-1"], ["--layers", "1-"],
        ["--layers", "0-999999999999"], ["--in-place", "--dirs", "a"], ["--in-place", "--shares", "1"],
        ["--bwlimit", "0"], ["--bwlimit", "fast"], ["--bwlimit", "-5"], ["--source-dirs", ""], ["third"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_nonsense_is_a_usage_error(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command(snapshot, "out", *arguments)
    assert result.exit_code == 2, result.output
    assert "Error: " in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["only-one"]])
def test_missing_arguments_are_a_usage_error(arguments: list[str]) -> None:
    assert command(*arguments).exit_code == 2


def test_help_explains_every_option_and_exit_code() -> None:
    result = program("--help")
    assert result.returncode == 0
    for option in (
        "--source-dirs", "--dirs", "--shares", "--bits", "--mla-bits", "--head-bits", "--in-place", "--layers",
        "--plan", "--verify-full", "--bwlimit", "--direct / --no-direct", "--json",
    ):  # fmt: skip
        assert option in result.stdout
    for code in (0, 1, 2, 3, 5, 6, 7, 8, 130):
        assert re.search(rf"^ +{code} ", result.stdout, re.MULTILINE), code


def test_the_environment_gives_defaults_and_options_win(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"BITS": "4", "MLA_BITS": "16", "HEAD_BITS": "32", "DIRECT": "0", "DIRS": f"{tmp_path}/a,{tmp_path}/b"}
    for name, value in given.items():
        monkeypatch.setenv(f"K3_{name}", value)
    repacked(snapshot, tmp_path / "out", "--shares", "1,1", "--head-bits", "8")
    found = check_container(tmp_path / "out", [snapshot], drives=[tmp_path / "a", tmp_path / "b"])
    assert found.manifest["quantization"] == {"bits": 4, "mla_bits": 16, "head_bits": 8}
    monkeypatch.setenv("K3_BITS", "5")
    assert command(snapshot, tmp_path / "out").exit_code == 2


def test_paths_may_be_relative_and_odd(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "with space"
    place.mkdir()
    monkeypatch.chdir(place)
    repacked(snapshot, "漢 out", "--dirs", "the drive,漢 out", "--shares", "1,1")
    check_container(place / "漢 out", [snapshot], drives=[place / "the drive"])


# --- output


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_people_are_told_what_was_done(tmp_path: Path) -> None:
    source = write_snapshot(SMALL, tmp_path / "snapshot")
    result = repacked(source, tmp_path / "out", "--verify-full")
    assert "container" in result.stdout
    assert "skipped (vision): 12 tensors" in result.stdout
    assert "verified: EQUAL" in result.stdout
    assert result.stderr == ""
    again = repacked(source, tmp_path / "out")
    assert "is complete already" in again.stdout


def test_json_is_one_object_per_line_and_the_summary_is_last(snapshot: Path, tmp_path: Path) -> None:
    result = program(snapshot, tmp_path / "out", "--json")
    messages = lines(result.stdout)
    assert [message["type"] for message in messages[:-1]] == ["progress"] * (len(messages) - 1)
    summary = messages[-1]
    assert summary["type"] == "summary"
    assert summary["container"] == json.loads((tmp_path / "out" / "manifest.json").read_text())["container"]
    total = sum(path.stat().st_size for path in snapshot.glob("*.safetensors"))
    assert summary["read_bytes"] == total
    assert messages[-2]["done_bytes"] == messages[-2]["total_bytes"] == total
    assert (summary["already_complete"], summary["remade_units"], summary["rechecked_bytes"]) == (False, 0, 0)
    assert summary["peak_rss_bytes"] < 1 << 30
    again = lines(repacked(snapshot, tmp_path / "out", "--json").stdout)
    assert [message["type"] for message in again] == ["summary"]
    assert again[0]["already_complete"] is True


def test_json_of_a_verification(snapshot: Path, tmp_path: Path) -> None:
    messages = lines(repacked(snapshot, tmp_path / "out", "--json", "--verify-full").stdout)
    types = [message["type"] for message in messages]
    assert types.count("repacked") == 1
    assert types.count("summary") == 1
    assert types[-1] == "summary"
    summary = messages[-1]
    assert (summary["verdict"], summary["differences"], summary["first_differences"]) == ("equal", 0, [])
    assert summary["experts"] == 12
    assert summary["compared_bytes"] >= sum(
        path.stat().st_size for path in (tmp_path / "out").rglob("*.safetensors")
    )


def test_json_of_an_error(snapshot: Path, tmp_path: Path) -> None:
    result = repacked(snapshot, snapshot / "out", "--json", code=3)
    assert result.stdout == ""
    (message,) = lines(result.stderr)
    assert message["type"] == "error"
    assert message["error"] == "SourceError"
    assert message["exit_code"] == 3
    assert message["path"] == str(snapshot / "out")
    assert message["advice"]


@pytest.mark.parametrize("arguments", [["--json", "--verify-full"], ["--plan"], []], ids=" ".join)
def test_a_closed_pipe_is_quiet_and_loses_nothing(
    snapshot: Path, tmp_path: Path, undisturbed: dict[str, str], arguments: Sequence[str]
) -> None:
    words = " ".join([PROGRAM, str(snapshot), str(tmp_path / "out"), *arguments])
    shell = f"{words} | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""
    assert result.stdout.strip() == "141"
    repacked(snapshot, tmp_path / "out")
    assert tree(tmp_path / "out") == undisturbed


# --- plans


@pytest.mark.parametrize(
    "options",
    [[], ["--bits", "4"], ["--in-place"], ["--layers", "0,2"], ["--dirs", "{}/a,{}/b", "--shares", "3,1"],
     ["--dirs", "{}/out,{}/b"]],
    ids=" ".join,
)  # fmt: skip
def test_a_plan_writes_nothing_and_comes_true(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr("k3.repack.run.drive_rate", lambda directory: 1e9)  # equal speeds, as a plan assumes
    options = [option.replace("{}", str(tmp_path)) for option in options]
    before = tree(snapshot)
    text = repacked(snapshot, tmp_path / "out", *options, "--plan").stdout
    plan = json.loads(repacked(snapshot, tmp_path / "out", *options, "--plan", "--json").stdout)
    assert not list(tmp_path.iterdir()), "a plan writes nothing"
    assert tree(snapshot) == before
    result = lines(repacked(snapshot, tmp_path / "out", *options, "--json").stdout)[-1]
    sizes = {str(path): path.stat().st_size for path in tmp_path.rglob("*.safetensors")}
    assert {file["path"]: file["bytes"] for file in plan["files"]} == sizes
    for path, size in sizes.items():
        assert re.search(rf"^ *{size:,}  {re.escape(path)}$", text, re.MULTILINE)
    assert plan["read_bytes"] == result["read_bytes"]
    assert sum(drive["write_bytes"] for drive in plan["drives"]) == sum(sizes.values())
    extra = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) - sum(sizes.values())
    assert extra <= sum(drive["extra_bytes"] for drive in plan["drives"])
    assert plan["shares_assumed"] == ("--dirs" in options and "--shares" not in options)
    roots = json.loads((tmp_path / "out" / "manifest.json").read_text())["roots"]
    assert plan["shares"] == [root["share"] for root in roots if root["kind"] != "source"]


def test_a_plan_tells_vision_and_warnings(tmp_path: Path) -> None:
    source = write_snapshot(SMALL, tmp_path / "snapshot")
    (source / "extra.safetensors").write_bytes(b"x")
    plan = json.loads(repacked(source, tmp_path / "out", "--plan", "--json").stdout)
    assert len(plan["skipped"]) == 12
    assert any("extra.safetensors" in warning for warning in plan["warnings"])
    result = repacked(source, tmp_path / "out")
    assert "note: " in result.stderr
    assert "extra.safetensors" in result.stderr


# --- signals


def started(*arguments: object, code: str | None = None, **options: Any) -> subprocess.Popen[str]:
    words = [PROGRAM, *map(str, arguments)]
    if code is not None:
        words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("number", "preexec", "as_json"),
    [(signal.SIGINT, None, True), (signal.SIGTERM, None, False), (signal.SIGTERM, ignore_interrupts, False)],
    ids=["SIGINT", "SIGTERM", "SIGTERM of a background job"],
)
def test_a_signal_leaves_a_run_that_can_go_on(
    snapshot: Path, tmp_path: Path, undisturbed: dict[str, str], number: signal.Signals,
    preexec: Callable[[], None] | None, as_json: bool,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    process = started(snapshot, out, "--bwlimit", "200K", *(["--json"] if as_json else []), preexec_fn=preexec)
    wait_until(lambda: (out / "dense.safetensors.partial").exists())
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    text = lines(stderr)[-1]["problem"] if as_json else stderr
    assert "interrupted: nothing is lost; run the same command again to continue" in text
    assert (out / "journal.mdb").exists()
    assert not (out / "manifest.json").exists()
    if as_json:
        assert all(message["type"] == "progress" for message in lines(stdout))
    repacked(snapshot, out)
    assert tree(out) == undisturbed


WAITING = """
import os, sys
from k3.base import direct_io
from k3.repack import cli, write
write.COMMIT_BYTES = 100_000
pwritev, begun, go = os.pwritev, int(sys.argv.pop()), int(sys.argv.pop())
def waiting(fd, buffers, offset):
    os.write(begun, b"w")
    os.read(go, 1)  # nothing, once the test has closed the other end
    return pwritev(fd, buffers, offset)
direct_io.WriteFile.__init__.__kwdefaults__["pwritev"] = waiting
sys.argv[0] = "k3-repack"
cli.main()
"""


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_ends_a_run_whose_writes_are_waiting(tiny_snapshot: Path, tmp_path: Path, times: int) -> None:
    """The first one lets what is on its way arrive, the second calls it off; then nothing may wait for it."""
    out = tmp_path / "out"
    (go, let_go), (seen, begun) = os.pipe(), os.pipe()
    process = started(tiny_snapshot, out, go, begun, code=WAITING, pass_fds=(go, begun))
    os.close(go)
    os.close(begun)
    assert os.read(seen, 1) == b"w"
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        wait_until_taken(process.pid, signal.SIGINT)
    os.close(let_go)
    _, stderr = process.communicate(timeout=60)
    os.close(seen)
    assert process.returncode == 130, stderr
    repacked(tiny_snapshot, out, "--verify-full")


def test_a_plan_that_is_interrupted_wrote_nothing(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip  # noqa: E501
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("k3.repack.cli.drive_needs", interrupt)
    result = command(snapshot, tmp_path / "out", "--plan")
    assert result.exit_code == 130
    assert "interrupted: nothing was written" in result.stderr


def test_two_runs_at_the_same_time(snapshot: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    out = tmp_path / "out"
    first = started(snapshot, out, "--bwlimit", "400K")
    wait_until(lambda: (out / "dense.safetensors.partial").exists())
    first.send_signal(signal.SIGSTOP)  # however slow the machine, the first is still at work
    second = command(snapshot, out)
    first.send_signal(signal.SIGCONT)
    assert second.exit_code == 8
    assert "another k3-repack is working in this directory" in second.stderr
    first.communicate(timeout=120)
    assert first.returncode == 0
    assert tree(out) == undisturbed


def test_a_cache_is_named_by_any_of_its_folders(tmp_path: Path) -> None:
    source = write_snapshot(dataclasses.replace(SMALL, layout="hf_cache"), tmp_path / "hub")
    for number, name in enumerate((source, source.parent, source.parent.parent)):
        repacked(name, tmp_path / str(number))
    assert tree(tmp_path / "0") == tree(tmp_path / "1") == tree(tmp_path / "2")


def test_a_container_is_no_snapshot(tiny_snapshot: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(main, [str(tiny_snapshot), str(tmp_path / "c")]).exit_code == 0
    told = CliRunner().invoke(main, [str(tmp_path / "c"), str(tmp_path / "d")])
    assert told.exit_code == 3
    assert "not a snapshot" in told.stderr
    inside = CliRunner().invoke(main, [str(tiny_snapshot), str(tmp_path / "c" / "inside")])
    assert inside.exit_code == 8
    assert not (tmp_path / "c" / "inside").exists()


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0,)])
def test_closed_standard_streams(
    zygote: Zygote, tiny_snapshot: Path, tmp_path: Path, closed: tuple[int, ...]
) -> None:
    ended = zygote.run(["k3-repack", str(tiny_snapshot), str(tmp_path / "c")], streams=dict.fromkeys(closed))
    assert ended.code == 0, ended
    assert "Traceback" not in ended.out + ended.err


def test_a_full_output_is_no_damage(zygote: Zygote, tiny_snapshot: Path, tmp_path: Path) -> None:
    ended = zygote.run(["k3-repack", str(tiny_snapshot), str(tmp_path / "c")], streams={1: "/dev/full"})
    assert ended.code == 7
    assert "standard output" in ended.err
    assert (tmp_path / "c" / "manifest.json").exists()


def test_a_drive_that_cannot_be_made_leaves_no_directory(tiny_snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    drives = f"{tmp_path / 'out'},{tmp_path / 'file' / 'drive'}"
    told = CliRunner().invoke(
        main, [str(tiny_snapshot), str(tmp_path / "out"), "--dirs", drives, "--shares", "1,1"]
    )
    assert told.exit_code == 6
    assert not (tmp_path / "out").exists()
