"""Holds up docs/container.md section 7: its blocks are the bytes, by the page's own rules and by our code."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file

from k3.base import checksum
from k3.container.catalog import CatalogLayer, expert_layout, write_catalog
from k3.container.layout import cut_expert, expert_file_layout, expert_file_name, pack_piece, unpack_pieces
from k3.container.manifest import DataFile

PAGE = (Path(__file__).parents[2] / "docs" / "container.md").read_text(encoding="utf-8")
PAYLOADS = (bytes(range(1, 23)), bytes(range(101, 123)))
PARTS = (("w1.weight_packed", "U8", (2, 8)), ("w1.weight_scale", "U8", (2, 1)), ("w2.weight_packed", "U8", (1, 4)))


def block(name: str) -> str:
    """Return the content of the page's fenced block with this name."""
    found = re.findall(rf"^```\w+ worked-example-{name}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, name
    return str(found[0])


def header_json() -> bytes:
    return block("header").replace("\n", "").encode()


def records() -> tuple[str, list[bytes], list[bytes]]:
    """Return the header's digest, the experts' keys and their records, as the page prints them."""
    text = block("records")
    digests = re.findall(r"digest ([0-9a-f]+)", text)
    keys = [bytes.fromhex(item) for item in re.findall(r"key +([0-9a-f]+)", text)]
    values = [bytes.fromhex(item) for item in re.findall(r"record ([0-9a-f ]+)", text)]
    assert len(digests) == 1
    return digests[0], keys, values


def file_by_the_page() -> bytes:
    """Return the file made from the page's block and prose alone, without our code."""
    text = header_json()
    header = struct.pack("<Q", 4088) + text + b" " * (4088 - len(text))
    return header + b"".join(payload + bytes(4096 - len(payload)) for payload in PAYLOADS)


def test_the_prose_gives_the_numbers_of_the_example() -> None:
    text = header_json()
    assert len(text) == 824
    assert "The JSON has 824 bytes" in PAGE
    length = struct.pack("<Q", 4096 - 8)
    assert f"reads `{length.hex(' ')}` (4088)" in " ".join(PAGE.split())
    assert len(file_by_the_page()) == 12288
    assert "file has 12288 bytes" in " ".join(PAGE.split())
    assert (2 * 4284 * 7 + 10) // 20 == 2999
    assert [piece.stored_bytes // 4096 for piece in cut_expert(17_547_264, (7, 3))] == [2999, 1285]


def test_records_follow_from_the_pages_table() -> None:
    digest, keys, values = records()
    data = file_by_the_page()
    assert digest == xxhash.xxh3_128(data[:4096]).digest().hex()
    assert keys == [struct.pack(">II", 1, 0), struct.pack(">II", 1, 1)]
    for expert, value in enumerate(values):
        start = 4096 * (1 + expert)
        stored = data[start : start + 4096]
        expected = struct.pack("<IIQQQ", 1, 0, start, 22, 4096) + xxhash.xxh3_128(stored).digest()
        assert value == expected
        assert len(value) == 48


def test_our_layout_gives_the_same_bytes(tmp_path: Path) -> None:
    layout = expert_layout("model.layers.1.block_sparse_moe.experts", PARTS)
    built = expert_file_layout(layout, 2, cut_expert(layout.payload_bytes, (1,)), 0)
    data = file_by_the_page()
    assert built.header == data[: len(built.header)]
    assert built.size_bytes == len(data)
    digest, _, values = records()
    assert checksum.digest(built.header).hex() == digest
    for (offset, payload, stored), content, value in zip(built.extents, PAYLOADS, values, strict=True):
        assert data[offset : offset + stored] == content + bytes(stored - payload)
        packed = pack_piece(1, offset, payload, stored, checksum.digest(data[offset : offset + stored]))
        assert packed == value
        assert unpack_pieces(value) == [(1, offset, payload, stored, value[32:])]
    path = tmp_path / "layer.safetensors"
    path.write_bytes(data)
    tensors = load_file(path)
    assert list(json.loads(header_json())) == [name for group in grouped(tensors) for name in group]
    first = tensors["model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"]
    assert np.array_equal(first, np.arange(1, 17, dtype=np.uint8).reshape(2, 8))


def grouped(tensors: dict[str, np.ndarray[Any, Any]]) -> list[list[str]]:
    """Return the file's tensors in storage order: by expert, its padding after it."""
    groups = []
    for expert in range(2):
        block_name = f"model.layers.1.block_sparse_moe.experts.{expert}."
        groups.append([*sorted(name for name in tensors if name.startswith(block_name)), f"__pad__.{expert}"])
    assert sum(map(len, groups)) == len(tensors)
    return groups


def test_our_catalog_holds_the_pages_keys_and_values(tmp_path: Path) -> None:
    _, keys, values = records()
    layout = expert_layout("model.layers.1.block_sparse_moe.experts", PARTS)
    files = [
        DataFile(0, "dense.safetensors", "dense", 4096, 4096, "0" * 32),
        DataFile(0, expert_file_name(1), "experts", 12288, 4096, records()[0]),
    ]
    experts = [(1, expert, value) for expert, value in enumerate(values)]
    path = tmp_path / "catalog.mdb"
    write_catalog(path, files, [CatalogLayer(1, 2, layout)], experts, [], expected_bytes=4096)
    assert not (tmp_path / "catalog.mdb-lock").exists()
    environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False, max_dbs=4)
    with environment.begin() as transaction:
        database = environment.open_db(b"experts", txn=transaction, create=False)
        assert list(transaction.cursor(database)) == list(zip(keys, values, strict=True))
        database = environment.open_db(b"layers", txn=transaction, create=False)
        layer = block("layer").replace("\n", "").encode()
        assert list(transaction.cursor(database)) == [(bytes.fromhex("00000001"), layer)]
    environment.close()


@pytest.mark.parametrize("name", ["header", "layer", "records"])
def test_no_placeholder_is_left(name: str) -> None:
    assert "@@" not in block(name)
