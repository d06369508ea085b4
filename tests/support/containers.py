"""Small whole containers, written straight from docs/container.md and not by the repacker.

Everything is random bytes from a seed, so nothing repeats and no two extents can be mistaken for each other.
`Built` has the place of all that was written, so that tests can damage it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k3.base import checksum
from k3.checkpoint.safetensors_header import build_header
from k3.container.catalog import CatalogLayer, CatalogTensor, expert_layout, write_catalog
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import (
    DENSE_NAME,
    ROOT_FORMAT,
    ROOT_NAME,
    VERSION,
    FileLayout,
    cut_expert,
    expert_file_layout,
    expert_file_name,
    pack_piece,
)
from k3.container.manifest import DataFile, Geometry, Manifest, Root, SmallFile, SourceShard
from k3.model.keys import Encoding, ExpertKey, ExpertLayout, tensor_bytes
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME

PARTS = (
    ("w1.weight_packed", "U8", (48, 160)),
    ("w1.weight_scale", "U8", (48, 10)),
    ("w2.weight_packed", "U8", (80, 96)),
    ("w2.weight_scale", "U8", (80, 6)),
    ("w3.weight_packed", "U8", (48, 160)),
    ("w3.weight_scale", "U8", (48, 10)),
)
"""24,480 bytes: five pages and a padded sixth."""

DENSE = (
    ("model.embed_tokens.weight", "BF16", (96, 160), Encoding.RAW),
    ("model.layers.1.self_attn.q_proj.weight", "BF16", (40, 160), Encoding.INT8),
    ("model.layers.1.self_attn.o_proj.weight", "BF16", (40, 160), Encoding.INT4),
    ("model.layers.2.self_attn.dt_bias", "F32", (40,), Encoding.RAW),
    ("model.norm.weight", "BF16", (160,), Encoding.F32),
)


@dataclass
class Built:
    """A container on disk, and the bytes and extents that were written to it."""

    home: Path
    directories: list[Path]  # of each root
    manifest: Manifest
    layouts: dict[int, ExpertLayout]
    payloads: dict[ExpertKey, bytes] = field(default_factory=dict)
    pieces: dict[ExpertKey, list[CatalogExtent]] = field(default_factory=dict)
    tensors: list[CatalogTensor] = field(default_factory=list)

    def path(self, number: int) -> Path:
        """Return the path of data file `number`."""
        file = self.manifest.files[number]
        return self.directories[file.root] / file.path

    def piece(self, layer: int, expert: int, index: int = 0) -> tuple[Path, CatalogExtent]:
        """Return the path and the extent of piece `index` of an expert."""
        extent = self.pieces[ExpertKey(layer, expert)][index]
        return self.path(extent.file), extent


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """XOR one byte of a file with `mask`, by default one bit, as a faulty cable would; the size stays."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def write_manifest(built: Built, manifest: Manifest) -> None:
    """Replace the manifest by another one, with a correct digest of itself."""
    built.manifest = manifest
    (built.home / MANIFEST_NAME).write_bytes(manifest.render())


def build_container(
    home: Path,
    drives: Sequence[Path] = (),
    shares: Sequence[int] = (1,),
    *,
    layers: Sequence[int] = (1, 2),
    experts: int = 5,
    in_place: Path | None = None,
    seed: int = 0,
) -> Built:
    """Write a container: home and `drives` are the roots, with these shares of every expert.

    With `in_place`, the experts are in shards in that directory instead, in name order and without alignment.
    """
    return _Builder(home, drives, shares, layers, experts, in_place, seed).build()


