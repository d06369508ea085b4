"""Holds up that a catalog's bytes, whatever they are, give records or a DamageError, and never another answer."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base.errors import ContainerError, DamageError, K3Error
from k3.base.page_tree import PageTree
from k3.container.catalog import CatalogLayer, CatalogReader, CatalogTensor, expert_layout, write_catalog
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import pack_piece
from k3.container.manifest import DataFile
from k3.model.keys import Encoding
from tests.support.mutants import MUTATIONS, mutated

EXPERTS = 300
PATH = Path("catalog.mdb")


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a catalog with all kinds of pages: branches, leaves, and a record that is longer than a page."""
    path = tmp_path_factory.mktemp("catalog") / "catalog.mdb"
    extents = [
        [CatalogExtent(n % 2, 4096 * (e + 1), 4000, 4096, bytes([n + 1]) * 16) for n in range(2)]
        for e in range(EXPERTS)
    ]
    records = [
        (
            layer,
            expert,
            b"".join(pack_piece(x.file, x.offset, x.payload_bytes, x.stored_bytes, x.digest) for x in of),
        )
        for layer in (1, 2)
        for expert, of in enumerate(extents)
    ]
    parts = [(f"w{n}.weight_{'x' * 40}", "U8", (40, 10)) for n in range(60)]
    layers = [CatalogLayer(layer, EXPERTS, expert_layout(f"layers.{layer}.experts", parts)) for layer in (1, 2)]
    tensors = [CatalogTensor(f"norm.{n}", "BF16", (4,), Encoding.RAW, extents[n][0], None) for n in range(60)]
    files = [DataFile(0, f"x{n}", "dense", 1 << 30, 4096, "0" * 32) for n in range(2)]
    write_catalog(path, files, layers, records, tensors, expected_bytes=1 << 20)
    return path.read_bytes()


def content(data: bytes) -> tuple[object, ...]:
    """Everything that a catalog says, asked for in both ways."""
    reader = CatalogReader(PATH, data)
    experts = list(reader.experts())
    for layer, expert, extents in experts[:: max(1, len(experts) // 40)]:
        assert reader.expert(layer, expert) == extents
    return reader.files(), reader.layers(), reader.tensors(), experts


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_mutated_catalog_is_damage_or_says_what_lmdb_would(catalog: bytes, kind: str) -> None:
    outcomes = {"read": 0, "refused": 0}
    messages = []
    for number in range(75):
        data = mutated(catalog, kind, random.Random(f"{kind}/{number}"))
        try:
            content(data)
        except ContainerError as error:
            messages.append(str(error))
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
    assert outcomes["refused"] > 10, outcomes
    assert all(message.isprintable() and len(message) < 1500 for message in messages)


def test_lookups_of_a_mutated_catalog_are_records_or_damage(catalog: bytes) -> None:
    """An engine looks up some experts and never walks the whole tree."""
    for number in range(300):
        data = mutated(catalog, "page heads", random.Random(number))
        try:
            reader = CatalogReader(PATH, data)
            for expert in range(0, EXPERTS, 37):
                reader.expert(1, expert)
        except DamageError:
            continue


@given(st.dictionaries(st.binary(min_size=1, max_size=80), st.binary(max_size=9000), max_size=90), st.data())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_tree_is_the_one_that_lmdb_wrote(
    tmp_path_factory: pytest.TempPathFactory, records: dict[bytes, bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tree") / "t.mdb"
    gone = data.draw(st.sets(st.sampled_from(sorted(records) or [b"x"])))
    environment = lmdb.open(str(path), subdir=False, lock=False, max_dbs=2, map_size=1 << 22)
    handle = environment.open_db(b"db")
    for key, value in records.items():
        with environment.begin(write=True, db=handle) as transaction:
            transaction.put(key, value)
    with environment.begin(write=True, db=handle) as transaction:
        for key in gone:
            transaction.delete(key)
    environment.close()
    left = {key: value for key, value in records.items() if key not in gone}
    database = PageTree(path.read_bytes(), path).database(b"db")
    assert database is not None
    assert list(database.items()) == sorted(left.items())
    assert all(database.get(key) == left.get(key) for key in [*records, b"\0", b"\xff" * 81])


def test_a_tree_that_leads_back_to_itself_ends(catalog: bytes) -> None:
    """Each page's number is right, and a branch leads to itself: a forger's, with a right digest."""
    pages = range(2, len(catalog) // 4096)
    branch = next(page for page in pages if catalog[page * 4096 + 10] == 1)
    data = bytearray(catalog)
    node = int.from_bytes(data[branch * 4096 + 18 : branch * 4096 + 20], "little")
    data[branch * 4096 + node : branch * 4096 + node + 4] = branch.to_bytes(4, "little")
    with pytest.raises(DamageError):
        content(bytes(data))


def test_a_catalog_that_is_cut_while_it_is_read_is_no_matter(catalog: bytes, tmp_path: Path) -> None:
    path = tmp_path / "catalog.mdb"
    path.write_bytes(catalog)
    reader = CatalogReader(path)
    os.truncate(path, 0)
    assert len(list(reader.experts())) == 2 * EXPERTS
    assert reader.expert(2, 7) is not None


RECORDS: dict[str, list[dict[str, Any]]] = {
    "layers": [{"block": 1}, {"experts": -1}, {"experts": True}, {"experts": 1 << 21}, {"parts": {}},
               {"parts": [1]}, {"parts": [{}]}, {"block": "a\x1bb"},
               {"parts": [{"name": "w", "dtype": "Q9", "shape": []}]},
               {"parts": [{"name": "w", "dtype": "U8", "shape": [1 << 62]}]}],
    "tensors": [{"name": None}, {"dtype": []}, {"shape": "xy"}, {"shape": [-1]}, {"shape": [0.5]}, {"encoding": 3},
                {"encoding": "int5"}, {"weights": None}, {"weights": {"file": 0}}, {"scales": [1]},
                {"weights": {"file": "0", "offset": 0, "payload": 0, "stored": 0, "digest": "0" * 32}},
                {"weights": {"file": 0, "offset": 1 << 63, "payload": 0, "stored": 0, "digest": "0" * 32}},
                {"weights": {"file": 0, "offset": 0, "payload": 9, "stored": 0, "digest": "0" * 32}},
                {"weights": {"file": 0, "offset": 0, "payload": 0, "stored": 0, "digest": "0x" * 16}}],
    "files": [{"root": None}, {"path": 7}, {"path": "\u202e"}, {"bytes": 1e9}, {"header_digest": 0}, {"kind": []}],
}  # fmt: skip


@pytest.mark.parametrize("database", RECORDS)
def test_a_record_with_a_right_digest_and_a_wrong_field_is_damage(
    catalog: bytes, tmp_path: Path, database: str
) -> None:
    for change in [*RECORDS[database], None]:
        path = tmp_path / "c.mdb"
        path.write_bytes(catalog)
        environment = lmdb.open(str(path), subdir=False, lock=False, max_dbs=4)
        handle = environment.open_db(database.encode(), create=False)
        with environment.begin(write=True, db=handle) as transaction:
            key, value = next(iter(transaction.cursor()))
            record = {} if change is None else {**json.loads(value), **change}
            transaction.put(bytes(key), json.dumps(record).encode())
        environment.close()
        reader = CatalogReader(path)
        with pytest.raises(DamageError, match=f"of {database}") as caught:
            getattr(reader, database)()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("data", [b"", b"x" * 8192, bytes(8192), b"\xff" * 20000])
def test_what_is_no_tree_is_damage(data: bytes) -> None:
    with pytest.raises(K3Error):
        CatalogReader(PATH, data)
