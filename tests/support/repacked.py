"""Check a repacked container with the `safetensors` package, LMDB and NumPy instead of our readers.

`check_container` compares everything it finds with the snapshot's own bytes. Only names and formulas of
docs/container.md are used here, nothing of k3.container's layout or of the repacker.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import signal
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import xxhash
from click.testing import CliRunner, Result
from safetensors import safe_open

from k3.kernels import reference
from k3.repack.cli import main
from k3.verify.synthetic.snapshot_writer import SyntheticModel

SMALL = SyntheticModel(
    layers=3, hidden=32, latent=32, moe_inter=32, experts=4, experts_per_token=2, dense_inter=64, heads=2,
    q_lora=16, kv_lora=16, kda_heads=2, kda_head=16, qk_nope=16, qk_rope=8, v_head=16,
)  # fmt: skip
"""A whole model of 0.3 MB: layer 0 dense, layers 1 and 2 with experts of less than a page, vision beside it."""

WIDE = SyntheticModel(
    layers=3, hidden=32, latent=128, moe_inter=160, experts=6, experts_per_token=2, dense_inter=64, heads=2,
    q_lora=16, kv_lora=16, kda_heads=2, kda_head=16, qk_nope=16, qk_rope=8, v_head=16, vision=False,
)  # fmt: skip
"""The same with experts of eight pages, the last of them not full: enough to be cut over several roots."""

_EXPERT = re.compile(r"^(.*layers\.(\d+)\..*experts)\.(\d+)\.(.+)$")


def _is_pad(name: str) -> bool:
    return name.startswith("__pad__.")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the snapshot: name, dtype and shape from the shard's header, and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def command(*arguments: object) -> Result:
    """Run k3-repack in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGTERM, handler)


def repacked(*arguments: object, code: int = 0) -> Result:
    """Run k3-repack, which must end with this exit code and without a traceback."""
    result = command(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def write_shard(path: Path, tensors: Iterable[Tensor], pad: int = 8) -> None:
    """Write a safetensors file without any library."""
    entries, cursor, tensors = {}, 0, list(tensors)
    for tensor in tensors:
        end = cursor + len(tensor.data)
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text)) // pad) * pad - 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors))


def write_index(directory: Path, shards: dict[str, Iterable[str]]) -> None:
    """Write model.safetensors.index.json; `shards` has each shard's tensor names by its file name."""
    names = {name: shard for shard, tensors in shards.items() for name in tensors}
    document = {"metadata": {"total_size": 0}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(document))


def rearrange(directory: Path, shards: dict[str, list[Tensor]], pad: int = 8) -> None:
    """Replace a snapshot's shards and index by these."""
    for path in directory.glob("*.safetensors"):
        path.unlink()
    for name, tensors in shards.items():
        write_shard(directory / name, tensors, pad)
    write_index(directory, {name: [tensor.name for tensor in tensors] for name, tensors in shards.items()})


def shard_tensors(path: Path) -> list[Tensor]:
    """Return the tensors of one safetensors file in storage order, read without any library."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    entries = json.loads(raw[8 : 8 + length])
    entries.pop("__metadata__", None)
    ordered = sorted(entries.items(), key=lambda item: item[1]["data_offsets"])
    return [
        Tensor(name, e["dtype"], tuple(e["shape"]), raw[8 + length :][slice(*e["data_offsets"])])
        for name, e in ordered
    ]


def changed(snapshot: Path, target: Path, change: Mapping[str, object]) -> Path:
    """Copy a snapshot; `change` maps a tensor's name to what `dataclasses.replace` takes."""
    shutil.copytree(snapshot, target)
    shards = {path.name: shard_tensors(path) for path in sorted(target.glob("*.safetensors"))}
    rearrange(
        target,
        {
            name: [dataclasses.replace(tensor, **change.get(tensor.name, {})) for tensor in tensors]  # type: ignore[arg-type]
            for name, tensors in shards.items()
        },
    )
    return target


def source_tensors(*directories: Path) -> dict[str, Tensor]:
    """Return every tensor of a snapshot, by name."""
    paths = sorted(path for directory in directories for path in directory.glob("*.safetensors"))
    return {tensor.name: tensor for path in paths for tensor in shard_tensors(path)}


