"""Holds up the plan: every source byte has at most one destination, every written byte exactly one origin."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3.base.pages import PAGE_BYTES
from k3.checkpoint.safetensors_header import parse_header
from k3.checkpoint.snapshot import Snapshot
from k3.model.keys import Encoding, ExpertKey
from k3.model.tensor_recipe import Recipe
from k3.repack.jobs import choose_jobs
from k3.repack.plan import ExpertRoute, Plan, PlannedExtent, PlannedTensor
from k3.repack.scratch_file import Scratch, scratch_bytes
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot, write_sparse_snapshot
from tests.support.repacked import SMALL, WIDE, repacked

_bits = st.sampled_from([4, 8, 16, 32])
_models = st.builds(
    lambda layers, experts, per_token, **rest: dataclasses.replace(
        SMALL, layers=layers, experts=experts, experts_per_token=min(per_token, experts), **rest
    ),
    layers=st.integers(1, 5),
    experts=st.integers(1, 13),
    per_token=st.integers(1, 4),
    hidden=st.integers(1, 90),
    latent=st.sampled_from([32, 64, 160]),
    moe_inter=st.sampled_from([32, 96, 192]),
    dense_layers=st.integers(0, 3),
    expert_order=st.sampled_from(["lexicographic", "id", "shuffled", "scattered"]),
    shards_per_layer=st.integers(1, 3),
    shard_names=st.sampled_from(["published", "odd"]),
    flat_config=st.booleans(),
    vision=st.booleans(),
    prefix=st.sampled_from(["language_model.", ""]),
)
_shares = st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any)
_slow = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def opened(tmp_path_factory: pytest.TempPathFactory, model: SyntheticModel, data: st.DataObject) -> Snapshot:
    """Return a snapshot of this model, without any bytes in its tensors, and some of its layers."""
    source = write_sparse_snapshot(model, tmp_path_factory.mktemp("plan") / "snapshot")
    layers = data.draw(st.none() | st.sets(st.integers(0, model.layers - 1), min_size=1))
    return Snapshot.open([source], layers=None if layers is None else sorted(layers))


@given(model=_models, bits=_bits, mla=_bits, head=_bits, shares=_shares, in_place=st.booleans(), data=st.data())
@_slow
def test_a_plan_places_every_byte_once(
    tmp_path_factory: pytest.TempPathFactory, model: SyntheticModel, bits: int, mla: int, head: int,
    shares: list[int], in_place: bool, data: st.DataObject,
) -> None:  # fmt: skip
    snapshot = opened(tmp_path_factory, model, data)
    plan = Plan(snapshot, Recipe(bits, mla, head), shares, in_place=in_place)
    check_routes(plan)
    check_destinations(plan)
    if in_place:
        check_in_place(plan)


def check_routes(plan: Plan) -> None:
    """From the source's side."""
    arrived: dict[ExpertKey, list[tuple[int, int]]] = {}
    tensors: list[PlannedTensor] = []
    for number, shard in enumerate(plan.snapshot.shards):
        position = shard.header_bytes
        for route in plan.routes(number):
            assert route.offset >= position, "no byte has two destinations"
            position = route.offset + route.nbytes
            if isinstance(route.to, ExpertRoute):
                arrived.setdefault(route.to.key, []).append((route.to.payload_offset, route.nbytes))
            elif route.to is not None:
                assert (route.to.source.shard, route.to.source.offset) == (number, route.offset)
                tensors.append(route.to)
        assert position <= shard.size_bytes
        keys, positions = plan.shard_units(number)
        assert keys == {r.to.key for r in plan.routes(number) if isinstance(r.to, ExpertRoute)}
        assert positions == {r.to.position for r in plan.routes(number) if isinstance(r.to, PlannedTensor)}
    assert sorted(tensor.position for tensor in tensors) == list(range(len(plan.tensors)))
    assert sorted(arrived) == list(plan.experts())
    for key, parts in arrived.items():
        end = 0
        for offset, nbytes in sorted(parts):
            assert offset == end
            end += nbytes
        assert end == plan.layers[key.layer].layout.payload_bytes
    assert plan.read_bytes == sum(shard.size_bytes for shard in plan.snapshot.shards)


