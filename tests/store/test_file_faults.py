"""Holds up: what drives do wrong is read again or refused by name, and costs no slot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from k3.base.errors import DamageError, DriveError, ExpertError
from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.store.lending.file_source import FileSource
from tests.support.containers import Built, build_container, flip
from tests.support.faults import Fault, FaultySource
from tests.support.file_takes import EXPERTS, right, take
from tests.support.model_views import Undigested
from tests.support.plane_faults import PlaneFaults, noisy
from tests.support.waiting import wait_until


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [3, 2, 1])


def test_one_io_error_is_read_again(built: Built, model: Container) -> None:
    path, extent = built.piece(1, 2, index=1)
    source = FileSource(model)
    PlaneFaults(source, Fault("eio", path, extent.offset))
    assert take(source, 1, range(EXPERTS)) == right(built, 1, range(EXPERTS))
    assert source.stats().retries == 1
    source.close()


def test_two_io_errors_name_the_place(built: Built, model: Container) -> None:
    path, extent = built.piece(1, 2, index=1)
    source = FileSource(model)
    PlaneFaults(source, Fault("eio", path, extent.offset, times=2))
    with pytest.raises(DriveError, match="Input/output error") as raised:
        take(source, 1, range(EXPERTS))
    error = raised.value
    assert (error.path, error.offset, error.layer, error.expert) == (str(path), extent.offset, 1, 2)
    assert take(source, 1, range(EXPERTS)) == right(built, 1, range(EXPERTS))  # the drive is well again
    source.close()


def test_one_flipped_bit_is_read_again(built: Built, model: Container) -> None:
    path, extent = built.piece(2, 4)
    source = FileSource(model)
    faults = PlaneFaults(source, Fault("flip", path, extent.offset + 17))
    assert take(source, 2, range(EXPERTS)) == right(built, 2, range(EXPERTS))
    assert (source.stats().retries, faults.struck) == (1, 1)
    source.close()


@pytest.mark.parametrize("in_padding", [False, True])
def test_a_bit_that_stays_flipped_is_refused(built: Built, model: Container, in_padding: bool) -> None:
    path, extent = built.piece(2, 4, index=2)
    flip(path, extent.offset + (extent.payload_bytes + 3 if in_padding else 5))
    source = FileSource(model)
    with pytest.raises(DamageError, match="instead of") as raised:
        take(source, 2, range(EXPERTS))
    error = raised.value
    assert (error.path, error.offset, error.layer, error.expert) == (str(path), extent.offset, 2, 4)
    assert take(source, 2, range(4)) == right(built, 2, range(4))  # the others are still served
    source.close()


def test_a_refused_expert_is_not_kept(built: Built, model: Container) -> None:
    path, extent = built.piece(2, 4)
    flip(path, extent.offset + 5)
    source = FileSource(model, cache_bytes=10**7)
    for _ in range(3):
        with pytest.raises(DamageError):
            take(source, 2, [4])
    assert source.stats().hits == 0
    flip(path, extent.offset + 5)  # repaired
    assert take(source, 2, [4]) == right(built, 2, [4])
    source.close()


def test_failures_cost_no_slot(built: Built, model: Container) -> None:
    path, extent = built.piece(2, 4)
    flip(path, extent.offset + 5)
    source = FileSource(model, working_slots=2, patience_s=1)
    for _ in range(5):
        with pytest.raises(DamageError):
            take(source, 2, [4, 0])
    held = list(source.lease(1, [0, 1]))
    for lease in held:
        lease.release()
    source.close()


def test_every_waiting_thread_gets_its_own_error(built: Built, model: Container) -> None:
    path, extent = built.piece(1, 0)
    flip(path, extent.offset)
    source = FileSource(model)
    faults = PlaneFaults(source, Fault("stall", path, extent.offset))
    streams = [source.lease(1, [0]) for _ in range(3)]
    faults.resume()
    errors = []
    for stream in streams:
        with pytest.raises(DamageError) as raised:
            next(stream)
        errors.append(raised.value)
    assert len({id(error) for error in errors}) == 3
    source.close()


@pytest.mark.parametrize("verify", ["always", "first", "never"])
def test_damage_after_the_first_read(built: Built, model: Container, verify: Any) -> None:
    """Noticed in any case: nobody has said anything about the bytes of a file that changed."""
    source = FileSource(model, layers=[1], working_slots=1, verify=verify)
    assert take(source, 1, [3]) == right(built, 1, [3])
    path, extent = built.piece(1, 3)
    flip(path, extent.offset)
    take(source, 1, [0])  # takes the only slot
    with pytest.raises(DamageError):
        take(source, 1, [3])
    source.close()


@pytest.mark.parametrize(("verify", "noticed"), [("always", True), ("first", True), ("never", False)])
def test_damage_before_the_first_read(built: Built, model: Container, verify: Any, noticed: bool) -> None:
    path, extent = built.piece(1, 3)
    flip(path, extent.offset)
    source = FileSource(model, verify=verify)
    if noticed:
        with pytest.raises(DamageError):
            take(source, 1, [3])
        assert source.stats().checked_bytes > 0  # the sound pieces
    else:
        take(source, 1, [3])
        assert (source.stats().checked_bytes, source.stats().unchecked_bytes) == (0, 24576)
    source.close()


def test_a_stalled_drive_holds_up_only_its_own_experts(built: Built, model: Container) -> None:
    path, extent = built.piece(1, 0, index=2)
    source = FileSource(model, threads=2)
    faults = PlaneFaults(source, Fault("stall", path, extent.offset))
    stream = source.lease(1, range(EXPERTS))
    early = [next(stream) for _ in range(EXPERTS - 1)]
    assert sorted(lease.expert for lease in early) == [1, 2, 3, 4]
    faults.resume()
    late = next(stream)
    assert late.expert == 0
    for lease in [*early, late]:
        assert lease.payload.tobytes() == built.payloads[ExpertKey(1, lease.expert)]
        lease.release()
    source.close()


def test_the_pieces_of_one_expert_are_read_at_the_same_time(built: Built, model: Container) -> None:
    """Three pieces stand still until all have begun; read one after the other they never would."""
    source = FileSource(model, threads=3)
    faults = PlaneFaults(source, Fault("stall", times=100))
    stream = source.lease(1, [2])
    wait_until(lambda: faults.struck == 3)
    faults.resume()
    with next(stream) as lease:
        assert lease.payload.tobytes() == built.payloads[ExpertKey(1, 2)]
    source.close()


@pytest.mark.parametrize("cut", [1, 4096, 20_000])
@pytest.mark.parametrize("already_open", [False, True])
def test_a_truncated_file_is_an_error_not_zeros(
    built: Built, model: Container, cut: int, already_open: bool
) -> None:
    source = FileSource(model, working_slots=1, verify="never")
    path, _ = built.piece(1, EXPERTS - 1, index=0)
    if already_open:
        take(source, 1, [0])
    size = path.stat().st_size
    os.truncate(path, size - cut)
    with pytest.raises(DriveError, match=r"ends at|ended") as raised:
        take(source, 1, [EXPERTS - 1])
    assert (raised.value.path, raised.value.layer, raised.value.expert) == (str(path), 1, EXPERTS - 1)
    source.close()


def test_a_missing_file_is_an_error_with_its_name(built: Built, model: Container) -> None:
    path, _ = built.piece(1, 0)
    path.unlink()
    source = FileSource(model)
    with pytest.raises(DriveError, match="No such file") as raised:
        take(source, 1, [0])
    assert (raised.value.path, raised.value.layer, raised.value.expert) == (str(path), 1, 0)
    source.close()


def test_a_file_replaced_by_a_sound_one_is_read_anew(built: Built, model: Container) -> None:
    path, extent = built.piece(1, 0)
    sound = path.read_bytes()
    flip(path, extent.offset)
    source = FileSource(model)
    with pytest.raises(DamageError):
        take(source, 1, [0])
    repaired = path.with_suffix(".new")
    repaired.write_bytes(sound)
    repaired.rename(path)
    assert take(source, 1, [0]) == right(built, 1, [0])
    source.close()


def test_noise_on_every_read_changes_nothing(built: Built, model: Container) -> None:
    for seed in range(5):
        source = noisy(FileSource(model, working_slots=3), 0.6, seed)
        for layer in (1, 2):
            assert take(source, layer, range(EXPERTS)) == right(built, layer, range(EXPERTS)), f"seed {seed}"
        assert source.stats().retries == 0
        source.close()


def test_extents_that_do_not_make_up_the_payload_are_refused(model: Container) -> None:
    class Short(Undigested):
        def expert_extents(self, layer: int, expert: int) -> Any:
            return super().expert_extents(layer, expert)[:-1]

    source = FileSource(Short(model))
    with pytest.raises(ExpertError, match="the layer's experts have 24480"):
        take(source, 1, [0, 1])
    source.close()


def test_a_shuffling_wrapper_shuffles_and_fails_where_told(model: Container) -> None:
    wanted = DriveError("told to", layer=1, expert=3)
    source = FaultySource(FileSource(model), seed=5, failures={ExpertKey(1, 3): wanted})
    with pytest.raises(DriveError, match="told to"):
        take(source, 1, range(EXPERTS))
    orders = {tuple(take(source, 2, range(EXPERTS))) for _ in range(10)}
    assert len(orders) > 1
    source.close()
