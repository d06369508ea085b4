"""Holds up that a root which is not there is refused by name and never made again somewhere else."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from k3.base.errors import IncompleteError, ResumeError
from k3.repack.root_marks import MARK_NAME, RootMark, read_mark
from k3.repack.run import Watcher, repack
from tests.support.mounts import small_tmpfs
from tests.support.repacked import repacked, tree
from tests.support.resumed import Case, stop_after, stop_before


@pytest.fixture(autouse=True)
def small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k3.repack.write.COMMIT_BYTES", 1)


def options(case: Case) -> tuple[str, ...]:
    return ("--dirs", ",".join(map(str, case.request.drives)), "--shares", "2,1")


def drive(case: Case) -> Path:
    return case.roots[1]


def test_an_unmounted_drive_is_not_made_again_below(case: Case) -> None:
    """The drive is really unmounted: what is left is the empty directory that it was mounted on."""
    with small_tmpfs(drive(case), "8m"):
        stop_after(case, 2)
        kept = case.source.parent / "kept"
        shutil.copytree(drive(case), kept)
    before = tree(*case.roots)
    for more in (("--plan",), ()):
        result = repacked(case.source, case.request.home, *options(case), *more, code=4)
        assert (
            f"root 1 of the unfinished repack is not there: it has no mark of this run (file {drive(case)})"
            in (result.stderr)
        )
    assert list(drive(case).iterdir()) == []
    assert tree(*case.roots) == before
    shutil.copytree(kept, drive(case), dirs_exist_ok=True)
    case.finishes_equal()


def test_a_root_whose_directory_is_gone(case: Case) -> None:
    stop_after(case, 2)
    away = case.source.parent / "away"
    drive(case).rename(away)
    with pytest.raises(IncompleteError, match=r"root 1 .* is not there: the directory does not exist") as caught:
        case.finish()
    assert caught.value.path == str(drive(case))
    assert not drive(case).exists()
    away.rename(drive(case))
    case.finishes_equal()


def test_a_stop_before_the_first_commit_is_no_excuse(case: Case) -> None:
    stop_before(case.request, pytest.MonkeyPatch(), "_stream")
    shutil.rmtree(drive(case))
    with pytest.raises(IncompleteError, match="root 1"):
        case.finish()


def test_drives_that_have_changed_places(case: Case, tmp_path: Path) -> None:
    third = case.source.parent / "third"
    request = dataclasses.replace(case.request, drives=(*case.request.drives, third), shares=(2, 1, 1))
    three = Case(request, {})
    stop_after(three, 2)
    away = tmp_path / "away"
    drive(case).rename(away)
    third.rename(drive(case))
    away.rename(third)
    with pytest.raises(ResumeError, match="this is root 2 of the unfinished repack, not root 1"):
        repack(request, Watcher())
    drive(case).rename(away)
    third.rename(drive(case))
    away.rename(third)
    repack(request, Watcher())


def test_a_root_of_another_run(case: Case, tmp_path: Path) -> None:
    other = Case(
        dataclasses.replace(
            case.request, home=tmp_path / "o" / "home", drives=(tmp_path / "o" / "drive", tmp_path / "o" / "home")
        ),
        {},
    )
    stop_after(case, 2)
    stop_after(other, 2)
    shutil.rmtree(drive(case))
    shutil.copytree(drive(other), drive(case))
    with pytest.raises(ResumeError, match="root 1 of another unfinished repack") as caught:
        case.finish()
    assert str(other.request.home) in str(caught.value)


def test_a_home_that_is_not_there(case: Case) -> None:
    """Its drive is not mounted: nothing but the other root tells that a run was begun."""
    stop_after(case, 2)
    away = case.source.parent / "away"
    case.request.home.rename(away)
    case.request.home.mkdir()
    with pytest.raises(
        IncompleteError, match="root 1 of an unfinished repack is here, but not its journal in home"
    ):
        case.finish()
    assert list(case.request.home.iterdir()) == []
    case.request.home.rmdir()
    away.rename(case.request.home)
    case.finishes_equal()


def test_a_root_of_a_finished_container_that_is_not_there(case: Case) -> None:
    case.finish()
    shutil.rmtree(drive(case))
    drive(case).mkdir()
    result = repacked(case.source, case.request.home, *options(case), code=4)
    assert "1 of 2 roots is missing" in result.stderr
    assert list(drive(case).iterdir()) == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_kill_between_the_marks_is_mended(case: Case, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_before(case.request, monkeypatch, "mark_roots")
    if number == 1:
        home = case.request.home
        mark = RootMark("a-run-that-was-killed", 1, str(home.resolve()), (".", "../drive"))
        (drive(case) / MARK_NAME).write_bytes(mark.render())
    case.finishes_equal()


def test_a_kill_after_the_manifest_leaves_no_marks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_before(case.request, monkeypatch, "remove_marks")
    assert all((root / MARK_NAME).exists() for root in case.roots)
    result, _ = case.finishes_equal()
    assert result.already_complete
    assert not any((root / MARK_NAME).exists() for root in case.roots)


def test_a_source_directory_that_is_not_there_changes_nothing(case: Case) -> None:
    for in_place in (False, True):
        home = case.source.parent / f"place-{in_place}"
        request = dataclasses.replace(case.request, home=home, drives=(), shares=None, in_place=in_place)
        stop_after(Case(request, {}), 2)
        before, away = tree(home), case.source.parent / "away"
        case.source.rename(away)
        case.source.mkdir()
        repacked(case.source, home, *(["--in-place"] if in_place else []), code=3)
        assert tree(home) == before
        case.source.rmdir()
        away.rename(case.source)
        repack(request, Watcher())


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"\xff", b"[" * 5000, b'{"format": "k3-repack-root", "version": 2}', b"x" * 100_000],
    ids=lambda text: repr(text[:12]),
)
def test_a_mark_that_is_no_mark(case: Case, text: bytes) -> None:
    stop_after(case, 2)
    (drive(case) / MARK_NAME).write_bytes(text)
    with pytest.raises(ResumeError) as caught:
        case.finish()
    assert caught.value.path == str(drive(case) / MARK_NAME)


def test_a_mark_is_read_as_it_was_written(tmp_path: Path) -> None:
    mark = RootMark("run", 3, "/a/b", (".", "../c"))
    (tmp_path / MARK_NAME).write_bytes(mark.render())
    assert read_mark(tmp_path) == mark
    assert json.loads(mark.render())["format"] == "k3-repack-root"
    assert read_mark(tmp_path / "none") is None
