"""Holds up: --verify-full says EQUAL only of what it compared; a repack is finished only when all is durable."""

from __future__ import annotations

import errno
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import DriveError, ExitCode, IncompleteError
from k3.base.huge_pages import HugePages
from k3.base.ledger import Ledger
from k3.checkpoint.snapshot import Snapshot
from k3.container.manifest import parse_manifest
from k3.model.kinds import MANIFEST_NAME
from k3.repack import cli as cli_module
from k3.repack import durable
from k3.repack import run as run_module
from k3.repack.cli import main
from k3.repack.compare import compare_with_source
from k3.repack.comparison import EXIT_CODES, Cause, ComparedUnit, Comparison, Difference, required_units
from k3.repack.durable import durable_units, refuse_unfinished
from k3.repack.journal import Journal
from k3.repack.journal_file import ShardRecord
from k3.repack.plan import Plan
from k3.repack.repack_request import RepackRequest
from k3.repack.resume_check import recheck
from k3.repack.run import Watcher, repack
from k3.verify.cli import main as verify_main
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.mounts import small_tmpfs
from tests.support.syscalls import ERRNOS, FailingCall

MODEL = SyntheticModel(layers=2, experts=4, vision=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(MODEL, tmp_path_factory.mktemp("source") / "snapshot")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def summary(result: Result) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert last["type"] == "summary", result.output
    return last


# The verdict


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=6),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), max_size=3),
    st.dictionaries(st.sampled_from(list(Cause)), st.integers(0, 2)),
    st.data(),
)
def test_equal_needs_every_unit_and_every_shard(
    units: dict[int, int], shards: dict[str, int], counts: dict[Cause, int], data: st.DataObject
) -> None:
    proven = data.draw(st.sets(st.sampled_from(sorted(units)))) if units else set()
    hashed = data.draw(st.sets(st.sampled_from(sorted(shards)))) if shards else set()
    required = {ComparedUnit("header", number): nbytes for number, nbytes in units.items()}
    comparison = Comparison(
        ledger=Ledger(required, {u: n for u, n in required.items() if u.number in proven}),
        shards=Ledger(shards, {name: shards[name] for name in hashed}),
        experts=0, tensors=0, counts=counts, differences=(), through_page_cache=(), huge_pages=HugePages(),
    )  # fmt: skip
    whole = proven == set(units) and hashed == set(shards)
    causes = [cause for cause in EXIT_CODES if counts.get(cause)]
    assert comparison.equal is (whole and not causes)
    expected = EXIT_CODES[causes[0]] if causes else ExitCode.OK if whole else ExitCode.DRIVE
    assert comparison.exit_code is expected
    assert comparison.verdict == {0: "equal", 1: "different"}.get(int(expected), "unproven")


def test_the_units_of_a_plan_are_all_bytes_of_its_files(source: Path) -> None:
    snapshot = Snapshot.open((source,))
    for in_place in (False, True):
        plan = Plan(snapshot, RepackRequest((source,), source).recipe, (1, 1), in_place=in_place)
        units = required_units(plan, {"config.json": 7})
        written = sum(plan.write_bytes().values())
        experts = sum(extent.stored_bytes for key in plan.experts() for extent in plan.expert_extents(key))
        assert sum(units.values()) == written + 7 + (experts if in_place else 0)


