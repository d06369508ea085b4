"""Holds up: every wrong byte is found by reading back and named, and a bad drive is told from bad bytes."""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.direct_io import ReadFile
from k3.verify import digest_check as bytes_module
from k3.verify.digest_check import BytesCheck, check_bytes, runs
from k3.verify.finding import Finding, Kind
from k3.verify.structure import check_structure
from k3.verify.target import Target
from tests.support.containers import Built, build_container, flip
from tests.support.faults import DriveFaults, Fault


@pytest.fixture(params=["three roots", "in place"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Built:
    if request.param == "in place":
        return build_container(tmp_path / "home", in_place=tmp_path / "snapshot")
    return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [3, 2, 1])


def check(built: Built, **options: Any) -> BytesCheck:
    structure = check_structure(built.home)
    return check_bytes(structure, structure.targets, **options)


def only(result: BytesCheck) -> Finding:
    assert len(result.findings) == 1, "\n".join(map(str, result.findings))
    return result.findings[0]


def test_a_sound_container_is_read_whole(built: Built) -> None:
    done = 0

    def on_bytes(nbytes: int) -> None:
        nonlocal done
        done += nbytes

    result = check(built, on_bytes=on_bytes)
    stored = [extent.stored_bytes for extents in built.pieces.values() for extent in extents]
    stored += [e.stored_bytes for tensor in built.tensors for e in (tensor.weights, tensor.scales) if e]
    assert (result.findings, result.skipped) == ([], 0)
    assert result.ledger.complete
    assert (result.ledger.proven_units, result.ledger.proven_bytes, done) == (
        len(stored),
        sum(stored),
        sum(stored),
    )
    assert result.through_page_cache == set()
    assert result.elapsed_s > 0


@pytest.mark.parametrize("expert", [0, 2, 4])
@pytest.mark.parametrize("index", [0, 1])
def test_a_flip_in_an_expert(built: Built, expert: int, index: int) -> None:
    path, extent = built.piece(2, expert, index)
    for at in (0, extent.payload_bytes - 1, extent.stored_bytes - 1):
        flip(path, extent.offset + at)
        finding = only(check(built))
        assert (finding.kind, finding.path) == (Kind.DAMAGED, str(path))
        assert (finding.offset, finding.nbytes) == (extent.offset, extent.stored_bytes)
        assert (finding.layer, finding.expert) == (2, expert)
        flip(path, extent.offset + at)


def test_a_flip_in_padding(tmp_path: Path) -> None:
    built = build_container(tmp_path / "home")
    path, extent = built.piece(1, 1)
    assert extent.payload_bytes < extent.stored_bytes
    flip(path, extent.offset + extent.payload_bytes)
    finding = only(check(built))
    assert (finding.kind, finding.layer, finding.expert) == (Kind.DAMAGED, 1, 1)


@pytest.mark.parametrize("position", range(5))
def test_a_flip_in_a_dense_tensor_or_its_scales(built: Built, position: int) -> None:
    tensor = built.tensors[position]
    for extent, name in ((tensor.weights, tensor.name), (tensor.scales, f"{tensor.name}.qs")):
        if extent is not None:
            flip(built.path(0), extent.offset + 2)
            finding = only(check(built))
            assert (finding.kind, finding.tensor) == (Kind.DAMAGED, name)
            assert (finding.path, finding.offset) == (str(built.path(0)), extent.offset)
            flip(built.path(0), extent.offset + 2)


def test_findings_come_in_file_order_however_many(built: Built) -> None:
    for layer, expert in ((2, 3), (1, 4), (1, 0)):
        path, extent = built.piece(layer, expert)
        flip(path, extent.offset + 7)
    flip(built.path(0), built.tensors[3].weights.offset)
    result = check(built)
    places = [(finding.path, finding.offset) for finding in result.findings]
    assert len(places) == 4
    order = {str(built.path(number)): number for number in range(len(built.manifest.files))}
    assert places == sorted(places, key=lambda place: (order[str(place[0])], place[1]))


def test_only_what_was_chosen_is_read(built: Built) -> None:
    path, extent = built.piece(1, 0)
    flip(path, extent.offset)
    structure = check_structure(built.home)
    others = [target for target in structure.targets if (target.layer, target.expert) != (1, 0)]
    assert check_bytes(structure, others).findings == []
    assert len(check_bytes(structure, structure.targets).findings) == 1


def test_large_extents_are_read_in_chunks(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytes_module, "READ_BYTES", 8192)
    assert check(built).findings == []
    path, extent = built.piece(1, 2)
    flip(path, extent.offset + extent.stored_bytes - 1)
    assert only(check(built)).expert == 2


def test_a_bad_first_read_is_told_apart(built: Built) -> None:
    path, extent = built.piece(1, 2)
    faults = DriveFaults([Fault("flip", path, extent.offset + 5, times=2)])  # with its neighbours, then alone
    finding = only(check(built, opener=faults.open))
    assert (finding.kind, finding.expert, finding.offset) == (Kind.UNSTABLE, 2, extent.offset)


def test_a_bad_read_together_with_neighbours_is_told(built: Built) -> None:
    """One read in which a byte was wrong, though alone the extent is right at once."""
    path, extent = built.piece(1, 2)
    for kind in ("flip", "eio"):
        result = check(built, opener=DriveFaults([Fault(kind, path, extent.offset + 4500)]).open)
        assert only(result).kind is Kind.UNSTABLE
        assert only(result).path == str(path)
        assert result.ledger.complete


def test_a_drive_that_refuses_a_place(built: Built) -> None:
    path, extent = built.piece(1, 2)
    inside = extent.offset + 4500  # in a page that is this extent's alone
    faults = DriveFaults([Fault("eio", path, inside, times=100)])
    finding = only(check(built, opener=faults.open))
    assert (finding.kind, finding.layer, finding.expert) == (Kind.UNREADABLE, 1, 2)
    assert (finding.path, finding.nbytes) == (str(path), extent.stored_bytes)


def test_a_drive_that_refuses_once(built: Built) -> None:
    path, extent = built.piece(1, 2)
    faults = DriveFaults([Fault("eio", path, extent.offset + 4500, times=2)])
    assert only(check(built, opener=faults.open)).kind is Kind.UNSTABLE


def test_short_and_interrupted_reads_are_no_findings(built: Built) -> None:
    for seed in range(3):
        assert check(built, opener=DriveFaults(noise=0.5, seed=seed).open).findings == [], f"seed {seed}"


def test_what_a_truncated_file_lost(built: Built) -> None:
    path, extent = built.piece(1, 4)
    os.truncate(path, extent.offset + 100)
    result = check(built)
    lost = {(finding.kind, finding.layer, finding.expert) for finding in result.findings}
    assert (Kind.MISSING, 1, 4) in lost
    assert {kind for kind, _, _ in lost} == {Kind.MISSING}


def test_what_is_not_there_is_counted(built: Built) -> None:
    path, _ = built.piece(1, 0)
    path.unlink()
    gone = [extent for extents in built.pieces.values() for extent in extents if built.path(extent.file) == path]
    result = check(built)
    assert (result.findings, result.skipped) == ([], len(gone))


def test_reads_through_the_page_cache_are_told(built: Built) -> None:
    expected = {str(built.path(number).parent) for number in range(len(built.manifest.files))}
    assert check(built, direct=False).through_page_cache == expected


def test_all_roots_are_read_at_the_same_time(tmp_path: Path) -> None:
    """The first read of each root waits for the others; one after the other they would never come."""
    built = build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [3, 2, 1])
    together = threading.Barrier(3, timeout=30)
    seen: set[Path] = set()
    lock = threading.Lock()

    def opener(path: Path, direct: bool) -> ReadFile:
        root = next(directory for directory in built.directories if directory in path.parents)
        with lock:
            first = root not in seen
            seen.add(root)
        if first:
            together.wait()
        return ReadFile(path, direct=direct)

    assert check(built, opener=opener).findings == []


def test_ctrl_c_ends_it(built: Built) -> None:
    def on_bytes(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(built, on_bytes=on_bytes)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 9)), max_size=40), st.integers(1, 30)
)
def test_runs_hold_every_target_once_and_only_neighbours(steps: list[tuple[int, int, int]], limit: int) -> None:
    targets: list[Target] = []
    for file_step, gap, size in steps:
        file, offset = (targets[-1].file, targets[-1].end) if targets else (0, 0)
        same = file_step < 2
        targets.append(Target(file if same else file + 1, offset + gap if same else 0, size, b""))
    before, bytes_module.READ_BYTES = bytes_module.READ_BYTES, limit
    try:
        cut = list(runs(targets))
    finally:
        bytes_module.READ_BYTES = before
    assert [target for run in cut for target in run] == targets
    for run in cut:
        assert len(run) == 1 or run[-1].end - run[0].offset <= limit
        assert all(a.file == b.file and a.end == b.offset for a, b in pairwise(run))
