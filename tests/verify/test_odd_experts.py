"""Holds up that experts without use are noted as published ones, and their container is sound all the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from k3.repack.write import WriteDestination
from k3.verify import digest_check
from k3.verify.cli import main
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import WIDE, changed, repacked, source_tensors

EXPERTS = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}"
SCALE, LARGE, PACKED = (
    EXPERTS.format(1, 2, "w3.weight_scale"), EXPERTS.format(2, 0, "w1.weight_scale"),
    EXPERTS.format(2, 4, "w2.weight_packed"),
)  # fmt: skip
SAID = (
    "note: as published, these experts are odd: "
    "layer 1 expert 2 (w3.weight_scale has the byte 255, which stands for no number); "
    "layer 2 expert 0 (w1.weight_scale has the byte 250, a factor of 2^123); "
    "layer 2 expert 4 (w2.weight_packed is all zeros); "
)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a snapshot with three odd experts: one's last scale byte, another's first, a matrix of zeros."""
    place = tmp_path_factory.mktemp("odd")
    sound = write_snapshot(WIDE, place / "sound")
    tensors = source_tensors(sound)
    change = {
        SCALE: {"data": tensors[SCALE].data[:-1] + b"\xff"},
        LARGE: {"data": b"\xfa" + tensors[LARGE].data[1:]},
        PACKED: {"data": bytes(len(tensors[PACKED].data))},
    }
    return changed(sound, place / "snapshot", change)


def verify(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("read_bytes", [None, 8192], ids=["together", "in reads smaller than a piece"])
@pytest.mark.parametrize("way", ["one root", "three roots", "in place"])
def test_odd_experts_are_noted_and_the_container_is_sound(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, read_bytes: int | None
) -> None:
    more = {
        "one root": [],
        "three roots": ["--dirs", f"{tmp_path}/a,{tmp_path}/b,{tmp_path}/c", "--shares", "3,2,2"],
        "in place": ["--in-place"],
    }[way]
    repacked(odd, tmp_path / "c", *more)
    if read_bytes is not None:
        monkeypatch.setattr(digest_check, "READ_BYTES", read_bytes)
    result = verify(tmp_path / "c", "--read-data", "all")
    assert result.exit_code == 0, result.output
    assert SAID in result.stdout
    assert result.stdout.splitlines()[-1] == "sound: every byte matches its digest"
    told = json.loads(verify(tmp_path / "c", "--read-data", "all", "--json").stdout.splitlines()[-1])
    assert (told["sound"], told["findings"], told["odd_experts"]) == (True, 0, 3)
    assert [(one["layer"], one["expert"]) for one in told["first_odd_experts"]] == [(1, 2), (2, 0), (2, 4)]


def test_a_comparison_with_the_source_notes_them_too(odd: Path, tmp_path: Path) -> None:
    result = repacked(odd, tmp_path / "c", "--verify-full")
    assert result.stderr.count(SAID) == 1
    again = repacked(odd, tmp_path / "c", "--verify-full")
    assert "is complete already" in again.stdout
    assert SAID in again.stderr
    result = verify(tmp_path / "c", "--source", odd)
    assert result.exit_code == 0
    assert SAID in result.stdout


def test_without_reading_them_nothing_is_said(odd: Path, tmp_path: Path) -> None:
    repacked(odd, tmp_path / "c")
    assert "odd" not in verify(tmp_path / "c").stdout


def test_parts_of_a_container_note_each_expert_as_far_as_it_was_read(odd: Path, tmp_path: Path) -> None:
    """A part that holds half of an expert may say that its scale is odd, but never that it is all zeros."""
    sound = tmp_path / "c"
    repacked(odd, sound, "--dirs", f"{tmp_path}/a,{tmp_path}/b", "--shares", "1,1")
    parts = [
        json.loads(verify(sound, "--read-data", f"{part}/9", "--json").stdout.splitlines()[-1])
        for part in range(1, 10)
    ]
    noted = {(one["layer"], one["expert"]): one["problems"] for told in parts for one in told["first_odd_experts"]}
    assert {(1, 2), (2, 0)} <= set(noted) <= {(1, 2), (2, 0), (2, 4)}
    assert all(told["sound"] for told in parts)


def test_damaged_bytes_are_damage_and_not_odd(odd: Path, tmp_path: Path) -> None:
    repacked(odd, tmp_path / "c")
    for path in sorted((tmp_path / "c" / "experts").iterdir()):
        data = bytearray(path.read_bytes())
        data[-8192:] = b"\xff" * 8192
        path.write_bytes(data)
    result = verify(tmp_path / "c", "--read-data", "all")
    assert result.exit_code == 1
    assert "expert 5 (" not in result.stdout


def test_a_repack_that_is_interrupted_notes_what_it_had_read(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: WriteDestination) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WriteDestination, "drain", interrupted)
        assert SAID in repacked(odd, tmp_path / "c", code=130).stderr
    repacked(odd, tmp_path / "c")