def tree(*directories: Path, skip: Iterable[str] = ()) -> dict[str, str]:
    """Return SHA-256 (of a folder, "/") by the directory's number and relative path, without names in `skip`."""
    found = {}
    for number, directory in enumerate(directories):
        for path in sorted(directory.rglob("*")):
            if path.name not in set(skip):
                digest = "/" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
                found[f"{number}:{path.relative_to(directory)}"] = digest
    return found


@dataclass
class Found:
    """The counts, encodings and order of tensors that `check_container` found."""

    manifest: dict[str, Any]
    experts: int = 0
    dense: dict[str, str] = field(default_factory=dict)  # name -> encoding
    order: list[str] = field(default_factory=list)


def check_container(
    home: Path,
    sources: Sequence[Path],
    *,
    drives: Sequence[Path] = (),
    skipped: Iterable[str] = (),
    unknown: Iterable[str] = (),
    layers: Iterable[int] | None = None,
) -> Found:
    """Assert that the container at `home` holds exactly the snapshot in `sources`, and is well-formed."""
    manifest = json.loads((home / "manifest.json").read_bytes())
    found = Found(manifest)
    tensors = wanted(sources, layers)
    assert manifest["skipped"] == sorted(skipped)
    assert sorted(manifest["unknown"]) == sorted(unknown)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in set(skipped)}
    kinds = [root["kind"] for root in manifest["roots"]]
    in_place = "source" in kinds
    roots = [home, *(sources if in_place else drives)]
    assert len(roots) == len(kinds)
    catalog = Catalog(home / "catalog.mdb")
    assert catalog.files == manifest["files"]
    check_files(catalog, roots)
    experts = {name: tensor for name, tensor in tensors.items() if _EXPERT.match(name)}
    found.experts = check_experts(catalog, roots, experts)
    if not in_place:
        check_expert_files(catalog, roots, experts)
    check_dense(catalog, roots, {n: t for n, t in tensors.items() if n not in experts}, found)
    check_manifest(manifest, home, sources)
    for directory in (home, *drives):
        names = [path.name for path in directory.rglob("*")]
        assert not [name for name in names if name.endswith((".partial", "-lock")) or name == "journal.mdb"]
    return found


def wanted(sources: Sequence[Path], layers: Iterable[int] | None) -> dict[str, Tensor]:
    """Return the snapshot's tensors by name; with `layers`, those of other decoder layers are left out."""
    found = {}
    for name, tensor in source_tensors(*sources).items():
        match = re.search(r"\blayers\.(\d+)\.", name)
        if layers is None or match is None or int(match[1]) in set(layers):
            found[name] = tensor
    return found


class Catalog:
    """The content of catalog.mdb, read as docs/container.md describes it, without our reader."""

    def __init__(self, path: Path) -> None:
        environment = lmdb.open(str(path), subdir=False, readonly=True, lock=False, max_dbs=4)
        with environment.begin() as transaction:
            content = {
                name: list(transaction.cursor(environment.open_db(name.encode(), txn=transaction, create=False)))
                for name in ("files", "layers", "experts", "tensors")
            }
        environment.close()
        assert [struct.unpack(">I", key)[0] for key, _ in content["files"]] == list(range(len(content["files"])))
        self.files = [json.loads(value) for _, value in content["files"]]
        self.layers = {struct.unpack(">I", key)[0]: json.loads(value) for key, value in content["layers"]}
        assert [struct.unpack(">I", key)[0] for key, _ in content["tensors"]] == list(
            range(len(content["tensors"]))
        )
        self.tensors = [json.loads(value) for _, value in content["tensors"]]
        self.experts = {}
        for key, value in content["experts"]:
            assert len(value) % 48 == 0
            records = [struct.unpack("<IIQQQ16s", value[i : i + 48]) for i in range(0, len(value), 48)]
            assert all(record[1] == 0 for record in records)
            self.experts[struct.unpack(">II", key)] = [(r[0], *r[2:]) for r in records]

    def extents(self) -> list[tuple[int, int, int, int, bytes]]:
        """Return every extent: file, offset, payload bytes, stored bytes, digest."""
        found = [record for records in self.experts.values() for record in records]
        for tensor in self.tensors:
            for item in (tensor["weights"], tensor["scales"]):
                if item is not None:
                    digest = bytes.fromhex(item["digest"])
                    found.append((item["file"], item["offset"], item["payload"], item["stored"], digest))
        return found


