"""Holds up catalog.mdb: what is written is read, equal content is an equal file, damage is an error, no crash."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base.errors import ContainerError, DamageError, DriveError, K3Error, SpaceError
from k3.container.catalog import (
    CatalogLayer,
    CatalogReader,
    CatalogTensor,
    expert_layout,
    lmdb_error,
    write_catalog,
)
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import pack_piece
from k3.container.manifest import DataFile
from k3.model.keys import DTYPE_BITS, Encoding
from tests.support.mounts import small_tmpfs

Table: TypeAlias = dict[int, tuple[str, list[tuple[str, str, tuple[int, ...]]], list[list[CatalogExtent]]]]
"""Of each layer: the prefix of its experts' names, its parts, and the extents of each expert."""

_digests = st.binary(min_size=16, max_size=16)
_sizes = st.integers(0, 2**48)
_extents = st.builds(
    lambda file, offset, payload, pad, digest: CatalogExtent(file, offset, payload, payload + pad, digest),
    st.integers(0, 300), _sizes, _sizes, st.integers(0, 4095), _digests,
)  # fmt: skip
_shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
_names = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
_tensors = st.builds(
    CatalogTensor, _names, st.sampled_from(sorted(DTYPE_BITS)), _shapes, st.sampled_from(Encoding), _extents,
    st.none() | _extents,
)  # fmt: skip
_files = st.builds(
    DataFile, st.integers(0, 9), _names, st.sampled_from(["experts", "dense", "source"]), _sizes, _sizes,
    st.none() | _digests.map(bytes.hex),
)  # fmt: skip
_parts = st.lists(st.tuples(_names, st.sampled_from(sorted(DTYPE_BITS)), _shapes), max_size=7)
_layer_tables = st.dictionaries(
    st.integers(0, 2**32 - 1),
    st.tuples(_names, _parts, st.lists(st.lists(_extents, min_size=1, max_size=7), max_size=5)),
    max_size=4,
)


def packed(extents: list[CatalogExtent]) -> bytes:
    return b"".join(pack_piece(e.file, e.offset, e.payload_bytes, e.stored_bytes, e.digest) for e in extents)


def write(
    path: Path, files: list[DataFile], table: Table, tensors: list[CatalogTensor], expected_bytes: int = 1 << 20
) -> None:
    layers = [
        CatalogLayer(number, len(experts), expert_layout(prefix, parts))
        for number, (prefix, parts, experts) in sorted(table.items())
    ]
    records = [
        (number, expert, packed(extents))
        for number, (_, _, experts) in sorted(table.items())
        for expert, extents in enumerate(experts)
    ]
    write_catalog(path, files, layers, records, tensors, expected_bytes=expected_bytes)


@given(st.lists(_files, max_size=5), _layer_tables, st.lists(_tensors, max_size=6))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read_and_equal_content_is_an_equal_file(
    tmp_path_factory: pytest.TempPathFactory, files: list[DataFile], table: Table, tensors: list[CatalogTensor]
) -> None:
    place = tmp_path_factory.mktemp("catalog")
    write(place / "a.mdb", files, table, tensors)
    reader = CatalogReader(place / "a.mdb")
    assert reader.files() == files
    assert reader.tensors() == tensors
    layers = reader.layers()
    assert list(layers) == sorted(table)
    wanted = []
    for number, (prefix, parts, experts) in sorted(table.items()):
        assert layers[number] == CatalogLayer(number, len(experts), expert_layout(prefix, parts))
        for expert, extents in enumerate(experts):
            assert reader.expert(number, expert) == extents
            wanted.append((number, expert, extents))
        assert reader.expert(number, len(experts)) is None
    assert list(reader.experts()) == wanted
    reader.close()
    write(place / "b.mdb", files, table, tensors)
    assert (place / "a.mdb").read_bytes() == (place / "b.mdb").read_bytes()
    assert sorted(p.name for p in place.iterdir()) == ["a.mdb", "b.mdb"]


def test_an_older_file_at_the_place_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "c.mdb"
    write(path, [], {1: ("block", [], [[EXTENT]] * 50)}, [])
    write(path, [], {}, [])
    small = path.read_bytes()
    path.unlink()
    write(path, [], {}, [])
    assert path.read_bytes() == small


EXTENT = CatalogExtent(1, 4096, 5, 4096, bytes(range(16)))
NAME = "model.layers.7." + "漢" * 380
"""As long as a tensor name may be, and three bytes a character."""


def test_the_longest_names_fit_the_map_that_the_publisher_asks_for(tmp_path: Path) -> None:
    tensors = [CatalogTensor(f"{NAME}{n:05}", "BF16", (1, 2), Encoding.INT8, EXTENT, EXTENT) for n in range(3000)]
    write(tmp_path / "c.mdb", [], {}, tensors, expected_bytes=3000 * 4096)
    reader = CatalogReader(tmp_path / "c.mdb")
    assert len(reader.tensors()) == 3000
    reader.close()