def extents_of(plan: Plan) -> Iterator[PlannedExtent]:
    for tensor in plan.tensors:
        yield tensor.weights
        if tensor.scales is not None:
            yield tensor.scales
    for key in plan.experts():
        yield from plan.expert_extents(key)


def check_destinations(plan: Plan) -> None:
    """From the container's side: header, then extents, then nothing."""
    by_file: dict[int, list[PlannedExtent]] = {number: [] for number in range(len(plan.files))}
    for extent in extents_of(plan):
        by_file[extent.file].append(extent)
    totals = dict.fromkeys(plan.write_bytes(), 0)
    for number, file in enumerate(plan.files):
        if file.kind == "source":
            continue
        header = plan.header(number)
        assert len(header) == file.header_bytes
        assert len(header) % PAGE_BYTES == 0
        parsed = parse_header(header, file.size_bytes, Path(file.path))
        assert parsed.header_bytes == file.header_bytes
        position = file.header_bytes
        for extent in sorted(by_file[number], key=lambda extent: (extent.offset, extent.stored_bytes)):
            assert extent.offset == position
            assert extent.payload_bytes <= extent.stored_bytes < extent.payload_bytes + PAGE_BYTES
            assert extent.stored_bytes % PAGE_BYTES == 0
            position += extent.stored_bytes
        assert position == file.size_bytes
        totals[file.root] += file.size_bytes
    assert totals == plan.write_bytes()
    names = [(file.root, file.path) for file in plan.files]
    assert len(set(names)) == len(names)
    assert names[0] == (0, "dense.safetensors")


def check_in_place(plan: Plan) -> None:
    """Assert that the extents of experts are their bytes in the source."""
    assert all(root.share == 0 for root in plan.roots)
    assert [file.kind for file in plan.files] == ["dense", *["source"] * len(plan.snapshot.shards)]
    for key in plan.experts():
        extents = plan.source_extents(key)
        for extent, planned in zip(extents, plan.expert_extents(key), strict=True):
            file = plan.files[planned.file]
            assert extent.path.name == file.path
            assert (planned.offset, planned.payload_bytes, planned.stored_bytes) == (
                extent.offset,
                *[extent.payload_bytes] * 2,
            )
            assert planned.offset + planned.stored_bytes <= file.size_bytes


@given(model=_models, data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_scratch_file_is_never_larger_than_planned(
    tmp_path_factory: pytest.TempPathFactory, model: SyntheticModel, data: st.DataObject
) -> None:
    """And a layout like the published one needs none."""
    place = tmp_path_factory.mktemp("scratch")
    source = write_snapshot(model, place / "snapshot")
    plan = Plan(Snapshot.open([source]), Recipe(), (1,))
    wanted = data.draw(st.integers(1, 4))
    jobs = choose_jobs(wanted, shards=len(plan.snapshot.shards), cpus=2, side_by_side=2, spinning=False)
    used: list[int] = []
    original = Scratch.close

    def close(self: Scratch) -> None:
        used.append(self._slots * self._slot_bytes)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scratch, "close", close)
        patch.setattr("k3.repack.jobs.BLOCK_BYTES", 16384)
        planned = scratch_bytes(plan, jobs)
        repacked(source, place / "out", "--jobs", wanted)
    assert used == [planned]
    if model.expert_order != "scattered" and model.shards_per_layer == 1:
        assert planned == 0


def test_the_scratch_file_has_no_name(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "scratch.partial", 5000)
    scratch.open_expert(ExpertKey(0, 0))
    assert not list(tmp_path.iterdir())
    scratch.close()
    scratch.close()


@pytest.mark.parametrize("order", ["lexicographic", "scattered"])
def test_a_plan_is_the_same_every_time(tmp_path: Path, order: Any) -> None:
    source = write_sparse_snapshot(dataclasses.replace(WIDE, expert_order=order), tmp_path / "snapshot")
    first, second = (Plan(Snapshot.open([source]), Recipe(4, 8, 16), (2, 1)) for _ in range(2))
    assert first.files == second.files
    assert first.tensors == second.tensors
    assert list(extents_of(first)) == list(extents_of(second))
    encodings = {tensor.encoding for tensor in first.tensors}
    assert encodings == {Encoding.RAW, Encoding.INT4, Encoding.INT8}
