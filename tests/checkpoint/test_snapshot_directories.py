"""Holds up snapshots that lie on several drives or in a download cache: found by name, never resolved."""

from __future__ import annotations

import hashlib
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from k3.base.errors import ConfigError, IndexFileError, ShardError, SourceError
from k3.checkpoint.downloads import published_digest
from k3.checkpoint.hf_cache import snapshot_directory
from k3.checkpoint.snapshot import Snapshot
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.attacks.builders import CONFIG, INDEX, MODEL, SHARD, edit_json, shard_name


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write_snapshot(MODEL, tmp_path / "one")


@pytest.fixture
def second(tmp_path: Path) -> Path:
    (tmp_path / "two").mkdir()
    return tmp_path / "two"


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """Return the cache folder (`models--…`) of a snapshot whose shards are links to blobs."""
    model = SyntheticModel(layers=2, vision=False, layout="hf_cache", experts=4)
    revision = write_snapshot(model, tmp_path / "hub")
    cache = revision.parent.parent
    for link in revision.glob("*.safetensors"):
        # Small files are in git and have its SHA-1 for a name; shards of a real model are larger.
        target = link.parent / link.readlink()
        digest = hashlib.sha256(target.read_bytes()).hexdigest()
        target.rename(cache / "blobs" / digest)
        link.unlink()
        link.symlink_to(f"../../blobs/{digest}")
    return cache


# --- several directories ---


def test_shards_may_be_spread_over_directories_in_any_order(sound: Path, second: Path) -> None:
    whole = Snapshot.open([sound])
    for number in (2, 4):
        shutil.move(sound / shard_name(number), second)
    for directories in ([sound, second], [second, sound], [sound, second, sound]):
        snapshot = Snapshot.open(directories)
        assert snapshot.identity == whole.identity
        assert snapshot.warnings == ()
        homes = [shard.path.parent for shard in snapshot.shards]
        assert homes == [sound, second, sound, second]
    with pytest.raises(ShardError, match=r"does not exist, but .* names it for") as caught:
        Snapshot.open([sound])
    assert caught.value.path == str(sound / SHARD)


def test_a_second_copy_of_a_shard_is_ignored_aloud_if_it_may_be_the_same(sound: Path, second: Path) -> None:
    shutil.copy(sound / SHARD, second)
    snapshot = Snapshot.open([sound, second])
    assert snapshot.warnings == (f"{second / SHARD} is a second copy of {sound / SHARD} and is ignored",)
    assert snapshot.shards[1].path == sound / SHARD
    with (second / SHARD).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ShardError) as caught:
        Snapshot.open([sound, second])
    assert str(sound / SHARD) in str(caught.value)
    assert str(second / SHARD) in str(caught.value)


@pytest.mark.parametrize(("name", "error"), [(CONFIG, ConfigError), (INDEX, IndexFileError)])
def test_a_second_copy_of_a_small_file_must_be_equal(
    sound: Path, second: Path, name: str, error: type[SourceError]
) -> None:
    shutil.copy(sound / name, second)
    assert Snapshot.open([second, sound]).warnings == ()
    text = (second / name).read_bytes()
    for other in (text + b" ", text.replace(b"1", b"2", 1)):
        (second / name).write_bytes(other)
        with pytest.raises(error, match="differs from"):
            Snapshot.open([second, sound])


def test_a_link_that_dangles_beside_a_whole_copy_does_no_harm(sound: Path, second: Path) -> None:
    shutil.move(sound / SHARD, second)
    (sound / SHARD).symlink_to("../blobs/gone")
    snapshot = Snapshot.open([sound, second])
    assert snapshot.shards[1].path == second / SHARD
    assert "dangling link" in snapshot.warnings[0]


def test_other_files_are_ignored_aloud_and_folders_in_silence(sound: Path) -> None:
    shutil.copy(sound / SHARD, sound / "model.safetensors")
    (sound / "notes.txt").write_text("hello")
    (sound / "original").mkdir()
    shutil.copy(sound / SHARD, sound / "original" / SHARD)
    (sound / "folder.safetensors").mkdir()
    snapshot = Snapshot.open([sound])
    assert snapshot.warnings == (f"{sound / 'model.safetensors'} is not named by the index and is ignored",)
    assert len(snapshot.shards) == 4