@pytest.mark.parametrize("records", [[(1, 1, b"x"), (1, 0, b"x")], [(1, 0, b"x"), (1, 0, b"y")]])
def test_records_out_of_order_or_twice_are_a_programmers_error(
    tmp_path: Path, records: list[tuple[int, int, bytes]]
) -> None:
    with pytest.raises((AssertionError, lmdb.Error, K3Error)):
        write_catalog(tmp_path / "c.mdb", [], [], records, [], expected_bytes=1000)


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    path = tmp_path / "catalog.mdb"
    tensor = CatalogTensor("norm", "BF16", (4,), Encoding.RAW, EXTENT, None)
    files = [DataFile(0, "x", "dense", 1, 1, None)]
    write(path, files, {1: ("b", [("w", "U8", (5,))], [[EXTENT]] * 400)}, [tensor])
    return path


def test_several_readers_share_a_file_and_close_one_by_one(catalog: Path, tmp_path: Path) -> None:
    (tmp_path / "link.mdb").symlink_to(catalog)
    os.link(catalog, tmp_path / "other.mdb")
    readers = [CatalogReader(path) for path in (catalog, tmp_path / "link.mdb", tmp_path / "other.mdb", catalog)]
    for closed in range(len(readers)):
        assert all(reader.expert(1, 5) == [EXTENT] for reader in readers[closed:])
        readers[closed].close()
    again = CatalogReader(catalog)
    assert len(list(again.experts())) == 400
    again.close()
    again.close()
    for _ in range(3):  # a reader that nobody closed lets go by itself
        CatalogReader(catalog)
    os.truncate(catalog, 0)
    write(catalog, [], {}, [])


def test_a_reader_of_a_replaced_file_keeps_the_old_one(catalog: Path, tmp_path: Path) -> None:
    old = CatalogReader(catalog)
    write(tmp_path / "new.mdb", [], {}, [])
    (tmp_path / "new.mdb").replace(catalog)
    new = CatalogReader(catalog)
    assert (len(list(old.experts())), len(list(new.experts()))) == (400, 0)
    old.close()
    new.close()


def test_readers_work_from_many_threads_at_once(catalog: Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(60):
                reader = CatalogReader(catalog)
                assert all(reader.expert(1, expert) == [EXTENT] for expert in range(0, 400, 7))
                assert len(reader.tensors()) == 1
                reader.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def cuts(path: Path) -> Iterator[int]:
    size = path.stat().st_size
    yield from (0, 1, 31, 4095, 4096, 8191, 8192, 12288, size - 4096, size - 1)


@pytest.mark.parametrize("number", range(10))
def test_a_cut_catalog_is_damage_and_no_crash(catalog: Path, number: int) -> None:
    os.truncate(catalog, list(cuts(catalog))[number])
    with pytest.raises(DamageError, match=r"catalog|truncated"):
        CatalogReader(catalog)


@pytest.mark.parametrize("content", [bytes(8192), b"x" * 8192, b"SQLite format 3\0" * 1000])
def test_what_is_no_catalog_is_damage(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.mdb"
    path.write_bytes(content)
    with pytest.raises(DamageError):
        CatalogReader(path)


def test_another_lmdb_file_lacks_the_databases(tmp_path: Path) -> None:
    path = tmp_path / "c.mdb"
    lmdb.open(str(path), subdir=False, lock=False).close()
    with pytest.raises(DamageError, match="lacks a database"):
        CatalogReader(path)


def test_a_missing_catalog_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamageError, match=r"nowhere\.mdb"):
        CatalogReader(tmp_path / "nowhere.mdb")


def test_a_broken_expert_record_names_its_expert(tmp_path: Path) -> None:
    path = tmp_path / "c.mdb"
    write_catalog(path, [], [], [(3, 9, b"short")], [], expected_bytes=1000)
    reader = CatalogReader(path)
    with pytest.raises(ContainerError) as caught:
        reader.expert(3, 9)
    assert (caught.value.layer, caught.value.expert) == (3, 9)
    with pytest.raises(ContainerError):
        list(reader.experts())
    reader.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("coded", [True, False])
def test_refusals_of_the_system_are_told_from_damage(tmp_path: Path, number: int, coded: bool) -> None:
    error = lmdb.Error(f"/x: {os.strerror(number)}")
    if coded:
        object.__setattr__(error, "code", number)
    found = lmdb_error("cannot write", error, tmp_path / "x.mdb")
    assert type(found) is (SpaceError if number in (errno.ENOSPC, errno.EDQUOT) else DriveError)
    assert os.strerror(number) in found.problem
    assert type(lmdb_error("p", lmdb.CorruptedError("MDB_CORRUPTED"), tmp_path / "x.mdb")) is DamageError


def test_a_full_drive_is_a_space_error(tmp_path: Path) -> None:
    with (
        small_tmpfs(tmp_path / "drive", "256k") as drive,
        pytest.raises(SpaceError, match="cannot write the catalog"),
    ):
        write(drive / "c.mdb", [], {1: ("b", [], [[EXTENT] * 6] * 5000)}, [], expected_bytes=2 << 20)
