"""Holds up opening a container: all of it is there and sound, or the first thing that is not is named."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from k3.base import checksum
from k3.base.direct_io import aligned_buffer
from k3.base.errors import (
    ContainerError,
    DamageError,
    DriveError,
    IncompleteError,
    NotAContainerError,
    VersionError,
)
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import JOURNAL_NAME, ROOT_NAME
from k3.container.reader import Container, unused_places
from k3.model.keys import Encoding, ExpertKey, tensor_bytes
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME
from k3.verify.cli import main as verify_main
from tests.support.containers import DENSE, Built, build_container, flip, write_manifest
from tests.support.mounts import read_only


@pytest.fixture(params=["one root", "three roots", "in place"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Built:
    if request.param == "one root":
        return build_container(tmp_path / "home")
    if request.param == "three roots":
        return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], (2, 0, 3))
    return build_container(tmp_path / "home", in_place=tmp_path / "snapshot")


@pytest.fixture
def split(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], (1, 2, 3))


def payload(container: Container, key: ExpertKey) -> bytes:
    parts = []
    for extent in container.expert_extents(key.layer, key.expert):
        with open(extent.path, "rb") as file:
            file.seek(extent.offset)
            stored = file.read(extent.stored_bytes)
        assert checksum.digest(stored) == extent.digest
        assert not any(stored[extent.payload_bytes :])
        assert extent.end == extent.offset + extent.stored_bytes
        parts.append(stored[: extent.payload_bytes])
    return b"".join(parts)


def test_everything_that_was_written_is_found(built: Built) -> None:
    container = Container.open(built.home)
    assert container.identity.weights == built.manifest.container
    assert container.config == {"model_type": "kimi_k3", "text_config": {"num_experts_per_token": 2}}
    assert container.text_file("generation_config.json") == built.home / "generation_config.json"
    assert container.text_file("tiktoken.model") is None
    assert list(container.expert_layers()) == list(built.layouts)
    for layer, layout in built.layouts.items():
        assert container.expert_layout(layer) == layout
        assert container.expert_count(layer) == 5
    for key, wanted in built.payloads.items():
        assert payload(container, key) == wanted
    assert container.tensor_names() == tuple(name for name, *_ in DENSE)
    assert [container.tensor(name) for name in container.tensor_names()] == built.tensors
    container.close()


def test_tensors_come_in_their_encoding(built: Built) -> None:
    container = Container.open(built.home)
    dense: Sequence[tuple[str, str, tuple[int, ...], Encoding]] = DENSE
    for name, dtype, shape, encoding in dense:
        tensor = container.read_tensor(name)
        assert (tensor.name, tensor.dtype, tensor.shape, tensor.encoding) == (name, dtype, shape, encoding)
        entry = container.tensor(name)
        stored = built.path(entry.weights.file).read_bytes()[entry.weights.offset :][: entry.weights.payload_bytes]
        assert tensor.data.tobytes() == stored
        if encoding is Encoding.RAW:
            assert tensor.data.shape == shape
            assert tensor.data.nbytes == tensor_bytes(dtype, shape)
            assert tensor.data.dtype == np.dtype({"BF16": np.uint16, "F32": np.float32}[dtype])
        elif encoding is Encoding.F32:
            assert (tensor.data.shape, tensor.data.dtype) == (shape, np.dtype(np.float32))
        elif encoding is Encoding.INT8:
            assert (tensor.data.shape, tensor.data.dtype) == (shape, np.dtype(np.uint8))
            assert tensor.scales is not None
            assert (tensor.scales.shape, tensor.scales.dtype) == ((shape[0],), np.dtype(np.float32))
        else:
            assert tensor.data.shape == (shape[0], -(-shape[1] // 2))
            assert tensor.scales is not None
            assert tensor.scales.shape == (shape[0], -(-shape[1] // 64))
        assert (tensor.scales is None) == (encoding in (Encoding.RAW, Encoding.F32))
    with pytest.raises(KeyError):
        container.read_tensor("no.such.tensor")
    container.close()


def test_what_is_not_there_is_an_error_and_not_zeros(built: Built) -> None:
    container = Container.open(built.home)
    for layer, expert in ((1, 5), (0, 0), (9, 0), (1, 1 << 20)):
        with pytest.raises(ContainerError, match="no such expert") as caught:
            container.expert_extents(layer, expert)
        assert (caught.value.layer, caught.value.expert) == (layer, expert)
    with pytest.raises(ContainerError, match="no routed experts"):
        container.expert_count(0)
    outside = CatalogExtent(99, 0, 1, 1, bytes(16))
    with pytest.raises(ContainerError, match="refers to file 99"):
        container.extent(outside)
    container.close()


def test_two_readers_of_one_container_live_side_by_side(built: Built) -> None:
    first, second = Container.open(built.home), Container.open(built.home)
    first.close()
    assert payload(second, ExpertKey(1, 0)) == built.payloads[ExpertKey(1, 0)]
    second.close()


# --- roots


def test_a_missing_root_is_named(split: Built, tmp_path: Path) -> None:
    (tmp_path / "b").rename(tmp_path / "moved")
    with pytest.raises(IncompleteError, match="1 of 3 roots is missing: root 2") as caught:
        Container.open(split.home)
    assert split.manifest.roots[2].uuid in str(caught.value)
    container = Container.open(split.home, [tmp_path, tmp_path / "moved"])
    assert payload(container, ExpertKey(2, 4)) == split.payloads[ExpertKey(2, 4)]
    container.close()
    with pytest.raises(IncompleteError):
        Container.open(split.home, [tmp_path / "nowhere"])


def test_roots_that_changed_places_are_told_apart(split: Built, tmp_path: Path) -> None:
    (tmp_path / "a").rename(tmp_path / "t")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "t").rename(tmp_path / "b")
    container = Container.open(split.home)
    for key, wanted in split.payloads.items():
        assert payload(container, key) == wanted
    container.close()


def relative(built: Built) -> None:
    """Record roots relative to home, as the repacker does."""
    values = {name: getattr(built.manifest, name) for name in built.manifest.__slots__}
    roots = []
    for root in built.manifest.roots:
        fields = {name: getattr(root, name) for name in root.__slots__}
        roots.append(type(root)(**{**fields, "path": os.path.relpath(built.home.parent / root.path, built.home)}))
    write_manifest(built, type(built.manifest)(**{**values, "roots": tuple(roots)}))


def test_recorded_places_hold_through_links_to_home(split: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip  # noqa: E501
    relative(split)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    link = tmp_path / "deep" / "er" / "link"
    link.symlink_to(split.home)
    monkeypatch.chdir(tmp_path)
    for home in (split.home, link, Path("home"), Path("deep/er/link"), tmp_path / "a" / ".." / "home"):
        container = Container.open(home)
        assert payload(container, ExpertKey(1, 1)) == split.payloads[ExpertKey(1, 1)]
        container.close()
    shutil.copytree(tmp_path / "home", tmp_path / "elsewhere" / "home")
    for name in ("a", "b"):
        shutil.copytree(tmp_path / name, tmp_path / "elsewhere" / name)
        shutil.rmtree(tmp_path / name)
    Container.open(tmp_path / "elsewhere" / "home").close()


def test_another_containers_root_does_not_count(split: Built, tmp_path: Path) -> None:
    other = build_container(tmp_path / "x" / "home", [tmp_path / "x" / "a", tmp_path / "x" / "b"], (1, 2, 4))
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(other.directories[1], tmp_path / "a")
    with pytest.raises(IncompleteError, match="root 1"):
        Container.open(split.home)
    # Its root file may be of any kind: it is not ours.
    (tmp_path / "x" / "a" / ROOT_NAME).write_text('{"format": "something else"}')
    with pytest.raises(IncompleteError, match="root 1"):
        Container.open(split.home, [tmp_path / "x" / "a"])


@pytest.mark.parametrize("content", ["", "[", "[]", "null", "7", "[" * 100_000, "\xff"])
def test_a_root_file_that_makes_no_sense_is_damage(split: Built, tmp_path: Path, content: str) -> None:
    (tmp_path / "a" / ROOT_NAME).write_text(content, encoding="latin-1")
    with pytest.raises(DamageError) as caught:
        Container.open(split.home)
    assert caught.value.path == str(tmp_path / "a" / ROOT_NAME)


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", "x"), ("container", "x"), ("container", None), ("root", "x"), ("root", 7), ("number", 2),
     ("number", None), ("version", "1"), ("version", None)],
)  # fmt: skip
def test_a_root_file_that_contradicts_the_manifest_is_damage(
    split: Built, tmp_path: Path, key: str, value: object
) -> None:
    path = tmp_path / "a" / ROOT_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(DamageError, match="contradicts the manifest") as caught:
        Container.open(split.home)
    assert caught.value.path == str(path)


def test_a_newer_root_is_refused_by_number(split: Built, tmp_path: Path) -> None:
    path = tmp_path / "a" / ROOT_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(VersionError, match="version 2"):
        Container.open(split.home)


# --- what is no container, or not a whole one


def test_what_is_no_container_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotAContainerError, match="no such directory"):
        Container.open(tmp_path / "nowhere")
    with pytest.raises(NotAContainerError, match="not a container"):
        Container.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotAContainerError, match=r"A snapshot: repack it first with k3-repack"):
        Container.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotAContainerError):
        Container.open(tmp_path / "file")


def test_an_unfinished_container_opens_only_for_resume(built: Built) -> None:
    (built.home / JOURNAL_NAME).write_bytes(b"")
    Container.open(built.home).close()  # the manifest is written last: with it all is there
    (built.home / MANIFEST_NAME).unlink()
    with pytest.raises(IncompleteError, match="unfinished"):
        Container.open(built.home)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_data_file_of_another_size_is_named(built: Built, number: int) -> None:
    path = built.path(number)
    size = path.stat().st_size
    for now, word in ((size - 1, "truncated"), (0, "truncated"), (size + 1, "too long")):
        os.truncate(path, now)
        with pytest.raises(DamageError, match=word) as caught:
            Container.open(built.home)
        assert caught.value.path == str(path)
        assert caught.value.offset == min(now, size)
    path.unlink()
    with pytest.raises((DamageError, IncompleteError)) as missing:
        Container.open(built.home)
    assert path.name in str(missing.value) or " missing: " in str(missing.value)


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "missing", "empty", "directory"])
def test_a_damaged_catalog_is_found_before_it_is_used(built: Built, damage: str) -> None:
    path = built.home / CATALOG_NAME
    size = path.stat().st_size
    if damage == "flip":
        for offset in range(0, size, 997):
            flip(path, offset)
            with pytest.raises(DamageError, match="catalog does not match its digest"):
                Container.open(built.home)
            flip(path, offset)
        Container.open(built.home).close()
        return
    if damage in ("cut", "longer", "empty"):
        os.truncate(path, {"cut": size - 4096, "longer": size + 1, "empty": 0}[damage])
    else:
        path.unlink()
        if damage == "directory":
            path.mkdir()
    with pytest.raises((DamageError, DriveError), match=r"catalog"):
        Container.open(built.home)


def test_every_flip_in_the_dense_blob_is_found(built: Built) -> None:
    container = Container.open(built.home)
    for entry in built.tensors:
        for extent in (entry.weights, entry.scales):
            if extent is None:
                continue
            for offset in (extent.offset, extent.offset + extent.stored_bytes - 1):
                flip(built.path(0), offset)
                with pytest.raises(DamageError, match="tensor does not match its digest") as caught:
                    container.read_tensor(entry.name)
                assert caught.value.tensor == entry.name
                assert caught.value.path == str(built.path(0))
                assert caught.value.offset == extent.offset
                flip(built.path(0), offset)
        container.read_tensor(entry.name)
    container.close()


def test_a_changed_config_is_found(built: Built) -> None:
    flip(built.home / "config.json", 5)
    container = Container.open(built.home)
    with pytest.raises(DamageError, match=r"config\.json does not match its digest"):
        _ = container.config
    container.close()
    (built.home / "config.json").unlink()
    container = Container.open(built.home)
    with pytest.raises(DamageError, match=r"config\.json"):
        _ = container.config
    container.close()


def test_a_blob_that_shrinks_while_open_is_an_error(built: Built) -> None:
    container = Container.open(built.home)
    os.truncate(built.path(0), 4096)
    with pytest.raises(DriveError):
        container.read_tensor(DENSE[0][0])
    container.close()


def test_a_read_only_directory_is_enough(tmp_path: Path) -> None:
    built = build_container(tmp_path / "home", [tmp_path / "a"], (1, 1))
    before = sorted(tmp_path.rglob("*"))
    with read_only(tmp_path, tmp_path.parent / f"{tmp_path.name}-view") as view:
        with pytest.raises(OSError, match="Read-only"):
            (view / "home" / "x").write_text("")
        container = Container.open(view / "home", [view / "a"])
        for entry in built.tensors:
            container.read_tensor(entry.name)
        assert payload(container, ExpertKey(1, 0)) == built.payloads[ExpertKey(1, 0)]
        container.close()
    assert sorted(tmp_path.rglob("*")) == before, "no lock file, nothing else"


def test_permissions_to_read_are_enough(built: Built, tmp_path: Path) -> None:
    paths = [built.home, *built.home.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = sorted(tmp_path.rglob("*"))
    Container.open(built.home).close()
    assert sorted(tmp_path.rglob("*")) == before
    for path in paths:
        path.chmod(0o755)


def test_a_buffer_is_not_shared_between_tensors(built: Built) -> None:
    container = Container.open(built.home)
    first = container.read_tensor(DENSE[0][0])
    copy = first.data.copy()
    for name, *_ in DENSE:
        container.read_tensor(name)
    assert np.array_equal(first.data, copy)
    assert aligned_buffer(1).ctypes.data % 4096 == 0
    container.close()


@pytest.mark.parametrize("named", ["models--a--b", "models--a--b/snapshots", "models--a--b/snapshots/2"])
def test_shards_that_moved_into_a_download_cache_are_found(named: str, tmp_path: Path) -> None:
    """Under any of the names that a snapshot there can be given; another revision is beside it."""
    built = build_container(tmp_path / "home", in_place=tmp_path / "snapshot")
    cache = tmp_path / "models--a--b" / "snapshots"
    (cache / "1").mkdir(parents=True)
    (tmp_path / "snapshot").rename(cache / "2")
    with pytest.raises(IncompleteError):
        Container.open(built.home, [tmp_path / "models--c--d"])
    container = Container.open(built.home, [tmp_path / named])
    assert container.roots[-1].directory == cache / "2"
    assert unused_places(container.roots, [tmp_path / named]) == []
    container.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_download_cache_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build_container(tmp_path / "home", in_place=tmp_path / "snapshot")
    cache = tmp_path / "models--a--b" / "snapshots"
    cache.mkdir(parents=True)
    scandir = os.scandir

    def refusing(path: Path) -> Any:
        if path == cache:
            raise OSError(number, os.strerror(number), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    Container.open(built.home, [tmp_path / "models--a--b"]).close()  # every root is elsewhere
    (tmp_path / "snapshot").rename(cache / "1")
    with pytest.raises(DriveError, match=os.strerror(number)) as caught:
        Container.open(built.home, [tmp_path / "models--a--b"])
    assert caught.value.path == str(cache)
    result = CliRunner().invoke(verify_main, [str(built.home), "--dirs", str(tmp_path / "models--a--b")])
    assert result.exit_code == 6, result.output
    assert "unreadable: root 1" in result.stdout
    assert str(cache) in result.stdout


def test_places_without_a_root_are_known(split: Built, tmp_path: Path) -> None:
    container = Container.open(split.home, [tmp_path / "a", tmp_path / "misspelt", tmp_path])
    assert unused_places(container.roots, [tmp_path / "a", tmp_path / "misspelt", tmp_path]) == [
        tmp_path / "misspelt", tmp_path,
    ]  # fmt: skip
    (tmp_path / "link").symlink_to(tmp_path / "b")
    assert unused_places(container.roots, [tmp_path / "link"]) == []
    container.close()