# Calls that fail


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("call", ["open", "fstat", "preadv", "close", "stat"])
def test_every_kind_of_call_that_fails(source: Path, tmp_path: Path, call: str, in_place: bool) -> None:
    home = tmp_path / "home"
    repack(RepackRequest((source,), home, in_place=in_place), Watcher())
    arguments = [source, home, *(["--in-place"] if in_place else []), "--verify-full", "--json"]
    whole = FailingCall(call, errno.EIO, home, at=1 << 30)
    with whole.active():
        assert command(*arguments).exit_code == 0
    step = max(1, whole.seen // 5)
    for number, at in zip(cycle(ERRNOS), range(0, whole.seen, step), strict=False):
        fault = FailingCall(call, number, home, at)
        with fault.active():
            result = command(*arguments)
        place = f"{call} {at} {errno.errorcode[number]} {fault.struck}\n{result.output}"
        assert "Traceback" not in result.output, place
        last = json.loads(result.stdout.splitlines()[-1]) if result.stdout else {}
        if result.exit_code == 0:  # a call that was made for a message only: nothing is left unproven
            assert last["compared_bytes"] == last["required_bytes"], place
            assert not fault.struck or call == "stat", place
        else:
            absent = number == errno.ENOENT
            assert result.exit_code in ({1, 4, 5, 6, 7, 8} if call == "stat" or absent else {6}), place
            assert last.get("verdict", "unproven") != "equal", place


def test_what_cannot_be_read_is_not_proven_and_not_different(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    repack(RepackRequest((source,), home), Watcher())
    lost = home / "experts" / "layer-00001.safetensors"

    def failing(request: RepackRequest, watcher: Watcher) -> Comparison:
        with FailingCall("open", errno.EIO, lost, times=1 << 30).active():
            return run_module.verify_full(request, watcher)

    monkeypatch.setattr(cli_module, "verify_full", failing)
    result = command(source, home, "--verify-full", "--json")
    assert result.exit_code == 6, result.output
    found = summary(result)
    assert (found["verdict"], found["exit_code"]) == ("unproven", 6)
    assert 0 < found["compared_bytes"] < found["required_bytes"]
    assert {item["path"] for item in found["first_differences"]} == {str(lost)}
    assert {item["cause"] for item in found["first_differences"]} == {"unreadable"}
    text = command(source, home, "--verify-full")
    assert "verified: NOT PROVEN, 5 places not compared" in text.stdout
    assert f"unreadable: file {lost}, " in text.stderr
    assert f"{lost} cannot be compared: cannot open for reading: Input/output error" in text.stderr


def test_a_root_that_is_unmounted_in_mid_run(source: Path, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "drive", "8m") as drive:
        home = tmp_path / "home"
        request = RepackRequest((source,), home, (home, drive), (1, 1))
        repack(request, Watcher())

        def unmount(self: Watcher, name: str) -> None:
            if Path("/proc/self/mountinfo").read_text().count(str(drive)):
                subprocess.run(["umount", "-l", drive], check=True)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Watcher, "item", unmount)
            comparison = run_module.verify_full(request, Watcher())
        subprocess.run(["mount", "-t", "tmpfs", "k3-test", drive], check=True)  # for the fixture's own umount
    assert comparison.exit_code is ExitCode.INCOMPLETE
    assert set(comparison.counts) == {Cause.GONE}
    assert not comparison.equal


# The source's own digests


def _flip_digest(home: Path) -> tuple[str, str]:
    """Write a manifest with another digest of the first shard, as a flipped bit in a journal would."""
    path = home / MANIFEST_NAME
    manifest = parse_manifest(path.read_bytes(), path)
    shard = manifest.source[0]
    wrong = ("0" if shard.sha256[0] != "0" else "1") + shard.sha256[1:]
    flipped = replace(manifest, source=(replace(shard, sha256=wrong), *manifest.source[1:]))
    path.write_bytes(flipped.render())
    return shard.sha256, wrong


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_a_digest_of_the_manifest_that_is_not_the_shards(source: Path, tmp_path: Path, in_place: bool) -> None:
    home = tmp_path / "home"
    repack(RepackRequest((source,), home, in_place=in_place), Watcher())
    right, wrong = _flip_digest(home)
    result = command(source, home, *(["--in-place"] if in_place else []), "--verify-full", "--json")
    assert result.exit_code == 1
    (difference,) = summary(result)["first_differences"]
    assert difference["problem"] == f"shard's SHA-256 is {right}, the manifest has {wrong}"
    assert difference["path"] == str(sorted(source.glob("*.safetensors"))[0])
    again = CliRunner().invoke(verify_main, [str(home), "--source", str(source), "--json"])
    assert again.exit_code == 1
    problems = [json.loads(line).get("problem", "") for line in again.stdout.splitlines()]
    assert f"shard's SHA-256 is {right}, the manifest has {wrong}" in problems


def test_all_of_the_source_is_hashed(source: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    result = command(source, home, "--verify-full", "--json")
    found = summary(result)
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert found["source_bytes"] == found["source_required_bytes"] == nbytes
    assert found["required_units"] == found["compared_units"] > 0


# Finished


def test_nothing_is_published_before_every_unit_is_durable(source: Path, tmp_path: Path) -> None:
    """A journal that lost one record of each kind: refused, nothing published, and the next run makes it whole."""

    def lose_expert(journal: Journal) -> None:
        journal.experts.pop(sorted(journal.experts)[-1])

    def lose_tensor(journal: Journal) -> None:
        journal.tensors.pop(max(journal.tensors))

    def lose_shard(journal: Journal) -> None:
        journal.shards.pop(max(journal.shards))

    def cut_digests(journal: Journal) -> None:
        key = min(journal.tensors)
        journal.tensors[key] = journal.tensors[key][:-1]

    losses: list[Callable[[Journal], None]] = [lose_expert, lose_tensor, lose_shard, cut_digests]
    for number, lose in enumerate(losses):
        for in_place in (False, True):
            home = tmp_path / f"home-{number}-{in_place}"
            request = RepackRequest((source,), home, in_place=in_place)

            def after_loss(plan: Plan, journal: Journal, lose: Callable[[Journal], None] = lose) -> None:
                assert durable_units(plan, journal).complete
                lose(journal)
                refuse_unfinished(plan, journal)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run_module, "refuse_unfinished", after_loss)
                with pytest.raises(IncompleteError, match=r"1 unit of .* did not become durable"):
                    repack(request, Watcher())
            assert not (home / MANIFEST_NAME).exists()
            assert repack(request, Watcher()).manifest.container
            assert command(source, home, *(["--in-place"] if in_place else []), "--verify-full").exit_code == 0


def test_a_shard_of_another_size_is_not_durable(source: Path, tmp_path: Path) -> None:
    snapshot = Snapshot.open((source,))
    plan = Plan(snapshot, RepackRequest((source,), tmp_path).recipe, (1,))
    journal = Journal(tmp_path / "journal.mdb")
    try:
        name = snapshot.shards[0].name
        assert len(durable_units(plan, journal).open()) == len(durable_units(plan, journal).required)
        journal.shards[name] = ShardRecord("0" * 64, snapshot.shards[0].size_bytes - 1, 0)
        assert durable.Durable("shard", name=name) in durable_units(plan, journal).open()
        journal.shards[name] = ShardRecord("0" * 64, snapshot.shards[0].size_bytes, 0)
        assert durable.Durable("shard", name=name) not in durable_units(plan, journal).open()
    finally:
        journal.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENODEV, errno.ESTALE, errno.EIO])
def test_what_cannot_be_read_back_is_made_again_only_if_it_is_damaged(
    source: Path, tmp_path: Path, number: int
) -> None:
    """A resumed run without descriptors, or without its drive, must not write everything once more."""
    home = tmp_path / "home"
    request = RepackRequest((source,), home)

    def stop(*arguments: object, **keywords: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "finish_data_files", stop)
        with pytest.raises(KeyboardInterrupt):
            repack(request, Watcher())

    def failing(*arguments: Any, **keywords: Any) -> Any:
        with FailingCall("open", number, home / "experts", times=1 << 30).active():
            return recheck(*arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "recheck", failing)
        if number == errno.EIO:
            found = repack(request, Watcher()).recheck
            assert found is not None
            assert len(found.bad_experts) == 4
            return
        with pytest.raises(DriveError):
            repack(request, Watcher())
    found = repack(request, Watcher()).recheck
    assert found is not None
    assert (found.bad_experts, found.bad_tensors) == ((), ())


def test_a_difference_keeps_its_cause_out_of_its_place() -> None:
    assert Difference("x", "/a", cause=Cause.GONE).place().keys() == {
        "path",
        "offset",
        "layer",
        "expert",
        "tensor",
    }
    assert compare_with_source.__doc__