def check_files(catalog: Catalog, roots: Sequence[Path]) -> None:
    """Assert right sizes, headers and digests, extents that cover each written file, and padding of zeros."""
    by_file: dict[int, list[tuple[int, int, int, bytes]]] = {number: [] for number in range(len(catalog.files))}
    for extent in catalog.extents():
        by_file[extent[0]].append(extent[1:])
    for number, entry in enumerate(catalog.files):
        path = roots[entry["root"]] / entry["path"]
        data = path.read_bytes()
        assert len(data) == entry["bytes"], path
        for offset, payload, stored, digest in by_file[number]:
            assert xxhash.xxh3_128_digest(data[offset : offset + stored]) == digest, (path, offset)
            assert not any(data[offset + payload : offset + stored])
        if entry["kind"] == "source":
            assert (entry["header_bytes"], entry["header_digest"]) == (0, None)
            continue
        header = data[: entry["header_bytes"]]
        assert len(header) % 4096 == 0
        assert xxhash.xxh3_128_hexdigest(header) == entry["header_digest"]
        assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
        position = len(header)
        for offset, payload, stored, _ in sorted(by_file[number]):
            assert offset == position
            assert stored == -(-payload // 4096) * 4096
            position += stored
        assert position == len(data), path
        with safe_open(path, framework="numpy") as opened:
            pads = sorted(filter(_is_pad, opened.keys()), key=lambda n: int(n[8:]))
            assert pads == [f"__pad__.{n}" for n in range(len(pads))]
            assert not any(opened.get_tensor(name).any() for name in pads)


def check_experts(catalog: Catalog, roots: Sequence[Path], tensors: dict[str, Tensor]) -> int:
    """Assert that every expert's payload is its source tensors, parts in order of their names."""
    parts: dict[tuple[int, int], dict[str, Tensor]] = {}
    blocks = {}
    for name, tensor in tensors.items():
        match = _EXPERT.match(name)
        assert match
        blocks[int(match[2])] = match[1]
        parts.setdefault((int(match[2]), int(match[3])), {})[match[4]] = tensor
    assert sorted(catalog.experts) == list(catalog.experts) == sorted(parts)
    for key, mine in parts.items():
        layer = catalog.layers[key[0]]
        assert layer["block"] == blocks[key[0]]
        assert [part["name"] for part in layer["parts"]] == sorted(mine)
        assert [(p["dtype"], tuple(p["shape"])) for p in layer["parts"]] == [
            (mine[name].dtype, mine[name].shape) for name in sorted(mine)
        ]
        payload = b""
        for file, offset, nbytes, _, _ in catalog.experts[key]:
            entry = catalog.files[file]
            with open(roots[entry["root"]] / entry["path"], "rb") as opened:
                opened.seek(offset)
                payload += opened.read(nbytes)
        assert payload == b"".join(mine[name].data for name in sorted(mine)), key
    assert {layer: entry["experts"] for layer, entry in catalog.layers.items()} == {
        layer: sum(key[0] == layer for key in parts) for layer in blocks
    }
    return len(parts)


def check_expert_files(catalog: Catalog, roots: Sequence[Path], tensors: dict[str, Tensor]) -> None:
    """Assert the same without the catalog, from the files alone as the safetensors package reads them."""
    pieces: dict[str, dict[int, bytes]] = {}
    whole: dict[str, bytes] = {}
    for entry in catalog.files:
        if entry["kind"] != "experts":
            continue
        with safe_open(roots[entry["root"]] / entry["path"], framework="numpy") as opened:
            for name in (name for name in list(opened.keys()) if not _is_pad(name)):
                part = opened.get_slice(name)
                if ".piece." in name:
                    expert, _, root = name.partition(".piece.")
                    assert int(root) == entry["root"]
                    pieces.setdefault(expert, {})[int(root)] = opened.get_tensor(name).tobytes()
                else:
                    assert (part.get_dtype(), tuple(part.get_shape())) == (
                        tensors[name].dtype, tensors[name].shape
                    )  # fmt: skip
                    whole[name] = opened.get_tensor(name).tobytes()
    if whole:
        assert not pieces
        assert whole == {name: tensor.data for name, tensor in tensors.items()}
        return
    payloads: dict[str, bytes] = {}
    for name in sorted(tensors, key=lambda name: _EXPERT.match(name).group(4)):  # type: ignore[union-attr]
        match = _EXPERT.match(name)
        assert match
        expert = f"{match[1]}.{match[3]}"
        payloads[expert] = payloads.get(expert, b"") + tensors[name].data
    assert {e: b"".join(found[root] for root in sorted(found)) for e, found in pieces.items()} == payloads


def check_dense(catalog: Catalog, roots: Sequence[Path], tensors: dict[str, Tensor], found: Found) -> None:
    """Assert that every dense tensor has the bytes of its encoding, computed here from the source."""
    entry = catalog.files[0]
    assert entry["kind"] == "dense"
    raw = (roots[0] / entry["path"]).read_bytes()
    stored = {tensor.name: tensor for tensor in shard_tensors(roots[0] / entry["path"])}
    names = [name for name in stored if not name.startswith("__pad__.")]
    found.order = [item["name"] for item in catalog.tensors]
    assert sorted(found.order) == sorted(tensors)
    expected_names = []
    for item in catalog.tensors:
        source = tensors[item["name"]]
        assert (item["dtype"], tuple(item["shape"])) == (source.dtype, source.shape)
        found.dense[source.name] = item["encoding"]
        expected_names.append(source.name)
        tensor = stored[source.name]
        place = item["weights"]
        assert raw[place["offset"] :][: place["payload"]] == tensor.data
        if item["encoding"] == "raw":
            assert (tensor.dtype, tensor.shape, tensor.data) == (source.dtype, source.shape, source.data)
            assert item["scales"] is None
            continue
        values = np.frombuffer(source.data, {"BF16": np.uint16, "F32": np.float32}[source.dtype])
        matrix = values.reshape(source.shape)
        if item["encoding"] == "f32":
            assert (tensor.dtype, tensor.shape) == ("F32", source.shape)
            assert tensor.data == reference.widen_bf16(matrix).tobytes()
            continue
        quantize = {"int8": reference.quantize_int8, "int4": reference.quantize_int4}[item["encoding"]]
        weights, scales = quantize(matrix)
        expected_names.append(f"{source.name}.qs")
        scale_tensor = stored[f"{source.name}.qs"]
        assert (tensor.dtype, tensor.shape) == ("U8", weights.shape)
        assert (scale_tensor.dtype, scale_tensor.shape) == ("F32", scales.shape)
        assert tensor.data == weights.tobytes()
        assert scale_tensor.data == scales.tobytes()
        assert raw[item["scales"]["offset"] :][: item["scales"]["payload"]] == scale_tensor.data
    assert names == expected_names


def check_manifest(manifest: dict[str, Any], home: Path, sources: Sequence[Path]) -> None:
    """Assert that the manifest is right about shards and small files."""
    shards = {path.name: path for directory in sources for path in directory.glob("*.safetensors")}
    for entry in manifest["source"]["shards"]:
        data = shards[entry["name"]].read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    for entry in (*manifest["text_files"], manifest["catalog"]):
        data = (home / entry["path"]).read_bytes()
        assert (entry["bytes"], entry["digest"]) == (len(data), xxhash.xxh3_128_hexdigest(data))
    texts = {entry["path"] for entry in manifest["text_files"]}
    for directory in sources:
        for path in directory.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".index.json")):
                assert path.name in texts
                assert (home / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in home.iterdir() if path.is_file()} == texts | {
        "manifest.json", "catalog.mdb", "dense.safetensors",
    }  # fmt: skip


