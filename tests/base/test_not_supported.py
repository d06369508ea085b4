"""Holds up that a feature which a file system lacks ends nothing and is told once, and that a real fault ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3.base import free_space, notes
from k3.base.cli_support import run
from k3.base.direct_io import ReadFile, sync_directory
from k3.base.errors import DriveError, ExitCode
from k3.base.output_file import OutputFile
from k3.repack.lock import RootLocks
from k3.repack.preflight import DriveNeed, check_file_sizes, check_space

UNSUPPORTED = [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS]


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    """No test hears another one's notes."""
    notes.forget_notes()
    yield
    notes.forget_notes()


def failing(number: int) -> Callable[..., Any]:
    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.mark.parametrize("number", UNSUPPORTED)
def test_a_directory_that_cannot_be_synced_is_noted_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(number))
    for _ in range(3):
        sync_directory(tmp_path)
    (note,) = notes.take_notes()
    assert str(tmp_path) in note
    assert os.strerror(number) in note


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_directory_whose_drive_fails_is_an_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(DriveError, match="durable"):
        sync_directory(tmp_path)
    assert not notes.take_notes()


@pytest.mark.parametrize("number", UNSUPPORTED)
def test_a_file_is_published_where_nothing_can_be_synced(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(number))
    with OutputFile(tmp_path / "logits", "the logits") as file:
        file.write(b"123")
        file.publish()
    assert (tmp_path / "logits").read_bytes() == b"123"
    assert len(notes.take_notes()) == 2  # names and bytes


def test_a_file_whose_drive_lost_writes_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with OutputFile(tmp_path / "logits", "the logits") as file:
        file.write(b"123")
        with pytest.raises(DriveError):
            file.publish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", UNSUPPORTED)
def test_a_place_without_locks_is_noted(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", failing(number))
    with RootLocks([tmp_path]):
        (note,) = notes.take_notes()
    assert "no locks" in note


def test_a_lock_service_that_fails_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", failing(errno.ENOLCK))
    with pytest.raises(DriveError, match="local_lock=flock"):
        RootLocks([tmp_path])


def test_a_cache_that_cannot_be_dropped_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x")
    monkeypatch.setattr(os, "posix_fadvise", failing(errno.EOPNOTSUPP))
    with ReadFile(tmp_path / "x", direct=False) as file:
        file.drop_cache()
        file.drop_cache()
    (note,) = notes.take_notes()
    assert "from memory" in note


class _Nothing:
    f_blocks = f_bavail = f_frsize = 0


def test_a_file_system_that_says_nothing_of_its_room_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda place: _Nothing())
    assert free_space.free_bytes(tmp_path) is None
    check_space([DriveNeed((str(tmp_path),), 10**12, 0, 0, None)])
    monkeypatch.setattr(os, "statvfs", failing(errno.ENOSYS))
    assert free_space.free_bytes(tmp_path) is None
    monkeypatch.setattr(os, "statvfs", failing(errno.EIO))
    with pytest.raises(DriveError, match="free space"):
        free_space.free_bytes(tmp_path)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_tells_its_notes_at_the_end(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        for _ in range(2):
            notes.note_once("a", "this is so")
        raise DriveError("it broke")

    with pytest.raises(SystemExit) as ended:
        run(body, as_json=as_json)
    assert ended.value.code == ExitCode.DRIVE
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == ('{"type": "note", "text": "this is so"}' if as_json else "note: this is so")
    assert len(said) == 2


def test_a_limit_of_file_sizes_is_known_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "disk"
    plan = SimpleNamespace(files=[SimpleNamespace(kind="experts", root=0, path="experts/e0", size_bytes=5 << 30)])
    check_file_sizes(plan, {0: place})  # type: ignore[arg-type]
    monkeypatch.setattr(free_space, "_file_system", lambda place: "vfat")
    with pytest.raises(DriveError, match="FAT32"):
        check_file_sizes(plan, {0: place})  # type: ignore[arg-type]
    monkeypatch.undo()
    monkeypatch.setattr("resource.getrlimit", lambda which: (1 << 20, 1 << 20))
    with pytest.raises(DriveError, match="ulimit -f"):
        check_file_sizes(plan, {0: place})  # type: ignore[arg-type]


def test_the_type_of_a_mounted_file_system_is_found() -> None:
    assert free_space._file_system(Path("/proc")) == "proc"
    assert free_space._file_system(Path("/no/such/place")) is None
