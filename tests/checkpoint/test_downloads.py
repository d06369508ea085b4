"""Holds up that what downloaders leave is used: digests are compared, unfinished downloads are refused or told."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

import pytest

from k3.base.errors import SourceError
from k3.checkpoint.downloads import CONTROL_SUFFIXES, LEFTOVER_SUFFIXES, published_digest
from k3.checkpoint.snapshot import Snapshot
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.repacked import SMALL, repacked

REVISION = "0123456789abcdef0123456789abcdef01234567"
SMALL_NAMES = ("config.json", "model.safetensors.index.json", "tiktoken.model", "generation_config.json")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_snapshot(SMALL, tmp_path_factory.mktemp("small") / "snapshot")


@pytest.fixture
def snapshot(small: Path, tmp_path: Path) -> Path:
    """Return a snapshot as `hf download --local-dir` leaves it: SHA-1 for small files, SHA-256 for large ones."""
    shutil.copytree(small, tmp_path / "snapshot")
    for path in (tmp_path / "snapshot").iterdir():
        data = path.read_bytes()
        large = path.suffix in (".safetensors", ".model")
        record(path, sha256(data) if large else git_sha1(data))
    return tmp_path / "snapshot"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob " + str(len(data)).encode() + b"\0" + data).hexdigest()


def record(path: Path, etag: str) -> Path:
    place = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{REVISION}\n{etag}\n1753900000.123456\n")
    return place


def shard(snapshot: Path) -> Path:
    return sorted(snapshot.glob("*.safetensors"))[1]


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# --- digests


def test_records_prove_what_is_there(snapshot: Path, tmp_path: Path) -> None:
    found = Snapshot.open([snapshot])
    assert all(item.blob_sha256 == sha256(item.path.read_bytes()) for item in found.shards)
    assert found.warnings == ()
    repacked(snapshot, tmp_path / "out", "--verify-full")


def test_a_shard_that_is_not_what_was_downloaded(snapshot: Path, tmp_path: Path) -> None:
    flip_last(shard(snapshot))
    result = repacked(snapshot, tmp_path / "out", code=3)
    assert f"file {shard(snapshot)}" in result.stderr
    assert "it was published as" in result.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_record_that_says_another_digest_than_a_finished_container(snapshot: Path, tmp_path: Path) -> None:
    repacked(snapshot, tmp_path / "out")
    record(shard(snapshot), 64 * "a")
    assert f"sha256 of {shard(snapshot).name}" in repacked(snapshot, tmp_path / "out", code=8).stderr


@pytest.mark.parametrize("name", SMALL_NAMES)
def test_a_small_file_that_is_not_what_was_downloaded(name: str, snapshot: Path, tmp_path: Path) -> None:
    path = snapshot / name
    path.write_bytes(path.read_bytes() + b"\n")
    for options in ((), ("--plan",)):
        result = repacked(snapshot, tmp_path / "out", *options, code=3)
        assert f"(file {path})" in result.stderr
        assert "if the change is meant, remove" in result.stderr
    assert not (tmp_path / "out").exists()
    (snapshot / ".cache" / "huggingface" / "download" / f"{name}.metadata").unlink()
    repacked(snapshot, tmp_path / "out")


@pytest.mark.parametrize("name", SMALL_NAMES)
def test_a_small_blob_that_is_not_what_its_name_says(name: str, tmp_path: Path) -> None:
    snapshot = write_snapshot(dataclasses.replace(SMALL, layout="hf_cache"), tmp_path / "hub")
    blob = (snapshot / name).resolve()
    data = blob.read_bytes()
    if blob.name not in (git_sha1(data), sha256(data)):  # named otherwise: nothing can be proven by it
        link = blob.with_name(git_sha1(data))
        blob.rename(link)
        (snapshot / name).unlink()
        (snapshot / name).symlink_to(f"../../blobs/{link.name}")
        blob = link
    repacked(snapshot, tmp_path / "fine")
    blob.write_bytes(data + b"\n")
    result = repacked(snapshot, tmp_path / "out", code=3)
    assert name in result.stderr
    assert "it was published as" in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"{REVISION}\n",
        f"{REVISION}\n\n1\n",
        f"{REVISION}\nW/zz\n1\n",
        "\0" * 9,
        "a\n" + 63 * "a",
        "x" * 9999,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_a_record_that_says_nothing(text: str, snapshot: Path) -> None:
    record(shard(snapshot), "").write_text(text)
    assert published_digest(shard(snapshot)) is None
    assert Snapshot.open([snapshot]).shards[1].blob_sha256 is None


def test_spellings_of_a_record(snapshot: Path) -> None:
    record(shard(snapshot), '"' + 64 * "A" + '"\r')
    found = published_digest(shard(snapshot))
    assert found is not None
    assert found.sha256 == 64 * "a"


# --- unfinished downloads


@pytest.mark.parametrize("suffix", CONTROL_SUFFIXES)
@pytest.mark.parametrize("name", ["shard", *SMALL_NAMES])
def test_a_control_file_says_that_there_are_holes(suffix: str, name: str, snapshot: Path, tmp_path: Path) -> None:
    path = shard(snapshot) if name == "shard" else snapshot / name
    path.with_name(path.name + suffix).write_bytes(b"\0\1")
    for options in ((), ("--plan",)):
        result = repacked(snapshot, tmp_path / "out", *options, code=3)
        assert f"its download has not ended: {path.name}{suffix} is beside it" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", sorted({*LEFTOVER_SUFFIXES, ".filepart", ".!qB"} - set(CONTROL_SUFFIXES)))
def test_other_traces_are_told_and_left(suffix: str, snapshot: Path, tmp_path: Path) -> None:
    names = [shard(snapshot).name + suffix, "config.json" + suffix]
    for name in names:
        (snapshot / name).write_text("x")
    result = repacked(snapshot, tmp_path / "out")
    assert all(name in result.stderr for name in names)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.endswith(suffix)]


def test_a_missing_shard_whose_download_was_begun(snapshot: Path) -> None:
    shard(snapshot).rename(snapshot / f"{shard(snapshot).name}.part")
    with pytest.raises(SourceError, match=r"does not exist.*its download has not ended: .*\.part is there"):
        Snapshot.open([snapshot])


def test_unfinished_files_of_hf_download_are_told(snapshot: Path) -> None:
    (snapshot / ".cache" / "huggingface" / "download" / "Zm9v.abc.incomplete").touch()
    (warning,) = Snapshot.open([snapshot]).warnings
    assert "Zm9v.abc.incomplete" in warning


def test_unfinished_blobs_and_another_main_are_told(tmp_path: Path) -> None:
    snapshot = write_snapshot(dataclasses.replace(SMALL, layout="hf_cache"), tmp_path / "hub")
    cache = snapshot.parent.parent
    (cache / "refs").mkdir(exist_ok=True)
    (cache / "refs" / "main").write_text(snapshot.name)
    assert Snapshot.open([snapshot]).warnings == ()
    (cache / "blobs" / f"{64 * 'a'}.incomplete").touch()
    (cache / "refs" / "main").write_text(f"{REVISION}\n")
    blobs, main = Snapshot.open([cache]).warnings
    assert ".incomplete" in blobs
    assert f"names revision {REVISION}, this is {snapshot.name}" in main
    (snapshot.parent / REVISION).mkdir()
    with pytest.raises(SourceError, match=r"2 revisions.*refs/main"):
        Snapshot.open([cache])
