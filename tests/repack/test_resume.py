"""Holds up resuming: what is skipped is read back first, what is damaged is made again, what differs refused."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3.base.errors import DamageError, ResumeError
from k3.model.keys import ExpertKey
from k3.model.tensor_recipe import Recipe
from k3.repack import publish, run
from k3.repack.journal import Journal
from k3.repack.journal_file import ShardRecord
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.containers import flip
from tests.support.repacked import SMALL, WIDE, rearrange, repacked, shard_tensors
from tests.support.resumed import Case, Listener, data_file, stop_after, stop_before


@pytest.fixture(autouse=True)
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3.repack.write.COMMIT_BYTES", 1)


# --- what is skipped is checked first


def test_what_is_durable_is_not_made_again(stopped: Case) -> None:
    result, listener = stopped.finishes_equal()
    assert result.read_bytes == 0
    assert result.written_bytes == 0
    assert result.recheck is not None
    plan = stopped.plan()
    assert result.recheck.good_units == 12 + len(plan.tensors)
    assert result.recheck.checked_bytes == sum(file.size_bytes - file.header_bytes for file in plan.files)
    assert "continuing an unfinished repack" in listener.notes[0]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_only_what_is_missing_is_read(case: Case, shards: int) -> None:
    stop_after(case, shards)
    result, listener = case.finishes_equal()
    names = [shard.name for shard in case.plan().snapshot.shards]
    assert listener.items[-1] == names[-1]
    assert set(listener.items) >= set(names[shards:])
    assert result.read_bytes < sum(shard.size_bytes for shard in case.plan().snapshot.shards) or shards < 2


def test_an_interrupted_run_keeps_what_it_has_done(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are far apart in a real run; Ctrl-C makes one more."""
    monkeypatch.setattr("k3.repack.write.COMMIT_BYTES", 1 << 30)
    stop_after(case, 3)
    result, _ = case.finishes_equal()
    assert result.recheck is not None
    assert result.recheck.good_units > 6


def places(case: Case) -> Iterator[tuple[int, int, str]]:
    """(file number, offset, what) of one byte of each kind of thing in the data files."""
    plan = case.plan()
    layer = plan.layers[1]
    for extent in layer.extents(2):
        yield extent.file, extent.offset + 100, "expert"
    last = layer.extents(5)[-1]
    assert last.stored_bytes > last.payload_bytes
    yield last.file, last.offset + last.stored_bytes - 1, "expert padding"
    quantized = next(tensor for tensor in plan.tensors if tensor.scales is not None)
    yield 0, quantized.weights.offset, "weights"
    assert quantized.scales is not None
    yield 0, quantized.scales.offset + 1, "scales"
    yield 0, quantized.scales.offset + quantized.scales.stored_bytes - 1, "dense padding"
    raw = next(tensor for tensor in plan.tensors if tensor.scales is None)
    yield 0, raw.weights.offset + 5, "raw tensor"


@pytest.mark.parametrize("index", range(7))
def test_a_flipped_byte_is_made_again(stopped: Case, index: int) -> None:
    number, offset, what = list(places(stopped))[index]
    flip(data_file(stopped, number), offset)
    result, listener = stopped.finishes_equal()
    assert result.recheck is not None
    bad = len(result.recheck.bad_experts) + len(result.recheck.bad_tensors)
    assert bad == 1, what
    assert bool(result.recheck.bad_experts) == what.startswith("expert")
    assert any("1 of" in note and "made again" in note for note in listener.notes)
    assert result.read_bytes > 0


@pytest.mark.parametrize(("number", "offset"), [(0, 0), (0, 4095), (1, 8), (2, 30)])
def test_a_damaged_header_is_made_again(stopped: Case, number: int, offset: int) -> None:
    flip(data_file(stopped, number), offset)
    result, _ = stopped.finishes_equal()
    assert result.read_bytes == 0, "no tensor was damaged"


DAMAGES = ("deleted", "empty", "half", "one byte short", "one byte long", "zeros", "random")


