"""catalog.mdb: every extent and digest of a container, memory-mapped. Written once, in key order.

`docs/container.md` section 4 is the specification. Opening parses nothing, so it costs the same for 16 experts
and for 82,432. `CatalogReader` may be used from any thread; each call is a short read transaction.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from k3.container.direct import drive_error
from k3.container.errno_advice import Operation
from k3.container.errors import ContainerError, DamageError, K3Error
from k3.container.free_space import free_bytes
from k3.container.keys import Encoding, ExpertLayout, ExpertPart, tensor_bytes
from k3.container.layout import EXPERT_KEY, NUMBER_KEY, unpack_pieces
from k3.container.manifest import DataFile

_DATABASES = (b"files", b"layers", b"experts", b"tensors")
_SPARE_BYTES = 1 << 20


_mapped: dict[tuple[int, int], _Map] = {}
_mapped_lock = threading.RLock()
"""Catalogs that are open, by device and inode: LMDB maps a file once per process, so readers share the map."""


@dataclass(slots=True)
class _Map:
    environment: Any
    databases: dict[bytes, Any]
    readers: int = 0


@dataclass(frozen=True, slots=True)
class CatalogExtent:
    """An extent as catalogued: `file` is a number, resolved by the reader."""

    file: int
    offset: int
    payload_bytes: int
    stored_bytes: int
    digest: bytes

    def as_json(self) -> dict[str, Any]:
        """The extent inside a `tensors` record."""
        return {
            "file": self.file, "offset": self.offset, "payload": self.payload_bytes,
            "stored": self.stored_bytes, "digest": self.digest.hex(),
        }  # fmt: skip

    @staticmethod
    def from_json(item: dict[str, Any]) -> CatalogExtent:
        """The inverse of `as_json`; KeyError, TypeError or ValueError when the record is not one."""
        return CatalogExtent(
            item["file"], item["offset"], item["payload"], item["stored"], bytes.fromhex(item["digest"])
        )


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
    """The expert layout of one layer."""

    layer: int
    experts: int
    layout: ExpertLayout


def expert_layout(block: str, parts: Iterable[tuple[str, str, tuple[int, ...]]]) -> ExpertLayout:
    """An ExpertLayout from (name, dtype, shape) in payload order: offsets follow from the sizes."""
    built = []
    offset = 0
    for name, dtype, shape in parts:
        nbytes = tensor_bytes(dtype, shape)
        built.append(ExpertPart(name, dtype, shape, offset, nbytes))
        offset += nbytes
    return ExpertLayout(block, tuple(built))


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
    keys and values, from which the map is sized. Equal input gives an equal file. SpaceError or DriveError when
    the drive does not take it.
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
    path.unlink(missing_ok=True)
    environment = lmdb.open(
        os.fspath(path), subdir=False, lock=False, max_dbs=len(_DATABASES), meminit=True,
        map_size=map_bytes, sync=True,
    )  # fmt: skip
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
                value = {"block": entry.layout.block, "experts": entry.experts, "parts": parts}
                _append(transaction, handles[b"layers"], NUMBER_KEY.pack(entry.layer), _json(value))
            for layer, expert, record in experts:
                _append(transaction, handles[b"experts"], EXPERT_KEY.pack(layer, expert), record)
            for position, tensor in enumerate(tensors):
                _append(transaction, handles[b"tensors"], NUMBER_KEY.pack(position), _json(_record(tensor)))
        environment.sync(True)
    finally:
        environment.close()


def lmdb_error(problem: str, error: lmdb.Error, path: Path) -> K3Error:
    """The typed error for what LMDB could not do with a file; a full drive gets its own class."""
    number = getattr(error, "code", None)
    if number is None:  # py-lmdb before 1.6 tells the number in words only
        number = next((n for n in sorted(errno.errorcode) if str(error).endswith(f": {os.strerror(n)}")), None)
    if isinstance(number, int) and number > 0:
        if number == errno.EIO and _is_full(path):
            number = errno.ENOSPC  # LMDB says EIO when a write came out short
        return drive_error(problem, OSError(number, os.strerror(number)), path, operation=Operation.MAP)
    return DamageError(f"{problem}: {error}", path=path, advice="Restore it from a copy, or repack")


def refuse_cut_map(environment: Any, path: Path) -> None:
    """DamageError when a file is shorter than its own tree: a read through the map would end the process."""
    needed_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    size_bytes = path.stat().st_size
    if size_bytes < needed_bytes:
        raise DamageError(f"file is truncated: {size_bytes} bytes instead of {needed_bytes}", path=path)


def _is_full(path: Path) -> bool:
    free = free_bytes(path.parent)
    return free is not None and free < _SPARE_BYTES


def _map(path: Path) -> tuple[tuple[int, int], _Map]:
    """The map of a catalog, shared with whoever has it open already."""
    with _mapped_lock:
        try:
            status = path.stat()
        except OSError as error:
            raise drive_error("cannot open the catalog", error, path) from error
        if status.st_size == 0:
            raise DamageError("catalog is empty", path=path, advice="Restore it from a copy, or repack")
        key = (status.st_dev, status.st_ino)
        if key not in _mapped:
            _mapped[key] = _open(path)
        _mapped[key].readers += 1
        return key, _mapped[key]


def _open(path: Path) -> _Map:
    environment = lmdb.open(
        os.fspath(path), subdir=False, readonly=True, lock=False, create=False,
        max_dbs=len(_DATABASES), readahead=False,
    )  # fmt: skip
    try:
        refuse_cut_map(environment, path)
        return _Map(environment, {name: environment.open_db(name, create=False) for name in _DATABASES})
    except BaseException:
        environment.close()
        raise


def _unmap(key: tuple[int, int]) -> None:
    with _mapped_lock:
        _mapped[key].readers -= 1
        if _mapped[key].readers == 0:
            _mapped.pop(key).environment.close()


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
    """Address space for a tree of this content: pages half full at worst, plus room for the small databases."""
    return -(-(content_bytes * 3 + _SPARE_BYTES) // 4096) * 4096


class CatalogReader:
    """A catalog opened read-only; works on a read-only directory. DamageError when it is not one.

    Any number of readers of one file may be open in a process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            key, shared = _map(path)
        except lmdb.NotFoundError as error:
            raise DamageError(f"catalog lacks a database: {error}", path=path) from error
        except lmdb.Error as error:
            raise lmdb_error("catalog cannot be opened", error, path) from error
        self._environment, self._databases = shared.environment, shared.databases
        self._release = weakref.finalize(self, _unmap, key)

    def close(self) -> None:
        """Let go of the map; the last reader of a file unmaps it. A second call does nothing."""
        self._release()

    def files(self) -> list[DataFile]:
        """All data files in number order."""
        return [DataFile(**item) for _, item in self._json_records(b"files")]

    def layers(self) -> dict[int, CatalogLayer]:
        """Every expert layer's layout, ascending."""
        found = {}
        for key, item in self._json_records(b"layers"):
            parts = [(part["name"], part["dtype"], tuple(part["shape"])) for part in item["parts"]]
            layer = NUMBER_KEY.unpack(key)[0]
            found[layer] = CatalogLayer(layer, item["experts"], expert_layout(item["block"], parts))
        return found

    def tensors(self) -> list[CatalogTensor]:
        """Every dense tensor in execution order."""
        return [
            CatalogTensor(
                item["name"],
                item["dtype"],
                tuple(item["shape"]),
                Encoding(item["encoding"]),
                CatalogExtent.from_json(item["weights"]),
                None if item["scales"] is None else CatalogExtent.from_json(item["scales"]),
            )
            for _, item in self._json_records(b"tensors")
        ]

    def expert(self, layer: int, expert: int) -> list[CatalogExtent] | None:
        """An expert's extents in payload order, None when the catalog has no such expert."""
        with self._environment.begin(db=self._databases[b"experts"]) as transaction:
            value = transaction.get(EXPERT_KEY.pack(layer, expert))
        return None if value is None else self._unpack(value, layer, expert)

    def experts(self) -> Iterator[tuple[int, int, list[CatalogExtent]]]:
        """Every expert in (layer, id) order."""
        with self._environment.begin(db=self._databases[b"experts"]) as transaction:
            for key, value in transaction.cursor():
                layer, expert = EXPERT_KEY.unpack(key)
                yield layer, expert, self._unpack(value, layer, expert)

    def _unpack(self, value: bytes, layer: int, expert: int) -> list[CatalogExtent]:
        try:
            return [CatalogExtent(*fields) for fields in unpack_pieces(value)]
        except ValueError as error:
            raise ContainerError(str(error), path=self.path, layer=layer, expert=expert) from error

    def _json_records(self, database: bytes) -> Iterator[tuple[bytes, Any]]:
        with self._environment.begin(db=self._databases[database]) as transaction:
            for key, value in transaction.cursor():
                try:
                    yield bytes(key), json.loads(value)
                except ValueError as error:
                    raise DamageError(f"catalog record is not JSON: {error}", path=self.path) from error
