"""The last steps of a repack: headers and names for the data files, small files, the catalog, the manifest.

Each step is durable before the next begins (docs/container.md section 5); each can be repeated after a crash and
gives the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from k3.base import checksum
from k3.base.direct_io import ReadFile, WriteFile, aligned_buffer, drive_error, sync_directory, sync_file
from k3.base.errno_advice import Operation
from k3.base.errors import DriveError
from k3.base.new_file import create_instead
from k3.base.pages import PAGE_BYTES
from k3.base.presence import is_there
from k3.checkpoint.snapshot import Snapshot
from k3.container.catalog import CatalogLayer, CatalogTensor, write_catalog
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import (
    PARTIAL_SUFFIX,
    PIECE_RECORD,
    ROOT_FORMAT,
    ROOT_NAME,
    VERSION,
    pack_piece,
)
from k3.container.manifest import DataFile, Geometry, Manifest, Root, SmallFile, SourceShard, content_identity
from k3.model.keys import layer_of
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME
from k3.repack.journal import Journal
from k3.repack.plan import Plan, PlannedExtent
from k3.repack.small_files import SmallFiles

_RECORD_BYTES_MAX = 4096
"""A JSON record of the catalog with the longest name that a header may have."""


def finish_data_files(plan: Plan, directories: Mapping[int, Path], *, direct: bool) -> None:
    """Write each data file's header, make it durable and give it its name. Files that are so already stay."""
    touched = set()
    for number, file in enumerate(plan.files):
        if file.kind == "source":
            continue
        final = directories[file.root] / file.path
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        header = plan.header(number)
        if is_there(final) and not is_there(partial):
            if _is_finished(final, file.size_bytes, header):
                continue
            _rename(final, partial)
        buffer = aligned_buffer(len(header))
        buffer[: len(header)] = np.frombuffer(header, np.uint8)
        with WriteFile(partial, file.size_bytes, direct=direct) as opened:
            opened.write(0, buffer[: len(header)])
            opened.sync()
        _rename(partial, final)
        touched.add(final.parent)
    for directory in sorted(touched):
        sync_directory(directory)


def _is_finished(path: Path, size_bytes: int, header: bytes) -> bool:
    """Return whether a file that has its name has its size and header too; its extents were checked before."""
    try:
        with ReadFile(path) as file:
            stored = file.read(0, len(header), aligned_buffer(len(header)))
            return file.size_bytes == size_bytes and stored.tobytes() == header
    except DriveError:
        return False


def publish(
    plan: Plan,
    directories: Mapping[int, Path],
    journal: Journal,
    probes: Mapping[int, int],
    small_files: SmallFiles,
) -> Manifest:
    """Write small files, root files, catalog and manifest; the container is complete when this returns."""
    home = directories[0]
    texts = [write_small(home / small.name, small.data) for small in small_files.files]
    shards = tuple(
        SourceShard(shard.name, shard.size_bytes, journal.shards[shard.name].sha256)
        for shard in plan.snapshot.shards
    )
    quantization = {
        "bits": plan.recipe.bits, "mla_bits": plan.recipe.mla_bits, "head_bits": plan.recipe.head_bits
    }  # fmt: skip
    layers = layer_ranges(plan)
    kinds = [(root.kind, root.share) for root in plan.roots]
    container = checksum.container_uuid(content_identity(shards, quantization, layers, kinds))
    roots = _write_roots(plan, directories, container, probes)
    files = tuple(
        DataFile(
            file.root, file.path, file.kind, file.size_bytes, file.header_bytes,
            None if file.kind == "source" else checksum.digest(plan.header(number)).hex(),
        )
        for number, file in enumerate(plan.files)
    )  # fmt: skip
    catalog = _write_catalog(plan, home, files, journal)
    manifest = Manifest(
        container=container,
        model=_model(plan.snapshot, texts),
        source=shards,
        quantization=quantization,
        geometry=Geometry(
            layers=layers,
            expert_layers=len(plan.layers),
            experts=max((layer.experts for layer in plan.layers.values()), default=0),
            expert_payload_bytes=max((layer.layout.payload_bytes for layer in plan.layers.values()), default=0),
            page_bytes=PAGE_BYTES,
        ),
        roots=roots,
        files=files,
        text_files=tuple(texts),
        catalog=catalog,
        skipped=tuple(plan.snapshot.vision),
        unknown=tuple(plan.snapshot.unknown),
    )
    write_small(home / MANIFEST_NAME, manifest.render())
    return manifest


