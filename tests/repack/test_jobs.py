"""Holds up: several shards at once give the bytes, digests and errors that one after the other gives."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import threading
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3.base.errors import DriveError
from k3.checkpoint.shard import Shard
from k3.repack import jobs as jobs_module
from k3.repack.jobs import CHOSEN_MAX, ONE, Jobs, choose_jobs, read_order
from k3.repack.shard_hash import HashPool
from k3.repack.shard_stream import ShardBegun, ShardBlock, ShardStreamer
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.repacked import SMALL, WIDE, repacked, tree

SIZES = st.lists(st.integers(0, 40_000), min_size=1, max_size=7)


def open_files() -> set[str]:
    """Return what this process's descriptors lead to, but for the listing itself."""
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "BLOCK_BYTES", 16384)


# --- the plan


@given(SIZES, st.integers(1, 9))
def test_every_byte_is_read_once_and_each_shard_in_order(sizes: list[int], at_once: int) -> None:
    jobs = Jobs(at_once, 1)
    ends = dict.fromkeys(range(len(sizes)), 0)
    begun: list[int] = []
    ended: set[int] = set()
    for read in read_order(list(enumerate(sizes)), jobs):
        assert read.offset == ends[read.number]
        assert read.number not in ended
        assert 0 < read.nbytes <= jobs.block_bytes or sizes[read.number] == 0
        if read.offset == 0:
            begun.append(read.number)
        ends[read.number] += read.nbytes
        assert read.last == (ends[read.number] == sizes[read.number])
        if read.last:
            ended.add(read.number)
        assert len(set(begun) - ended) <= at_once
    assert begun == sorted(ended) == list(range(len(sizes)))
    assert list(ends.values()) == sizes


@given(
    st.none() | st.integers(1, 64), st.integers(1, 200), st.integers(1, 256), st.sampled_from([1, 2, 8, 16]),
    st.booleans(),
)  # fmt: skip
def test_as_many_as_processors_hash_and_never_more_than_shards(
    wanted: int | None, shards: int, cpus: int, side_by_side: int, spinning: bool
) -> None:
    chosen = choose_jobs(wanted, shards=shards, cpus=cpus, side_by_side=side_by_side, spinning=spinning)
    assert chosen.shards == min(shards, wanted or (1 if spinning else min(cpus * side_by_side, CHOSEN_MAX)))
    assert 1 <= chosen.hash_threads <= min(cpus, chosen.shards)
    assert chosen.readers == 1 or not spinning
    # Routing goes on while every shard has a tensor that is being made, and reading while every chain is hashed.
    assert chosen.output_buffers > 2 * chosen.shards
    assert chosen.blocks > 2 * chosen.shards


def test_one_shard_at_a_time_takes_the_memory_that_it_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert (ONE.block_bytes, ONE.blocks, ONE.readers, ONE.resident_experts) == (8 << 20, 6, 3, 4)


# --- the stream


@given(SIZES, st.integers(1, 6), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_blocks_and_digests_are_the_files(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], at_once: int, seed: int
) -> None:
    place = tmp_path_factory.mktemp("stream")
    draw = random.Random(seed)
    contents = [draw.randbytes(size) for size in sizes]
    shards = []
    for number, content in enumerate(contents):
        path = place / str(number)
        path.write_bytes(content)
        shards.append((number, Shard(path.name, path, len(content), 0, None)))
    passed: dict[int, bytes] = {}
    ended: dict[int, str] = {}
    opened: list[str] = []
    with ShardStreamer(Jobs(at_once, min(at_once, 3))) as streamer:
        for event in streamer.stream(shards, lambda shard: opened.append(shard.name)):
            if isinstance(event, ShardBegun):
                assert event.number not in passed
                passed[event.number] = b""
            elif isinstance(event, ShardBlock):
                assert event.offset == len(passed[event.number])
                passed[event.number] += event.data.tobytes()
            else:
                ended[event.number] = event.sha256
    assert passed == dict(enumerate(contents))
    assert ended == {number: hashlib.sha256(content).hexdigest() for number, content in enumerate(contents)}
    assert opened == [shard.name for _, shard in shards]


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_read_that_fails_names_its_shard_and_closes_all_files(tmp_path: Path, at_once: int) -> None:
    shards = []
    for number in range(4):
        path = tmp_path / f"shard-{number}"
        path.write_bytes(bytes(60_000))
        shards.append((number, Shard(path.name, path, 60_000 + 10 * (number == 2), 0, None)))
    before = open_files()
    with (
        ShardStreamer(Jobs(at_once, at_once)) as streamer,
        pytest.raises(DriveError, match="ends at 60000") as raised,
    ):
        for _ in streamer.stream(shards):
            pass
    assert raised.value.path == str(tmp_path / "shard-2")
    assert open_files() <= before


def test_a_stream_that_is_left_early_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(200_000))
    before, threads = open_files(), threading.active_count()
    with ShardStreamer(Jobs(1, 1)) as streamer:
        events = streamer.stream([(0, Shard("shard", path, 200_000, 0, None))])
        while not isinstance(next(events), ShardBlock):
            pass
        events.close()
        assert open_files() <= before
    assert threading.active_count() <= threads


@given(
    st.lists(st.tuples(st.integers(0, 4), st.binary(max_size=300)), max_size=40),
    st.sampled_from([ONE, Jobs(2, 2), Jobs(9, 3)]),
)
@settings(max_examples=30, deadline=None)
def test_chains_are_hashed_in_their_own_order(fed: list[tuple[int, bytes]], jobs: Jobs) -> None:
    pool = HashPool(jobs)
    chains = [pool.begin() for _ in range(5)]
    wanted = [hashlib.sha256() for _ in range(5)]
    futures = []
    for chain, data in fed:
        futures.append(pool.feed(chains[chain], np.frombuffer(data, np.uint8)))
        wanted[chain].update(data)
    for future in futures:
        future.result(60)
    pool.close()
    assert [chain.hexdigest() for chain in chains] == [sha256.hexdigest() for sha256 in wanted]


def test_a_pool_that_is_closed_leaves_nobody_waiting() -> None:
    """Blocks behind one that is being hashed are cancelled, or were hashed; none is left without an answer."""
    pool = HashPool(ONE)
    chain = pool.begin()
    futures = [pool.feed(chain, np.zeros(1 << 22, np.uint8)) for _ in range(8)]
    pool.close()
    assert all(future.done() for future in futures)


# --- the container


@pytest.mark.parametrize("at_once", [2, 3, 7])
@pytest.mark.parametrize("model", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("order", ["lexicographic", "scattered"])
def test_any_number_of_jobs_gives_the_same_container(
    tmp_path: Path, at_once: int, model: SyntheticModel, order: Literal["lexicographic", "scattered"]
) -> None:
    model = dataclasses.replace(model, expert_order=order, shards_per_layer=2)
    source = write_snapshot(model, tmp_path / "snapshot")
    repacked(source, tmp_path / "one", "--jobs", 1)
    repacked(source, tmp_path / "many", "--jobs", at_once, "--verify-full")
    assert tree(tmp_path / "many") == tree(tmp_path / "one")
