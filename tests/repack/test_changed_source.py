"""Holds up that a container is of one source: a shard that was replaced between two runs is found and refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from k3.base.errors import ResumeError, ShardError
from k3.repack.journal import Journal
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import WIDE, rearrange, shard_tensors, tree
from tests.support.resumed import Case, Listener, data_file, stop_after


@pytest.fixture(autouse=True)
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3.repack.write.COMMIT_BYTES", 1)


def test_a_finished_container_of_another_source_is_refused(done: Case, tmp_path: Path) -> None:
    other = write_snapshot(dataclasses.replace(WIDE, seed=1), tmp_path / "other")
    with pytest.raises(ResumeError, match="of another source") as caught:
        done.finish(sources=(other,))
    assert "layer 1 expert" in caught.value.problem
    names = {}
    for path in sorted(other.glob("*.safetensors")):  # now only the dense tensors differ
        ours = {tensor.name: tensor for tensor in shard_tensors(done.source / path.name)}
        names[path.name] = [ours[t.name] if ".experts." in t.name else t for t in shard_tensors(path)]
    rearrange(other, names)
    if all((other / name).stat().st_size == (done.source / name).stat().st_size for name in names):
        with pytest.raises(ResumeError, match=r"tensor .* differs"):
            done.finish(sources=(other,))
    assert done.tree() == done.wanted


def rewrite(path: Path, change: Callable[[bytearray], None], *, keep_time: bool = False) -> bytes:
    """Replace a file by changed bytes of the same size; returns the first ones."""
    before, status = path.read_bytes(), path.stat()
    data = bytearray(before)
    change(data)
    assert len(data) == len(before)
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    return before


def at(offset: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[offset] ^= 1

    return change


def shard_path(case: Case, number: int) -> Path:
    return case.plan().snapshot.shards[number].path


def unsampled(case: Case, number: int) -> int:
    """Return the offset of an expert's byte in a shard that no sample of the snapshot's identity covers."""
    shard = case.plan().snapshot.shards[number]
    return shard.header_bytes + (shard.size_bytes - shard.header_bytes) // 4


def test_a_replaced_shard_that_was_read_is_refused(case: Case) -> None:
    stop_after(case, 3)
    path = shard_path(case, 1)
    before = rewrite(path, at(unsampled(case, 1)))
    with pytest.raises((ShardError, ResumeError)) as caught:
        case.finish()
    assert "the source has changed" in str(caught.value) or "the unfinished run read" in str(caught.value)
    assert not (case.request.home / "manifest.json").exists()
    path.write_bytes(before)
    case.finishes_equal()


def test_a_replaced_shard_is_refused_even_if_no_unit_of_it_is_compared(case: Case) -> None:
    stop_after(case, 3)
    plan = case.plan()
    for number in range(len(plan.files)):
        data_file(case, number).unlink()  # nothing to compare with is left
    path = shard_path(case, 1)
    before = rewrite(path, at(unsampled(case, 1)))
    with pytest.raises(ShardError, match="the unfinished run read") as caught:
        case.finish()
    assert caught.value.path == str(path)
    with pytest.raises(ShardError, match="the unfinished run read"):
        case.finish()
    path.write_bytes(before)
    case.finishes_equal()


def test_a_replaced_shard_that_was_half_read_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3.repack.jobs.BLOCK_BYTES", 16384)

    class StopInside(Watcher):
        shard = ""
        blocks = 0

        def item(self, name: str) -> None:
            self.shard, self.blocks = name, 0

        def advance(self, nbytes: int) -> None:
            self.blocks += 1
            if self.shard.startswith("model-00002") and self.blocks == 12:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repack(case.request, StopInside())
    journal = Journal(case.request.home / "journal.mdb")
    durable = sorted(journal.experts)
    assert durable
    assert len(journal.shards) == 1
    journal.close()
    path = shard_path(case, 1)
    extent = case.plan().snapshot.expert_extents(durable[0].layer, durable[0].expert)[0]
    before = rewrite(path, at(extent.offset))
    with pytest.raises(ResumeError, match="the source has changed since the unfinished run began: layer 1 expert"):
        case.finish()
    path.write_bytes(before)
    case.finishes_equal()


@pytest.mark.parametrize("year_s", [-31_536_000, 4_070_908_800], ids=["1969", "2099"])
def test_dates_outside_of_this_time_are_dates(case: Case, year_s: int) -> None:
    for path in case.source.iterdir():
        os.utime(path, (year_s, year_s))
    stop_after(case, 2)
    _, listener = case.finishes_equal()
    assert shard_path(case, 0).name not in listener.items  # it was read, and is not taken for changed


def test_a_shard_that_was_only_touched_is_read_again_and_accepted(case: Case) -> None:
    stop_after(case, 3)
    os.utime(shard_path(case, 1))
    _, listener = case.finishes_equal()
    assert shard_path(case, 1).name in listener.items


@pytest.mark.parametrize("what", ["header", "config", "sample"])
def test_a_source_that_looks_different_is_refused_at_once(case: Case, what: str) -> None:
    stop_after(case, 2)
    path = shard_path(case, 2)
    if what == "config":
        config = case.source / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "new": 1}))
    elif what == "sample":
        rewrite(path, at(path.stat().st_size - 1), keep_time=True)
    else:
        tensors = shard_tensors(path)
        shards = {p.name: shard_tensors(p) for p in case.source.glob("*.safetensors")}
        shards[path.name] = tensors[::-1]
        rearrange(case.source, shards)
    before = case.tree()
    with pytest.raises(ResumeError, match=r"source was|digest of config\.json was"):
        case.finish()
    assert case.tree() == before


def test_a_missing_shard_is_refused_and_may_come_back(case: Case, tmp_path: Path) -> None:
    stop_after(case, 2)
    path = shard_path(case, 2)
    path.rename(tmp_path / "away")
    with pytest.raises(ShardError, match="does not exist"):
        case.finish()
    (tmp_path / "away").rename(path)
    case.finishes_equal()


# --- a damaged download in a Hugging Face cache


@pytest.fixture
def cached(tmp_path: Path) -> Case:
    source = write_snapshot(dataclasses.replace(WIDE, layout="hf_cache"), tmp_path / "hub")
    request = RepackRequest(sources=(source,), home=tmp_path / "home")
    repack(request, Watcher())
    case = Case(request, tree(*request.root_directories()))
    shutil.rmtree(tmp_path / "home")
    return case


@pytest.mark.parametrize("where", ["quarter", "end", "dense", "first"])
def test_a_blob_that_is_not_what_its_name_says_is_refused_and_may_be_repaired(cached: Case, where: str) -> None:
    shard = cached.plan().snapshot.shards[1]
    dense = next(t for t in cached.plan().tensors if t.source.shard == 1)
    offset = {
        "quarter": unsampled(cached, 1), "end": shard.size_bytes - 1, "first": shard.header_bytes,
        "dense": dense.source.offset,
    }[where]  # fmt: skip
    blob = shard.path.resolve()
    before = rewrite(blob, at(offset))
    with pytest.raises(ShardError, match="but it was published as") as caught:
        cached.finish()
    assert caught.value.path == str(shard.path)
    assert blob.name in caught.value.problem
    assert not (cached.request.home / "manifest.json").exists()
    journal = Journal(cached.request.home / "journal.mdb")
    keys, positions = cached.plan().shard_units(1)
    assert not keys & journal.experts.keys(), "units of a bad shard are forgotten"
    assert not positions & journal.tensors.keys()
    journal.close()
    with pytest.raises(ShardError, match="but it was published as"):
        cached.finish()
    blob.write_bytes(before)
    cached.finishes_equal()


def test_a_bad_blob_may_be_repaired_after_a_kill_in_its_middle(
    cached: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal holds units of the bad bytes, with digests that fit them."""
    monkeypatch.setattr("k3.repack.jobs.BLOCK_BYTES", 16384)
    blob = shard_path(cached, 1).resolve()

    class StopLate(Watcher):
        done = 0

        def item(self, name: str) -> None:
            self.done = 0

        def advance(self, nbytes: int) -> None:
            self.done += nbytes
            if self.done == blob.stat().st_size:
                raise KeyboardInterrupt

    plan = cached.plan()
    first_expert = min(plan.source_extents(key)[0].offset for key in plan.shard_units(1)[0])
    before = rewrite(blob, at(first_expert))
    first = Listener(stop=1)
    with pytest.raises(KeyboardInterrupt):
        repack(cached.request, first)
    with pytest.raises(KeyboardInterrupt):
        repack(cached.request, StopLate())
    journal = Journal(cached.request.home / "journal.mdb")
    assert cached.plan().shard_units(1)[0] & journal.experts.keys()
    journal.close()
    blob.write_bytes(before)
    cached.finishes_equal()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_experts_over_several_shards_are_read_again_as_a_whole(tmp_path: Path, blocks: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip  # noqa: E501
    """Some experts are durable, a shard that holds parts of them is done, another that does is not."""
    monkeypatch.setattr("k3.repack.jobs.BLOCK_BYTES", 8192)
    model = dataclasses.replace(WIDE, expert_order="scattered", shards_per_layer=3, experts=9)
    source = write_snapshot(model, tmp_path / "snapshot")
    request = RepackRequest(sources=(source,), home=tmp_path / "home", in_place=in_place)
    repack(request, Watcher())
    case = Case(request, tree(tmp_path / "home"))
    shutil.rmtree(tmp_path / "home")
    shards = case.plan().snapshot.shards
    last = next(n for n in reversed(range(len(shards))) if case.plan().shard_units(n)[0])

    class StopInTheLast(Watcher):
        shard = ""
        left = 0

        def item(self, name: str) -> None:
            self.shard, self.left = name, -(-shards[last].size_bytes // 8192) - blocks

        def advance(self, nbytes: int) -> None:
            self.left -= 1
            if self.shard == shards[last].name and self.left <= 0:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repack(request, StopInTheLast())
    case.finishes_equal()
