"""Holds up: what cannot be looked at is never taken for absent."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3.base import presence
from k3.base.errors import DriveError
from k3.base.presence import is_directory, is_file, is_named, is_there, was_absent
from k3.checkpoint.downloads import published_digest
from k3.container.reader import read_manifest
from k3.model.kinds import is_container
from tests.support.syscalls import ERRNOS, FailingCall

QUESTIONS: list[Callable[[Path], Any]] = [is_directory, is_file, is_there, is_container, read_manifest]


@pytest.mark.parametrize("number", [number for number in ERRNOS if number != errno.ENOENT])
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.__name__)
def test_an_error_is_no_answer(tmp_path: Path, question: Callable[[Path], Any], number: int) -> None:
    with FailingCall("stat", number, tmp_path).active(), pytest.raises(DriveError) as raised:
        question(tmp_path)
    assert os.strerror(number) in raised.value.problem
    assert raised.value.path is not None


@pytest.mark.parametrize("number", [number for number in ERRNOS if number != errno.ENOENT])
def test_names_and_links_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refused(*arguments: object, **keywords: object) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "lstat", refused)
    monkeypatch.setattr(Path, "lstat", refused)
    with pytest.raises(DriveError):
        is_named(tmp_path)
    monkeypatch.setattr(Path, "readlink", refused)
    with pytest.raises(DriveError):
        published_digest(tmp_path / "model.safetensors")


def test_the_two_answers(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert (is_there(tmp_path / "file"), is_file(tmp_path / "file"), is_directory(tmp_path / "file")) == (
        True, True, False,
    )  # fmt: skip
    assert (is_there(tmp_path), is_file(tmp_path), is_directory(tmp_path)) == (True, False, True)
    assert not is_there(tmp_path / "nowhere")
    assert not is_there(tmp_path / "file" / "below")
    assert (is_there(tmp_path / "dangling"), is_named(tmp_path / "dangling")) == (False, True)
    for name in ("x" * 300, "with\0zero"):
        assert not is_there(tmp_path / name)
        assert not is_named(tmp_path / name)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(DriveError):
        is_there(loop)


def test_where_an_error_came_from() -> None:
    error = DriveError("x")
    error.__cause__ = FileNotFoundError(errno.ENOENT, "x")
    assert was_absent(error)
    error.__cause__ = PermissionError(errno.EACCES, "x")
    assert not was_absent(error)
    assert presence.status(Path("/nowhere/at/all")) is None
