"""Holds up the order of writing: each step is durable before the next begins (docs/container.md section 5)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3.base import direct_io
from k3.container import catalog
from k3.repack import publish
from k3.repack.journal import Journal
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import WIDE


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return what a run over two roots did to the disk, in order: (verb, path below the test's directory)."""
    events: list[tuple[str, str]] = []
    home = tmp_path / "home"

    def tell(verb: str, path: str | Path) -> None:
        events.append((verb, os.path.relpath(path, tmp_path)))

    def path_of(fd: int) -> Path:
        return Path(f"/proc/self/fd/{fd}").readlink()

    def patched(name: str, call: Callable[..., Any], verb: str, place: Callable[..., str | Path]) -> None:
        """Tell of each call of `os.NAME` before it is made."""

        def telling(*arguments: Any, **options: Any) -> Any:
            tell(verb, place(*arguments))
            return call(*arguments, **options)

        monkeypatch.setattr(os, name, telling)

    patched("fsync", os.fsync, "sync", path_of)
    patched("replace", os.replace, "name", lambda old, new: new)
    patched("rename", os.rename, "name", lambda old, new: new)
    patched("unlink", os.unlink, "remove", lambda path: path)
    patched("mkdir", os.mkdir, "make", lambda path, *mode: path)

    pwritev = os.pwritev

    def writing(fd: int, buffers: Any, offset: int) -> int:
        tell("write", path_of(fd))
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(direct_io.WriteFile.__init__, "__kwdefaults__", {"direct": True, "pwritev": writing})
    commit, write_catalog = Journal.commit, catalog.write_catalog

    def committing(self: Journal, experts: Any, tensors: Any, shards: Any) -> None:
        tell("commit", self.path)
        for layer in {key.layer for key in experts}:
            tell("claim", home / "experts" / f"layer-{layer:05}.safetensors.partial")
            tell("claim", tmp_path / "drive" / "experts" / f"layer-{layer:05}.safetensors.partial")
        if tensors:
            tell("claim", home / "dense.safetensors.partial")
        commit(self, experts, tensors, shards)

    def cataloguing(path: Path, *arguments: Any, **options: Any) -> None:
        write_catalog(path, *arguments, **options)
        tell("sync", path)

    monkeypatch.setattr(Journal, "commit", committing)
    monkeypatch.setattr(publish, "write_catalog", cataloguing)
    monkeypatch.setattr("k3.repack.write.COMMIT_BYTES", 50_000)
    source = write_snapshot(WIDE, tmp_path / "snapshot")
    repack(
        RepackRequest(sources=(source,), home=home, drives=(home, tmp_path / "drive"), shares=(1, 1)), Watcher()
    )
    return events


def test_every_new_name_is_made_durable(story: list[tuple[str, str]]) -> None:
    manifest = story.index(("name", "home/manifest.json"))
    for number, (verb, path) in enumerate(story):
        if verb in ("name", "make"):
            parent = ("sync", str(Path(path).parent))
            after = story.index(parent, number)
            assert path == "home/manifest.json" or after < manifest, path


def test_content_is_durable_before_it_gets_its_name(story: list[tuple[str, str]]) -> None:
    assert story[story.index(("name", "home/journal.mdb")) - 1][0] == "sync"  # of a name that nobody can guess
    names = [(number, path) for number, (verb, path) in enumerate(story) if verb == "name"][1:]
    assert len(names) > 8
    for number, path in names:
        partial = f"{path}.partial"
        synced = max(n for n, event in enumerate(story[:number]) if event == ("sync", partial))
        assert ("write", partial) not in story[synced:number]
        assert story.count(("name", path)) == 1


def test_units_are_durable_before_the_journal_says_so(story: list[tuple[str, str]]) -> None:
    assert sum(verb == "commit" for verb, _ in story) > 5
    for path in {path for verb, path in story if verb == "claim"}:
        first = story.index(("claim", path))
        assert story.index(("write", path)) < story.index(("sync", path)) < first
        last = max(number for number, event in enumerate(story) if event == ("claim", path))
        written = max(n for n, event in enumerate(story[:last]) if event == ("write", path))
        assert ("sync", path) in story[written:last]


def test_the_manifest_is_the_last_name_and_the_journal_goes_after_it(story: list[tuple[str, str]]) -> None:
    names = [path for verb, path in story if verb == "name"]
    assert names[-2:] == ["home/catalog.mdb", "home/manifest.json"]
    assert names.index("drive/root.json") < names.index("home/catalog.mdb")
    data = [path for path in names if path.endswith(".safetensors")]
    marks = ["drive/k3-repack-root.partial", "home/k3-repack-root.partial"]
    assert names[: 3 + len(data)] == ["home/journal.mdb", *marks, *data]
    manifest = story.index(("name", "home/manifest.json"))
    assert story[manifest + 1] == ("sync", "home")
    gone = [("remove", marks[0]), ("sync", "drive"), ("remove", marks[1]), ("sync", "home")]
    assert story[manifest + 2 :] == [*gone, ("remove", "home/journal.mdb"), ("sync", "home")]