def vision_names(snapshot: Path) -> list[str]:
    names = source_tensors(snapshot)
    return [name for name in names if name.startswith(("vision_tower.", "mm_projector."))]


def prove(
    snapshot: Path,
    home: Path,
    *options: object,
    drives: Sequence[Path] = (),
    more: Sequence[Path] = (),
    **expect: Any,
) -> Found:
    """Repack with --verify-full, check the result with `check_container`, and run the repack again."""
    arguments: list[object] = [snapshot, home, *options]
    if drives:
        arguments += ["--dirs", ",".join(map(str, drives))]
    if more:
        arguments += ["--source-dirs", ",".join(map(str, more))]
    source = tree(snapshot, *more)
    result = repacked(*arguments, "--verify-full")
    assert "verified: EQUAL" in result.output
    others = [drive for drive in drives if drive.resolve() != home.resolve()]
    expect.setdefault("skipped", [n for d in (snapshot, *more) for n in vision_names(d)])
    found = check_container(home, [snapshot, *more], drives=others, **expect)
    before = tree(home, *drives)
    again = repacked(*arguments)
    assert "complete already" in again.output
    assert "Nothing was written" in again.output
    assert tree(home, *drives) == before
    assert tree(snapshot, *more) == source, "the source is never touched"
    return found
