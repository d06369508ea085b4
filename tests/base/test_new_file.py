"""Holds up that what a command makes for itself never goes through a link or over somebody's file."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from k3.base.direct_io import WriteFile
from k3.base.errors import DriveError
from k3.base.new_file import create_instead, create_nameless, create_unguessed
from k3.base.output_file import OutputFile
from k3.model.keys import ExpertKey
from k3.repack.probe import drive_rate
from k3.repack.scratch_file import Scratch


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


@pytest.mark.parametrize("plant", [os.symlink, os.link])
def test_a_planted_name_is_replaced_and_not_followed(tmp_path: Path, victim: Path, plant: object) -> None:
    assert callable(plant)
    plant(victim, tmp_path / "aside")
    descriptor = create_instead(tmp_path / "aside")
    os.write(descriptor, b"ours")
    os.close(descriptor)
    assert victim.read_text() == "mine"
    assert (tmp_path / "aside").read_bytes() == b"ours"


@pytest.mark.parametrize("plant", [os.symlink, os.link, lambda victim, path: os.mkfifo(path)])
def test_a_data_file_is_not_written_through_links_and_second_names(
    tmp_path: Path, victim: Path, plant: object
) -> None:
    assert callable(plant)
    plant(victim, tmp_path / "layer.partial")
    with pytest.raises(DriveError, match=r"link") as caught:
        WriteFile(tmp_path / "layer.partial", 8192)
    assert caught.value.advice is not None
    assert victim.read_text() == "mine"


def test_a_files_own_scratch_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "scratch.partial").write_text("mine")
    (tmp_path / "k3-probe.partial").write_text("mine")
    scratch = Scratch(tmp_path / "scratch.partial", 4096)
    scratch.open_expert(ExpertKey(0, 0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k3-probe.partial", "scratch.partial"]
    scratch.close()
    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}


def test_a_probe_uses_a_name_of_its_own_and_clears_up_after_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("k3.repack.probe.PROBE_BYTES", 16 << 20)
    (tmp_path / "k3-probe.partial").write_text("mine")
    (tmp_path / ".k3-probe-0123456789abcdef.partial").write_text("left over")
    assert drive_rate(tmp_path) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["k3-probe.partial"]


def test_unguessed_names_differ_and_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [create_unguessed(tmp_path, "x") for _ in range(3)]
    for descriptor, _ in made:
        os.close(descriptor)
    assert len({path for _, path in made}) == 3
    monkeypatch.setattr(os, "urandom", lambda count: bytes(count))
    os.close(create_unguessed(tmp_path, "x")[0])
    with pytest.raises(FileExistsError):
        create_unguessed(tmp_path, "x")


@pytest.mark.parametrize("nameless", [True, False])
def test_a_nameless_file_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE")
    descriptor = create_nameless(tmp_path, "x")
    os.write(descriptor, b"ours")
    assert os.pread(descriptor, 9, 0) == b"ours"
    assert list(tmp_path.iterdir()) == []
    os.close(descriptor)


def test_an_output_file_has_a_name_of_its_own_until_it_is_published(tmp_path: Path, victim: Path) -> None:
    (tmp_path / f".out.{os.getpid()}.tmp").symlink_to(victim)
    with OutputFile(tmp_path / "out", "the trace") as file:
        file.write(b"trace")
        file.publish()
    assert victim.read_text() == "mine"
    assert (tmp_path / "out").read_bytes() == b"trace"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".k3")] == []


def test_a_state_is_for_its_owner_alone(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "state", "the state", private=True) as file:
        file.publish()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from k3.base.output_file import OutputFile
file = OutputFile(Path(sys.argv[1]), "the state", private=True)
file.write(bytes(100_000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_no_file_behind(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("before")
    ended = subprocess.run([sys.executable, "-c", WRITE_AND_DIE, str(tmp_path / "state")])
    assert ended.returncode == -signal.SIGKILL
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"state": "before"}


@pytest.mark.parametrize("lacks", ["nameless files", "proc", "links to them"])
def test_an_output_file_needs_no_nameless_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    if lacks == "nameless files":
        monkeypatch.delattr(os, "O_TMPFILE")
    elif lacks == "proc":
        monkeypatch.setattr(os.path, "exists", lambda path: False)
    else:

        def refuse(*place: object, **how: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with OutputFile(tmp_path / "out", "the state", private=True) as file:
        file.write(b"one, ")
        file.publish()
        assert (tmp_path / "out").read_bytes() == b"one, "
        file.write(b"two")
        file.publish()
    with OutputFile(tmp_path / "other", "the trace") as file:
        file.write(b"not kept")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"out": b"one, two"}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