def _write_roots(
    plan: Plan, directories: Mapping[int, Path], container: str, probes: Mapping[int, int]
) -> tuple[Root, ...]:
    home = directories[0]
    roots = []
    for number, root in enumerate(plan.roots):
        uuid = checksum.root_uuid(container, number)
        digest = None
        if root.kind == "drive":
            document = {
                "format": ROOT_FORMAT, "version": VERSION, "container": container, "root": uuid, "number": number
            }  # fmt: skip
            text = (json.dumps(document, indent=2) + "\n").encode()
            digest = write_small(directories[number] / ROOT_NAME, text).digest
        path = "." if number == 0 else os.path.relpath(directories[number].resolve(), home.resolve())
        roots.append(Root(uuid, root.kind, path, root.share, probes.get(number), digest))
    return tuple(roots)


def _write_catalog(plan: Plan, home: Path, files: tuple[DataFile, ...], journal: Journal) -> SmallFile:
    final = home / CATALOG_NAME
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    layers = [CatalogLayer(layer.layer, layer.experts, layer.layout) for layer in plan.layers.values()]
    count = sum(layer.experts for layer in layers)
    parts = [len(layer.layout.parts) for layer in layers]
    pieces = max(len(plan.roots), *parts, 1)  # in place, every part may lie apart
    expected = (
        count * (PIECE_RECORD.size * pieces + 24)
        + (len(plan.tensors) + len(files) + len(layers) + sum(parts)) * _RECORD_BYTES_MAX
    )
    write_catalog(
        partial,
        files,
        layers,
        _expert_records(plan, journal),
        _tensor_records(plan, journal),
        expected_bytes=expected,
    )
    small = _describe(partial, CATALOG_NAME)
    _rename(partial, final)
    sync_directory(home)
    return small


def _expert_records(plan: Plan, journal: Journal) -> Iterator[tuple[int, int, bytes]]:
    for key in plan.experts():
        digests = journal.experts[key]
        planned_extents = plan.expert_extents(key)
        records = (
            pack_piece(planned.file, planned.offset, planned.payload_bytes, planned.stored_bytes, digest)
            for planned, digest in zip(planned_extents, digests, strict=True)
        )
        yield key.layer, key.expert, b"".join(records)


def _tensor_records(plan: Plan, journal: Journal) -> Iterator[CatalogTensor]:
    for tensor in plan.tensors:
        digests = journal.tensors[tensor.position]
        scales = None if tensor.scales is None else _extent(tensor.scales, digests[1])
        source = tensor.source
        yield CatalogTensor(
            source.name, source.dtype, source.shape, tensor.encoding, _extent(tensor.weights, digests[0]), scales
        )


def _extent(planned: PlannedExtent, digest: bytes) -> CatalogExtent:
    return CatalogExtent(planned.file, planned.offset, planned.payload_bytes, planned.stored_bytes, digest)


def _model(snapshot: Snapshot, texts: list[SmallFile]) -> dict[str, str | None]:
    architectures = snapshot.config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    directory = snapshot.directories[0]
    revision = directory.name if directory.parent.name == "snapshots" else None
    digests = {small.path: small.digest for small in texts}
    return {
        "model_type": _name(snapshot.config.get("model_type")),
        "architecture": _name(architecture),
        "revision": revision,
        "config_digest": digests.get("config.json"),
    }


def _name(value: object) -> str | None:
    """Return a name from config.json, None for what cannot be one."""
    return value if isinstance(value, str) and value.isprintable() else None


def layer_ranges(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return the decoder layers that are there, as inclusive ranges."""
    present = sorted({*plan.layers, *(n for t in plan.tensors if (n := layer_of(t.source.name)) is not None)})
    ranges: list[tuple[int, int]] = []
    for layer in present:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1] = (ranges[-1][0], layer)
        else:
            ranges.append((layer, layer))
    return tuple(ranges)


def write_small(path: Path, data: bytes) -> SmallFile:
    """Write a small file aside, make it durable and give it its name."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        with os.fdopen(create_instead(partial), "wb") as file:
            file.write(data)
            file.flush()
            sync_file(file.fileno(), partial)
    except OSError as error:
        raise drive_error("cannot write", error, partial, operation=Operation.MAKE) from error
    _rename(partial, path)
    sync_directory(path.parent)
    return SmallFile(path.name, len(data), checksum.digest(data).hex())


def _describe(path: Path, name: str) -> SmallFile:
    data = path.read_bytes()
    return SmallFile(name, len(data), checksum.digest(data).hex())


def _rename(partial: Path, final: Path) -> None:
    try:
        os.replace(partial, final)  # noqa: PTH105 - one system call that tests can watch on every Python
    except OSError as error:
        raise drive_error("cannot rename", error, partial, operation=Operation.RENAME) from error


def remove_journal(home: Path, journal_name: str) -> None:
    """Remove the restart point of a container that is complete."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(home / journal_name)  # noqa: PTH108 - as in _rename
    sync_directory(home)