def test_a_file_name_cannot_forge_a_warning(sound: Path) -> None:
    shutil.copy(sound / SHARD, sound / "a\x1b[2J\nb.safetensors")
    (warning,) = Snapshot.open([sound]).warnings
    assert warning.isprintable()


def put_metadata(value: object, index: dict[str, object]) -> None:
    index["metadata"] = value


def test_a_wrong_total_does_no_harm_and_is_mentioned(sound: Path) -> None:
    edit_json(sound / INDEX, lambda index: index["metadata"].update(total_size=7))
    assert "says 7 bytes in total" in Snapshot.open([sound]).warnings[0]
    for metadata in ({}, {"total_size": "7"}, {"total_size": 7.0}, {"total_size": True}, None, 7):
        edit_json(sound / INDEX, partial(put_metadata, metadata))
        assert "does not say the total" in Snapshot.open([sound]).warnings[0]


def test_a_directory_without_configuration_says_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for name in ("a.gguf", "b\x1b[2J"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"it holds blobs/, a\.gguf, 'b\\x1b\[2J'"):
        Snapshot.open([tmp_path])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="it is empty"):
        Snapshot.open([tmp_path / "empty"])
    with pytest.raises(SourceError, match="no directory given"):
        Snapshot.open([])


# --- the download cache ---


def test_a_cache_folder_stands_for_its_one_revision(cached: Path) -> None:
    (revision,) = (cached / "snapshots").iterdir()
    for named in (cached, cached / "snapshots", revision):
        assert snapshot_directory(named) == revision
        snapshot = Snapshot.open([named])
        assert snapshot.directories == (revision,)
        assert snapshot.warnings == ()
    (cached / "snapshots" / "another").mkdir()
    with pytest.raises(SourceError, match=f"2 revisions in this folder: .*{revision.name}"):
        Snapshot.open([cached])
    assert Snapshot.open([revision]).shards


def test_links_keep_their_names_and_give_the_published_digest(cached: Path) -> None:
    snapshot = Snapshot.open([cached])
    for shard in snapshot.shards:
        assert shard.path.is_symlink()
        assert shard.path.name == shard.name
        assert shard.name.startswith("model-")
        assert shard.blob_sha256 == hashlib.sha256(shard.path.read_bytes()).hexdigest()
    assert all(extent.path.is_symlink() for extent in snapshot.expert_extents(1, 0))


def test_what_is_no_published_digest_is_none(tmp_path: Path) -> None:
    digest = 64 * "a"
    targets = {
        "short": f"../../blobs/{41 * 'a'}",
        "upper": f"../../blobs/{64 * 'A'}",
        "longer": f"../../blobs/{digest}0",
        "no-blob": f"../../files/{digest}",
        "suffix": f"../../blobs/{digest}.safetensors",
    }
    for name, target in targets.items():
        (tmp_path / name).symlink_to(target)
        assert published_digest(tmp_path / name) is None
    for good in (digest, 40 * "b"):
        (tmp_path / f"to-{good}").symlink_to(f"/anywhere/blobs/{good}")
        found = published_digest(tmp_path / f"to-{good}")
        assert found is not None
        assert (found.hexadecimal, found.sha256) == (good, good if len(good) == 64 else None)
    (tmp_path / digest).touch()
    assert published_digest(tmp_path / digest) is None
    assert published_digest(tmp_path / "absent") is None


def test_a_relative_directory_stays_valid_when_the_working_directory_changes(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cached.parent)
    snapshot = Snapshot.open([Path(cached.name)])
    monkeypatch.chdir("/")
    assert all(shard.path.is_absolute() for shard in snapshot.shards)
    for name in snapshot.tensor_names():
        snapshot.read_tensor(name)


def test_a_blob_of_no_bytes_is_named_by_its_link(cached: Path) -> None:
    snapshot = Snapshot.open([cached])
    shard = snapshot.shards[0]
    os.truncate(shard.path, 0)
    with pytest.raises(ShardError, match="is empty") as caught:
        Snapshot.open([cached])
    assert caught.value.path == str(shard.path)
