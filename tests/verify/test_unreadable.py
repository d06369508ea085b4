"""Holds up: k3-verify never says "sound" of what it could not read, whatever fails and whenever."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.base.direct_io import Bytes, ReadFile
from k3.base.notes import forget_notes
from k3.base.page_buffers import huge_buffer
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.verify.cli import main
from k3.verify.digest_check import BytesCheck, check_bytes
from k3.verify.finding import Kind
from k3.verify.structure import check_structure
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.containers import Built, build_container
from tests.support.mounts import small_tmpfs
from tests.support.syscalls import CALLS, ERRNOS, FailingCall


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a"], [1, 1], layers=(1,), experts=3)


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def summary(result: Result) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert last["type"] == "summary"
    return last


def findings(result: Result) -> list[dict[str, Any]]:
    messages = [json.loads(line) for line in result.stdout.splitlines()]
    return [message for message in messages if message["type"] == "finding"]


def assert_told(result: Result, fault: FailingCall) -> None:
    """Assert that a run in which a call failed gave a documented code, a file and a reason, and no claim."""
    place = f"{fault.call} {fault.at} {errno.errorcode[fault.number]} {fault.struck}\n{result.output}"
    assert result.exit_code in {4, 6} | (
        {0, 1, 5} if fault.call == "stat" else {1, 5} if fault.number == errno.ENOENT else set()
    ) | ({0, 9} if fault.call == "mmap" else set()), place
    assert "Traceback" not in result.output, place
    last = [json.loads(line) for line in result.stdout.splitlines()][-1:]
    if result.exit_code == 0:  # for a message only, or a buffer of one of several threads: the proof is whole
        data = last[0]["data"]
        assert data["compared_bytes"] == data["required_bytes"], place
    elif last and last[0]["type"] == "summary":
        assert last[0]["sound"] is False, place
        errors = [finding for finding in findings(result) if finding["severity"] == "error"]
        assert errors, place
        if fault.call != "mmap":
            assert any(finding.get("path") for finding in errors), place
    else:
        assert json.loads(result.stderr.splitlines()[-1])["type"] == "error", place


@pytest.mark.parametrize("call", CALLS)
def test_every_call_that_fails_once(built: Built, tmp_path: Path, call: str) -> None:
    numbers = cycle(ERRNOS if call != "mmap" else (errno.ENOMEM, errno.EAGAIN))
    at = struck = 0
    while True:
        fault = FailingCall(call, next(numbers), tmp_path, at)
        with fault.active():
            result = verify(built.home, "--read-data", "all", "--json")
        if not fault.struck:
            break
        assert_told(result, fault)
        struck += 1
        at += 1 if at < 12 else 3
    assert result.exit_code == 0, result.output
    assert struck > 3, "the calls were not seen"


@pytest.mark.parametrize("number", ERRNOS)
@pytest.mark.parametrize("call", ["open", "stat", "fstat", "preadv", "close"])
def test_every_error_from_some_time_on(built: Built, tmp_path: Path, call: str, number: int) -> None:
    """A drive that is lost in mid-run: nothing works after that."""
    whole = FailingCall(call, number, tmp_path, at=1 << 30)
    with whole.active():
        assert verify(built.home, "--read-data", "all", "--json").exit_code == 0
    for at in (whole.seen // 4, whole.seen // 2, whole.seen - 1):
        fault = FailingCall(call, number, tmp_path, at, times=1 << 30)
        with fault.active():
            result = verify(built.home, "--read-data", "all", "--json")
        if fault.struck:
            assert_told(result, fault)


def check(built: Built, **options: Any) -> BytesCheck:
    structure = check_structure(built.home)
    assert structure.findings == []
    return check_bytes(structure, structure.targets, **options)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.EACCES, errno.EMFILE])
def test_a_file_that_cannot_be_opened_is_one_finding_with_its_extents(built: Built, number: int) -> None:
    lost = built.path(2)

    def opener(path: Path, direct: bool) -> ReadFile:
        if path == lost:
            with FailingCall("open", number, lost).active():
                return ReadFile(path, direct=direct)
        return ReadFile(path, direct=direct)

    result = check(built, opener=opener)
    (finding,) = result.findings
    assert (finding.kind, finding.path, finding.root) == (Kind.UNREADABLE, str(lost), 1)
    assert os.strerror(number) in finding.problem
    assert "3 extents" in finding.problem
    assert (result.skipped, len(result.ledger.open())) == (3, 3)


def vanish(path: Path) -> None:
    path.unlink()


def shrink(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("harm", [vanish, shrink, empty])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_changes_after_the_structure_was_checked(
    built: Built, harm: Callable[[Path], None], direct: bool
) -> None:
    structure = check_structure(built.home)
    harm(built.path(1))
    result = check_bytes(structure, structure.targets, direct=direct)
    assert {finding.path for finding in result.findings} == {str(built.path(1))}
    assert not result.ledger.complete
    if harm is vanish:
        assert [finding.kind for finding in result.findings] == [Kind.UNREADABLE]
        assert "has gone since" in result.findings[0].problem


@pytest.mark.parametrize("harm", [vanish, shrink, empty])
def test_a_file_that_changes_while_it_is_read(built: Built, harm: Callable[[Path], None]) -> None:
    harmed: list[Path] = []

    def opener(path: Path, direct: bool) -> ReadFile:
        file = ReadFile(path, direct=direct)
        if path == built.path(1) and not harmed:
            harmed.append(path)
            harm(path)
        return file

    result = check(built, opener=opener)
    if harm is not vanish:  # what is open can be read after its name has gone
        assert result.findings
        assert not result.ledger.complete
    assert bool(result.findings) is not result.ledger.complete


def test_descriptors_run_out(tmp_path: Path) -> None:
    """A real limit, in a process of its own."""
    built = build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [1, 1, 1])
    program = (
        "import os, resource\n"
        "from k3.verify import cli\n"
        "whole = cli.check_bytes\n"
        "def limited(*a, **k):\n"
        "    limit = int(os.environ['DESCRIPTORS'])\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))\n"
        "    return whole(*a, **k)\n"
        "cli.check_bytes = limited; cli.main()\n"
    )
    command = [sys.executable, "-c", program, str(built.home), "--read-data", "all", "--json"]
    for limit in (3, 5, 64):
        environment = {**os.environ, "DESCRIPTORS": str(limit)}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        last = json.loads(result.stdout.splitlines()[-1])
        assert last["sound"] is (result.returncode == 0)
        assert (result.returncode == 0) is (last["data"]["compared_bytes"] == last["data"]["required_bytes"])
        assert result.returncode in {3: {6}, 5: {0, 6}, 64: {0}}[limit], result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        assert result.returncode == 0 or "Too many open files" in result.stdout


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError("no room")])
def test_memory_for_no_buffer_is_no_fault_of_a_drive(
    built: Built, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refused(nbytes: int) -> None:
        raise error

    monkeypatch.setattr("k3.verify.digest_check.huge_buffer", refused)
    result = verify(built.home, "--read-data", "all")
    assert result.exit_code == 9, result.output
    assert "cannot allocate a read buffer" in result.output
    assert "sound" not in result.stdout.lower()


def test_a_thread_without_a_buffer_is_told_and_the_others_do_its_work(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([OSError(errno.ENOMEM, "Cannot allocate memory")])

    def refused_once(nbytes: int) -> Bytes:
        if (error := next(answers, None)) is not None:
            raise error
        return huge_buffer(nbytes)

    forget_notes()
    monkeypatch.setattr("k3.verify.digest_check.huge_buffer", refused_once)
    result = verify(built.home, "--read-data", "all")
    assert result.exit_code == 0, result.output
    assert "note: fewer threads read: cannot allocate a read buffer" in result.stderr


def test_a_drive_that_is_unmounted_in_mid_run(tmp_path: Path) -> None:
    """The mount point stays, as an empty directory."""
    with small_tmpfs(tmp_path / "drive", "4m") as drive:
        built = build_container(tmp_path / "home", [drive], [1, 1])
        structure = check_structure(built.home)
        assert structure.findings == []
        subprocess.run(["umount", "-l", drive], check=True)
        result = check_bytes(structure, structure.targets)
        subprocess.run(["mount", "-t", "tmpfs", "k3-test", drive], check=True)  # for the fixture's own umount
    assert {finding.kind for finding in result.findings} == {Kind.INCOMPLETE}
    assert all("root 1 has gone" in finding.problem for finding in result.findings)
    assert not result.ledger.complete


def test_a_directory_that_cannot_be_listed_is_told(built: Built, tmp_path: Path) -> None:
    def refused(self: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "iterdir", refused)
        result = verify(built.home, "--json")
    assert result.exit_code == 6
    assert {finding["kind"] for finding in findings(result)} == {"unreadable"}
    assert "cannot list" in findings(result)[0]["problem"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_root_that_cannot_be_looked_at_is_not_absent(built: Built, tmp_path: Path, number: int) -> None:
    (tmp_path / "a" / "experts").rename(tmp_path / "a" / "elsewhere")
    with FailingCall("open", number, tmp_path / "a" / "root.json", times=1 << 30).active():
        result = verify(built.home, "--read-data", "all", "--json")
    assert result.exit_code == 6
    (finding,) = findings(result)
    assert (finding["kind"], finding["root"]) == ("unreadable", 1)
    assert os.strerror(number) in finding["problem"]
    assert summary(result)["sound"] is False


def test_totals_are_printed(built: Built) -> None:
    result = verify(built.home, "--read-data", "all")
    stored = sum(target.stored_bytes for target in check_structure(built.home).targets)
    assert f"data: compared {stored:,} of {stored:,} bytes" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("structure: "))
    assert "compared" in line
    data = summary(verify(built.home, "--read-data", "all", "--json"))["data"]
    assert data["compared_bytes"] == data["required_bytes"] == stored
    built.path(1).unlink()
    data = summary(verify(built.home, "--read-data", "all", "--json"))["data"]
    assert 0 < data["compared_bytes"] < data["required_bytes"] == stored


def test_one_finding_is_one(built: Built) -> None:
    built.path(1).unlink()
    assert verify(built.home).stdout.splitlines()[-1] == "NOT SOUND: 1 finding"
    built.path(2).unlink()
    assert verify(built.home).stdout.splitlines()[-1] == "NOT SOUND: 2 findings"


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("call", ["open", "fstat", "preadv", "close"])
def test_the_source_grade_never_claims_what_it_could_not_read(tmp_path: Path, call: str, in_place: bool) -> None:
    snapshot = write_snapshot(SyntheticModel(layers=2, experts=4, vision=False), tmp_path / "snapshot")
    home = tmp_path / "home"
    repack(RepackRequest((snapshot,), home, (), None, in_place=in_place), Watcher())
    whole = FailingCall(call, errno.EIO, tmp_path, at=1 << 30)
    with whole.active():
        assert verify(home, "--source", snapshot, "--json").exit_code == 0
    for number, at in zip(cycle(ERRNOS), range(0, whole.seen, max(1, whole.seen // 6)), strict=False):
        fault = FailingCall(call, number, tmp_path, at)
        with fault.active():
            result = verify(home, "--source", snapshot, "--json")
        place = f"{call} {at} {errno.errorcode[number]} {fault.struck}\n{result.output}"
        if fault.struck:
            assert result.exit_code in {1, 3, 4, 5, 6}, place
        assert "Traceback" not in result.output, place