@pytest.mark.parametrize(
    ("number", "damage"), [((index + more) % 4, damage) for index, damage in enumerate(DAMAGES) for more in (0, 1)]
)
def test_a_damaged_data_file_is_made_again(stopped: Case, number: int, damage: str) -> None:
    path = data_file(stopped, number)
    size = path.stat().st_size
    if damage == "deleted":
        path.unlink()
    elif damage == "zeros":
        path.write_bytes(bytes(size))
    elif damage == "random":
        path.write_bytes(np.random.default_rng(0).bytes(size))
    else:
        os.truncate(
            path, {"empty": 0, "half": size // 2, "one byte short": size - 1, "one byte long": size + 1}[damage]
        )
    stopped.finishes_equal()


def test_all_data_files_may_be_gone(stopped: Case) -> None:
    for number in range(len(stopped.plan().files)):
        data_file(stopped, number).unlink()
    result, _ = stopped.finishes_equal()
    assert result.recheck is not None
    assert result.recheck.good_units == 0


def test_a_second_interruption_while_repairing_loses_nothing(stopped: Case) -> None:
    for number, offset, _ in list(places(stopped)):
        flip(data_file(stopped, number), offset)
    with pytest.raises(KeyboardInterrupt):
        repack(stopped.request, Listener(stop=1))
    stopped.finishes_equal()


@pytest.mark.parametrize("step", ["_write_roots", "_write_catalog", "write_small"])
def test_publishing_can_stop_anywhere(case: Case, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    original = getattr(publish, step)

    def stop(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(publish, step, stop)
        with pytest.raises(KeyboardInterrupt):
            repack(case.request, Watcher())
    case.finishes_equal()


def test_a_run_killed_after_the_manifest_only_drops_its_journal(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip  # noqa: E501
    stop_before(case.request, monkeypatch, "remove_journal")
    assert (case.request.home / "journal.mdb").exists()
    result, _ = case.finishes_equal()
    assert result.already_complete


# --- other parameters are refused


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": Recipe(bits=4)}, "bits was 8, is 4"),
        ({"recipe": Recipe(mla_bits=16)}, "mla_bits was 8, is 16"),
        ({"recipe": Recipe(head_bits=32)}, "head_bits was 8, is 32"),
        ({"shares": (1, 1)}, "shares was [1, 2], is [1, 1]"),
        ({"drives": (), "shares": None}, "directories was"),
        ({"layers": (0, 1)}, "layers was null, is [0, 1]"),
        ({"in_place": True, "drives": (), "shares": None}, "in_place was false, is true"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_unfinished_run_goes_on_with_its_own_parameters_only(
    case: Case, changes: dict[str, Any], named: str
) -> None:
    stop_after(case, 2)
    before = case.tree()
    with pytest.raises(ResumeError, match="unfinished repack with other parameters") as caught:
        case.finish(**changes)
    assert named in caught.value.problem
    assert case.tree() == before
    case.finishes_equal()


def test_other_drives_are_refused(case: Case, tmp_path: Path) -> None:
    stop_after(case, 2)
    with pytest.raises(ResumeError, match="directories was"):
        case.finish(drives=(tmp_path / "other", case.request.home))
    assert not (tmp_path / "other" / "experts" / "layer-00001.safetensors.partial").exists()
    case.finishes_equal()


def test_measured_shares_are_kept_by_the_next_run(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "drive_rate", lambda directory: 3e9 if directory.name == "drive" else 1e9)
    request = dataclasses.replace(case.request, shares=None)
    with pytest.raises(KeyboardInterrupt):
        repack(request, Listener(stop=2))
    monkeypatch.setattr(run, "drive_rate", lambda directory: pytest.fail("measured again"))
    result = repack(request, Watcher())
    assert result.manifest.shares == (25, 75)
    assert [root.probe_mb_per_s for root in result.manifest.roots] == [1000, 3000]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"recipe": Recipe(bits=4)}, "bits: 8 there, 4 asked for"),
        ({"shares": (1, 1)}, "shares: [1, 2] there, [1, 1] asked for"),
        ({"drives": (), "shares": None}, "directories: 2 there, 1 asked for"),
        ({"layers": (0, 1)}, "layers: ((0, 2),) there, ((0, 1),) asked for"),
        ({"in_place": True, "drives": (), "shares": None}, "in_place: False there, True asked for"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_finished_container_with_other_parameters_is_refused(
    done: Case, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ResumeError, match="finished container with other parameters") as caught:
        done.finish(**changes)
    assert named in caught.value.problem
    assert done.tree() == done.wanted


def test_layers_of_a_single_shard_are_told_apart(tmp_path: Path) -> None:
    """All layers in one shard: the list of shards says nothing about the layers."""
    snapshot = write_snapshot(WIDE, tmp_path / "snapshot")
    tensors = [tensor for path in sorted(snapshot.glob("*.safetensors")) for tensor in shard_tensors(path)]
    rearrange(snapshot, {"model-00001-of-000001.safetensors": tensors})
    repacked(snapshot, tmp_path / "out", "--layers", "0-1")
    assert "layers: ((0, 1),) there, ((0, 2),) asked for" in repacked(snapshot, tmp_path / "out", code=8).output
    repacked(snapshot, tmp_path / "out", "--layers", "0,1")


def test_a_finished_container_on_other_drives_is_refused(done: Case, tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"root 1: .*drive' there, .*other' asked for"):
        done.finish(drives=(tmp_path / "other", done.request.home))
    shutil.copytree(done.roots[1], tmp_path / "other")  # the drive, mounted elsewhere
    shutil.rmtree(done.roots[1])
    result, _ = done.finish(drives=(tmp_path / "other", done.request.home))
    assert result.already_complete


def test_a_finished_container_that_lacks_a_file_is_not_called_complete(done: Case) -> None:
    path = done.roots[1] / "experts" / "layer-00001.safetensors"
    os.truncate(path, 4096)
    with pytest.raises(DamageError, match="truncated"):
        done.finish()
    path.unlink()
    with pytest.raises(DamageError, match="missing"):
        done.finish()


# --- one at a time, and a journal that is no journal


@pytest.mark.parametrize("root", [0, 1])
def test_a_second_run_at_the_same_time_is_refused(case: Case, root: int) -> None:
    stop_after(case, 2)
    before = case.tree()
    fd = os.open(case.roots[root], os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(ResumeError, match="another k3-repack is working in this directory") as caught:
        case.finish()
    assert caught.value.path == str(case.roots[root])
    assert case.tree() == before
    os.close(fd)
    case.finishes_equal()


@pytest.mark.parametrize("damage", ["cut", "half", "garbage", "sqlite"])
def test_a_damaged_journal_is_an_error_and_no_crash(case: Case, damage: str) -> None:
    stop_after(case, 3)
    path = case.request.home / "journal.mdb"
    size = path.stat().st_size
    if damage in ("cut", "half"):
        os.truncate(path, {"cut": size - 4096, "half": 8192}[damage])
    else:
        path.write_bytes({"garbage": b"\xa5" * size, "sqlite": b"SQLite format 3\0".ljust(8192, b"\0")}[damage])
    with pytest.raises(DamageError, match=r"journal|truncated") as caught:
        case.finish()
    assert "Remove the unfinished container" in str(caught.value.advice)
    shutil.rmtree(case.roots[0])
    shutil.rmtree(case.roots[1])
    case.finishes_equal()


def test_an_empty_journal_is_a_run_that_never_began(case: Case) -> None:
    case.request.home.mkdir()
    (case.request.home / "journal.mdb").write_bytes(b"")
    case.finishes_equal()


def test_a_journal_keeps_what_is_put_into_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.mdb")
    assert journal.begin({"a": 1, "漢": [1, None]}) is False
    names = [ExpertKey(layer, expert) for layer in (0, 2**31) for expert in (0, 9)]
    keys = {key: (bytes([number]) * 16, bytes([number + 100]) * 16) for number, key in enumerate(names)}
    record = ShardRecord("ab" * 32, 5, 2**62)
    journal.commit(keys, {0: (b"x" * 16,), 7: (b"y" * 16, b"z" * 16)}, {"shard-漢": record})
    journal.forget([ExpertKey(0, 0), ExpertKey(5, 5)], [7, 8])
    journal.close()
    again = Journal(tmp_path / "journal.mdb")
    del keys[ExpertKey(0, 0)]
    assert (again.experts, again.tensors, again.shards) == (keys, {0: (b"x" * 16,)}, {"shard-漢": record})
    assert again.begin({"a": 1, "漢": [1, None]}) is True
    with pytest.raises(ResumeError, match='a was 1, is 2; b was null, is "x"'):
        again.begin({"a": 2, "b": "x", "漢": [1, None]})
    again.close()


def test_resuming_works_with_small_models_too(tmp_path: Path) -> None:
    snapshot = write_snapshot(SMALL, tmp_path / "s", more_directories=[tmp_path / "t"])
    request = RepackRequest(sources=(snapshot, tmp_path / "t"), home=tmp_path / "out", in_place=True)
    with pytest.raises(KeyboardInterrupt):
        repack(request, Listener(stop=3))
    result = repack(request, Watcher())
    assert result.recheck is not None
    repacked(snapshot, tmp_path / "out", "--source-dirs", tmp_path / "t", "--in-place", "--verify-full")
