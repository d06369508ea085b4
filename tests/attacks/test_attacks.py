"""Holds up that no broken snapshot is used: each is refused by the right error, at its place, with advice."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from k3.base.errors import K3Error
from k3.checkpoint.model_check import check_model
from k3.checkpoint.snapshot import Snapshot
from k3.model.tensor_recipe import Recipe
from tests.attacks import ATTACKS, Attack, base

RECIPE = Recipe(bits=8, mla_bits=8, head_bits=4)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("sound") / "snapshot")


def use(path: Path, stage: str = "read") -> None:
    """Open a snapshot; ask about the model if `stage` is "model", read every dense tensor if it is "read"."""
    snapshot = Snapshot.open([path], recipe=RECIPE)
    if stage == "model":
        assert check_model(snapshot, None) == []
    if stage == "read":
        for name in snapshot.tensor_names():
            snapshot.read_tensor(name)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_snapshot_that_is_broken_is_sound_to_begin_with(sound: Path) -> None:
    use(sound)
    use(sound, "model")
    assert Snapshot.open([sound]).warnings == ()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_it_is_refused(attack: Attack, sound: Path, tmp_path: Path) -> None:
    path = attack.make(sound, tmp_path / "snapshot")
    if attack.stage != "open":
        use(path, "open")
    descriptors = open_descriptors()
    with pytest.raises(K3Error) as caught:
        use(path, attack.stage)
    assert open_descriptors() == descriptors
    error = caught.value
    assert type(error) is attack.error, error
    assert attack.says in error.problem
    assert error.path is not None
    assert Path(error.path).name == attack.file
    assert error.advice
    if attack.tensor is True:
        assert error.tensor
    else:
        assert error.tensor == attack.tensor
    if attack.offset is True:
        assert error.offset is not None
    elif attack.offset is not False:
        assert error.offset == attack.offset
    # Whatever the file says, it is shown in bounded form and cannot act on a terminal.
    assert str(error).isprintable()
    assert len(str(error)) < 2000


BY_NUMBERS = [
    attack for attack in ATTACKS if any(word in attack.name for word in ("length", "enormous", "overflow"))
]


@pytest.mark.parametrize("attack", BY_NUMBERS, ids=lambda attack: attack.name)
def test_no_number_in_a_file_is_taken_for_a_size_to_allocate(attack: Attack, sound: Path, tmp_path: Path) -> None:
    path = attack.make(sound, tmp_path / "snapshot")
    tracemalloc.start()
    try:
        with pytest.raises(attack.error):
            use(path, attack.stage)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_the_readme_lists_every_attack() -> None:
    assert (Path(__file__).parent / "README.md").read_text() == readme()


def readme() -> str:
    """Return what README.md must be; run this file to write it."""
    lines = [
        "# Broken snapshots",
        "",
        "Each row is one way in which a snapshot can be broken, by accident or on purpose, and why it must be",
        "refused. `builders.py` has the tools, the `on_*.py` files the attacks; `test_attacks.py` runs them.",
        "This file is written by `python -m tests.attacks.test_attacks`.",
        "",
        "| attack | why it is refused | error | message says |",
        "|---|---|---|---|",
    ]
    for attack in ATTACKS:
        lines.append(f"| {attack.name} | {attack.why} | {attack.error.__name__} | {attack.says} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "README.md").write_text(readme())
