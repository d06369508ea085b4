"""catalog.mdb: every extent and digest of a container. Written once, in key order; read into memory.

`docs/container.md` section 4 is the specification. LMDB writes the file, but never opens one that another program
may have written: `page_tree` reads it, and `catalog_record` checks every record against the format.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from k3.base.direct_io import drive_error
from k3.base.errno_advice import Operation
from k3.base.errors import ContainerError, DamageError, K3Error
from k3.base.free_space import free_bytes
from k3.base.new_file import create_instead, path_of
from k3.base.page_tree import Database, PageTree
from k3.base.regular_file import read_small_file
from k3.container.catalog_record import OFFSET_MAX, CatalogExtent, CatalogRecord
from k3.container.layout import EXPERT_KEY, NUMBER_KEY, unpack_pieces
from k3.container.manifest import DataFile
from k3.model.keys import EXPERTS_MAX, Encoding, ExpertLayout, ExpertPart, tensor_bytes

_DATABASES = (b"files", b"layers", b"experts", b"tensors")
_SPARE_BYTES = 1 << 20
_RESTORE = "Restore it from a copy, or repack"

CATALOG_BYTES_MAX = 1 << 30
"""Largest catalog that is accepted, since it is read into memory: room for a hundred times K3's experts."""


@dataclass(frozen=True, slots=True)
class CatalogTensor:
    """A dense tensor as catalogued; `dtype` and `shape` are the source's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: Encoding
    weights: CatalogExtent
    scales: CatalogExtent | None


@dataclass(frozen=True, slots=True)
class CatalogLayer:
    """The number and the layout of the experts of one layer."""

    layer: int
    experts: int
    layout: ExpertLayout


def expert_layout(prefix: str, parts: Iterable[tuple[str, str, tuple[int, ...]]]) -> ExpertLayout:
    """Return the layout of parts given as (name, dtype, shape) in payload order.

    Offsets follow from the sizes. Raises KeyError for an unknown dtype.
    """
    built = []
    offset = 0
    for name, dtype, shape in parts:
        nbytes = tensor_bytes(dtype, shape)
        built.append(ExpertPart(name, dtype, shape, offset, nbytes))
        offset += nbytes
    return ExpertLayout(prefix, tuple(built))


def write_catalog(
    path: Path,
    files: Iterable[DataFile],
    layers: Iterable[CatalogLayer],
    experts: Iterable[tuple[int, int, bytes]],
    tensors: Iterable[CatalogTensor],
    *,
    expected_bytes: int,
) -> None:
    """Write a new catalog at `path` in one transaction and make it durable.

    `experts` are (layer, expert, packed records) in ascending order; `expected_bytes` is an upper bound of all
    keys and values, from which the size of the map follows. Equal input gives an equal file. Raises SpaceError or
    DriveError when the drive refuses.
    """
    try:
        _write_catalog(path, files, layers, experts, tensors, _map_bytes(expected_bytes))
    except lmdb.Error as error:
        raise lmdb_error("cannot write the catalog", error, path) from error


def _write_catalog(
    path: Path,
    files: Iterable[DataFile],
    layers: Iterable[CatalogLayer],
    experts: Iterable[tuple[int, int, bytes]],
    tensors: Iterable[CatalogTensor],
    map_bytes: int,
) -> None:
    descriptor = create_instead(path)
    try:
        environment = lmdb.open(
            path_of(descriptor, path), subdir=False, lock=False, max_dbs=len(_DATABASES), meminit=True,
            map_size=map_bytes, sync=True,
        )  # fmt: skip
    finally:
        os.close(descriptor)
    try:
        with environment.begin(write=True) as transaction:
            handles = {name: environment.open_db(name, txn=transaction) for name in _DATABASES}
            for number, file in enumerate(files):
                value = {
                    "root": file.root, "path": file.path, "kind": file.kind, "bytes": file.bytes,
                    "header_bytes": file.header_bytes, "header_digest": file.header_digest,
                }  # fmt: skip
                _append(transaction, handles[b"files"], NUMBER_KEY.pack(number), _json(value))
            for entry in layers:
                parts = [
                    {"name": part.name, "dtype": part.dtype, "shape": list(part.shape)}
                    for part in entry.layout.parts
                ]
                value = {"block": entry.layout.prefix, "experts": entry.experts, "parts": parts}
                _append(transaction, handles[b"layers"], NUMBER_KEY.pack(entry.layer), _json(value))
            for layer, expert, record in experts:
                _append(transaction, handles[b"experts"], EXPERT_KEY.pack(layer, expert), record)
            for position, tensor in enumerate(tensors):
                _append(transaction, handles[b"tensors"], NUMBER_KEY.pack(position), _json(_record(tensor)))
        environment.sync(True)
    finally:
        environment.close()


def lmdb_error(problem: str, error: lmdb.Error, path: Path) -> K3Error:
    """Return the typed error for a failure of LMDB: SpaceError for a full drive, DamageError without an errno."""
    number = getattr(error, "code", None)
    if number is None:  # py-lmdb before 1.6 gives the errno as text only
        number = next((n for n in sorted(errno.errorcode) if str(error).endswith(f": {os.strerror(n)}")), None)
    if isinstance(number, int) and number > 0:
        if number == errno.EIO and _is_full(path):
            number = errno.ENOSPC  # LMDB reports a short write as EIO
        return drive_error(problem, OSError(number, os.strerror(number)), path, operation=Operation.MAP)
    return DamageError(f"{problem}: {error}", path=path, advice=_RESTORE)


def _is_full(path: Path) -> bool:
    free = free_bytes(path.parent)
    return free is not None and free < _SPARE_BYTES


def _record(tensor: CatalogTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "encoding": tensor.encoding.value,
        "weights": tensor.weights.as_json(),
        "scales": None if tensor.scales is None else tensor.scales.as_json(),
    }


def _append(transaction: Any, handle: Any, key: bytes, value: bytes) -> None:
    if not transaction.put(key, value, db=handle, append=True, overwrite=False):
        raise AssertionError("catalog records must be written once, in key order")


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _map_bytes(content_bytes: int) -> int:
    """Return the size of the map for a tree of this content.

    At worst its pages are half full; the small databases need a little more.
    """
    return -(-(content_bytes * 3 + _SPARE_BYTES) // 4096) * 4096


class CatalogReader:
    """A catalog, read into memory once, so that later changes of the file have no effect. Any thread.

    Raises DamageError for a file that is not a catalog; so does every method for a record that is not as the
    format says.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        """Read `path`, or use `data` as its content if the caller has read it already."""
        self.path = path
        if data is None:
            data = read_small_file(path, CATALOG_BYTES_MAX, DamageError, _RESTORE)
        if not data:
            raise DamageError("catalog is empty", path=path, advice=_RESTORE)
        tree = PageTree(data, path)
        if tree.sound_meta_pages < 2:
            raise DamageError("a meta page of the catalog is not valid", path=path, advice=_RESTORE)
        self._databases: dict[bytes, Database] = {}
        for name in _DATABASES:
            database = tree.database(name)
            if database is None:
                raise DamageError(f"catalog lacks a database: {name.decode()}", path=path, advice=_RESTORE)
            self._databases[name] = database

    def close(self) -> None:
        """Drop the content; nothing can be looked up afterwards. A second call does nothing."""
        self._databases = {}

    def files(self) -> list[DataFile]:
        """Return all data files in the order of their numbers."""
        found: list[DataFile] = []
        for number, record in self._numbered(b"files"):
            if number != len(found):
                raise record.refuse(f"is of file {number} where {len(found)} should be")
            found.append(
                DataFile(
                    record.number("root"), record.name("path"), record.name("kind"), record.number("bytes"),
                    record.number("header_bytes"), record.optional("header_digest", record.name),
                )
            )  # fmt: skip
        return found

    def layers(self) -> dict[int, CatalogLayer]:
        """Return the expert layout of every layer that has experts, ascending."""
        found = {}
        for layer, record in self._numbered(b"layers"):
            listed = record.list("parts")
            parts = [(part.name("name"), part.dtype("dtype"), part.shape("shape")) for part in listed]
            layout = expert_layout(record.name("block"), parts)
            found[layer] = CatalogLayer(layer, record.number("experts", EXPERTS_MAX), layout)
        return found

    def tensors(self) -> list[CatalogTensor]:
        """Return every dense tensor in execution order."""
        found: list[CatalogTensor] = []
        for position, record in self._numbered(b"tensors"):
            if position != len(found):
                raise record.refuse(f"is of position {position} where {len(found)} should be")
            found.append(
                CatalogTensor(
                    record.name("name"),
                    record.dtype("dtype"),
                    record.shape("shape"),
                    record.encoding("encoding"),
                    record.extent("weights"),
                    record.optional("scales", record.extent),
                )
            )
        return found

    def expert(self, layer: int, expert: int) -> list[CatalogExtent] | None:
        """Return an expert's extents in payload order, None when the catalog has no such expert."""
        value = self._databases[b"experts"].get(EXPERT_KEY.pack(layer, expert))
        return None if value is None else self._unpack(value, layer, expert)

    def experts(self) -> Iterator[tuple[int, int, list[CatalogExtent]]]:
        """Yield (layer, id, extents) of every expert in that order; each is the one that `expert` finds."""
        for key, value in self._databases[b"experts"].items():
            if len(key) != EXPERT_KEY.size:
                raise DamageError(f"catalog has a key of {len(key)} bytes among the experts", path=self.path)
            layer, expert = EXPERT_KEY.unpack(key)
            yield layer, expert, self._unpack(value, layer, expert)

    def _unpack(self, value: bytes, layer: int, expert: int) -> list[CatalogExtent]:
        try:
            extents = [CatalogExtent(*fields) for fields in unpack_pieces(value)]
        except ValueError as error:
            raise ContainerError(str(error), path=self.path, layer=layer, expert=expert) from error
        if any(extent.offset + extent.stored_bytes > OFFSET_MAX for extent in extents):
            raise ContainerError("expert lies beyond every file", path=self.path, layer=layer, expert=expert)
        return extents

    def _numbered(self, database: bytes) -> Iterator[tuple[int, CatalogRecord]]:
        """Yield the number and the record of every entry of a database whose keys are numbers."""
        for key, value in self._databases[database].items():
            what = f"catalog record {key.hex()[:80]} of {database.decode()}"
            if len(key) != NUMBER_KEY.size:
                raise DamageError(f"{what} has a key of {len(key)} bytes", path=self.path)
            yield NUMBER_KEY.unpack(key)[0], CatalogRecord.parse(value, what, self.path)