class _Builder:
    def __init__(
        self,
        home: Path,
        drives: Sequence[Path],
        shares: Sequence[int],
        layers: Sequence[int],
        experts: int,
        in_place: Path | None,
        seed: int,
    ) -> None:
        self.home, self.layers, self.experts, self.in_place = home, layers, experts, in_place
        self.shares = [0] if in_place else list(shares)
        self.random = np.random.default_rng(seed)
        kinds = ["home", *["drive"] * len(drives), *(["source"] if in_place else [])]
        self.directories = [home, *drives, *([in_place] if in_place else [])]
        if in_place:
            self.shares = [0] * len(kinds)
        assert len(self.shares) == len(kinds)
        for directory in self.directories:
            directory.mkdir(parents=True, exist_ok=True)
        self.kinds = kinds
        self.layouts = {
            layer: expert_layout(f"language_model.model.layers.{layer}.block_sparse_moe.experts", PARTS)
            for layer in layers
        }
        self.payloads = {
            ExpertKey(layer, expert): self.noise(self.layouts[layer].payload_bytes)
            for layer in layers
            for expert in range(experts)
        }
        self.pieces: dict[ExpertKey, list[CatalogExtent]] = {key: [] for key in self.payloads}
        self.files: list[DataFile] = []

    def noise(self, count: int) -> bytes:
        return self.random.integers(0, 256, count, dtype=np.uint8).tobytes()

    def build(self) -> Built:
        tensors = self.dense()
        for layer in self.layers:
            if self.in_place:
                self.source_shard(layer)
            else:
                self.expert_files(layer)
        entries = [CatalogLayer(layer, self.experts, layout) for layer, layout in self.layouts.items()]
        records = [
            (key.layer, key.expert, b"".join(pack_piece(*_fields(extent)) for extent in extents))
            for key, extents in sorted(self.pieces.items())
        ]
        write_catalog(self.home / CATALOG_NAME, self.files, entries, records, tensors, expected_bytes=1 << 20)
        manifest = self.manifest()
        built = Built(self.home, self.directories, manifest, self.layouts, self.payloads, self.pieces, tensors)
        write_manifest(built, manifest)
        return built

    def write(self, root: int, name: str, kind: str, layout: FileLayout, contents: Sequence[bytes]) -> list[bytes]:
        """Write a data file and return the digest of each of its extents."""
        path = self.directories[root] / name
        path.parent.mkdir(exist_ok=True)
        data = bytearray(layout.header)
        digests = []
        for content, (offset, payload, stored) in zip(contents, layout.extents, strict=True):
            assert (len(data), len(content)) == (offset, payload)
            padded = content + bytes(stored - payload)
            digests.append(checksum.digest(padded))
            data += padded
        assert len(data) == layout.size_bytes
        path.write_bytes(data)
        digest = checksum.digest(layout.header).hex()
        self.files.append(DataFile(root, name, kind, layout.size_bytes, len(layout.header), digest))
        return digests

    def expert_files(self, layer: int) -> None:
        layout = self.layouts[layer]
        pieces = cut_expert(layout.payload_bytes, self.shares)
        for piece in pieces:
            file_layout = expert_file_layout(layout, self.experts, pieces, piece.root)
            begin, end = piece.payload_offset, piece.payload_offset + piece.payload_bytes
            contents = [self.payloads[ExpertKey(layer, e)][begin:end] for e in range(self.experts)]
            number = len(self.files)
            digests = self.write(piece.root, expert_file_name(layer), "experts", file_layout, contents)
            for expert, (extent, digest) in enumerate(zip(file_layout.extents, digests, strict=True)):
                self.pieces[ExpertKey(layer, expert)].append(CatalogExtent(number, *extent, digest))

    def source_shard(self, layer: int) -> None:
        """Write a shard as published: names in string order, header padded to 8 bytes, nothing page-aligned."""
        layout = self.layouts[layer]
        order = sorted(range(self.experts), key=str)
        entries = [
            (f"{layout.prefix}.{e}.{part.name}", part.dtype, part.shape) for e in order for part in layout.parts
        ]
        header = build_header([("a.weight", "BF16", (37,)), *entries], align=8)
        data = bytearray(header + self.noise(74))
        number = len(self.files)
        for expert in order:
            key = ExpertKey(layer, expert)
            payload = self.payloads[key]
            # Two extents, to see that a reader joins what the source holds apart.
            for content in (payload[:9000], payload[9000:]):
                size = len(content)
                self.pieces[key].append(CatalogExtent(number, len(data), size, size, checksum.digest(content)))
                data += content
        name = f"model-{layer + 1:05d}-of-000096.safetensors"
        assert self.in_place is not None
        (self.in_place / name).write_bytes(data)
        self.files.append(DataFile(len(self.kinds) - 1, name, "source", len(data), 0, None))

    def dense(self) -> list[CatalogTensor]:
        """Write the dense blob, random bytes for tensors of every encoding, and return its catalog entries."""
        groups = []
        for name, dtype, shape, encoding in DENSE:
            groups += _stored(name, dtype, shape, encoding)
        layout = FileLayout([[group] for group in groups])
        contents = [self.noise(tensor_bytes(dtype, shape)) for _, dtype, shape in groups]
        digests = self.write(0, DENSE_NAME, "dense", layout, contents)
        extents = [
            CatalogExtent(0, *extent, digest) for extent, digest in zip(layout.extents, digests, strict=True)
        ]
        tensors = []
        for name, dtype, shape, encoding in DENSE:
            weights = extents.pop(0)
            scales = extents.pop(0) if encoding in (Encoding.INT8, Encoding.INT4) else None
            tensors.append(CatalogTensor(name, dtype, shape, encoding, weights, scales))
        return tensors

    def manifest(self) -> Manifest:
        payload = max(layout.payload_bytes for layout in self.layouts.values())
        source = (SourceShard("model-00001-of-000096.safetensors", 4242, "ab" * 32),)
        draft = Manifest(
            container="",
            model={
                "model_type": "kimi_k3",
                "architecture": "KimiK3",
                "revision": None,
                "config_digest": checksum.digest(TEXT_FILES["config.json"]).hex(),
            },
            source=source,
            quantization={"bits": 8, "mla_bits": 8, "head_bits": 8},
            geometry=Geometry(_ranges({1, 2, *self.layers}), len(self.layers), self.experts, payload, 4096),
            roots=tuple(
                Root("", kind, "." if number == 0 else str(directory), share, None, None)
                for number, (kind, directory, share) in enumerate(
                    zip(self.kinds, self.directories, self.shares, strict=True)
                )
            ),
            files=tuple(self.files),
            text_files=tuple(self.text_file(name, data) for name, data in TEXT_FILES.items()),
            catalog=self.small_file(self.home, CATALOG_NAME),
            skipped=(),
            unknown=(),
        )
        container = checksum.container_uuid(draft.identity())
        roots = tuple(self.root(number, root, container) for number, root in enumerate(draft.roots))
        values = {name: getattr(draft, name) for name in draft.__slots__}
        return Manifest(**{**values, "container": container, "roots": roots})

    def root(self, number: int, root: Root, container: str) -> Root:
        uuid = checksum.root_uuid(container, number)
        digest = None
        if root.kind == "drive":
            document = {
                "format": ROOT_FORMAT, "version": VERSION, "container": container, "root": uuid, "number": number,
            }  # fmt: skip
            data = (json.dumps(document) + "\n").encode()
            (self.directories[number] / ROOT_NAME).write_bytes(data)
            digest = checksum.digest(data).hex()
        return Root(uuid, root.kind, root.path, root.share, root.probe_mb_per_s, digest)

    def text_file(self, name: str, data: bytes) -> SmallFile:
        (self.home / name).write_bytes(data)
        return self.small_file(self.home, name)

    @staticmethod
    def small_file(home: Path, name: str) -> SmallFile:
        data = (home / name).read_bytes()
        return SmallFile(name, len(data), checksum.digest(data).hex())


TEXT_FILES = {
    "config.json": b'{"model_type": "kimi_k3", "text_config": {"num_experts_per_token": 2}}',
    "generation_config.json": b'{"max_length": 1048576}',
}


def _ranges(numbers: set[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as inclusive ranges, in rising order."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    ends = sorted(n for n in numbers if n + 1 not in numbers)
    return tuple(zip(starts, ends, strict=True))


def _fields(extent: CatalogExtent) -> tuple[int, int, int, int, bytes]:
    return extent.file, extent.offset, extent.payload_bytes, extent.stored_bytes, extent.digest


def _stored(
    name: str, dtype: str, shape: tuple[int, ...], encoding: Encoding
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and shape of what the blob holds: the tensor itself, or its weights, then its scales."""
    if encoding is Encoding.RAW:
        return [(name, dtype, shape)]
    if encoding is Encoding.F32:
        return [(name, "F32", shape)]
    rows, columns = shape
    if encoding is Encoding.INT8:
        return [(name, "U8", shape), (f"{name}.qs", "F32", (rows,))]
    return [(name, "U8", (rows, -(-columns // 2))), (f"{name}.qs", "F32", (rows, -(-columns // 64)))]
