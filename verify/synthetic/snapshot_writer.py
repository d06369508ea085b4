"""Writes snapshots of made-up K3 models in the exact on-disk form of the published one.

Everything that reads snapshots is tested on these. `write_snapshot` streams: memory stays under 300 MB
whatever the dimensions. `write_sparse_snapshot` leaves holes in place of tensor bytes, so that even the full
model's headers, index and sizes fit on a small disk. One thread per target directory; nothing here reads the
environment.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from k3.verify.synthetic.shape import SyntheticModel, VisionShape
from k3.verify.synthetic.synthetic_config import config, generation_config, json_bytes
from k3.verify.synthetic.synthetic_tokenizer import tiktoken_model, tokenizer_config
from k3.verify.synthetic.tensors import Census, ShardPlan, TensorSpec, census, layer_tensors, shard_plans
from k3.verify.synthetic.values import TensorValues

__all__ = [
    "Census",
    "ShardPlan",
    "SyntheticModel",
    "TensorSpec",
    "TensorValues",
    "VisionShape",
    "census",
    "layer_tensors",
    "shard_plans",
    "write_snapshot",
    "write_sparse_snapshot",
]

INDEX_NAME = "model.safetensors.index.json"

LFS_BYTES = 10_000_000
"""Larger files are in LFS on Hugging Face, where blobs are named by sha256 instead of git's sha1."""


def write_snapshot(model: SyntheticModel, out: Path, *, more_directories: Sequence[Path] = ()) -> Path:
    """Write the whole snapshot and return the directory that holds its config.json.

    That is `out` itself, or in an hf_cache layout `out/models--synthetic--k3/snapshots/<revision>`. With
    `more_directories` (plain layout only) shards go round over `out` and those, everything else into `out`.
    FileExistsError when there is a config.json already.
    """
    values = TensorValues(model.seed)

    def write_data(file: _Output, plan: ShardPlan) -> None:
        for tensor in plan.tensors:
            for stretch in values.stretches(tensor):
                file.write(stretch.data)

    if model.layout == "hf_cache":
        if more_directories:
            raise ValueError("an hf_cache layout is one directory")
        return _write(model, [_HubCache(model, out)], write_data)
    return _write(model, [_Plain(directory) for directory in (out, *more_directories)], write_data)


def write_sparse_snapshot(model: SyntheticModel, out: Path, *, more_directories: Sequence[Path] = ()) -> Path:
    """Like `write_snapshot`, but tensor bytes are a hole (it reads as zeros) in a file of full size."""
    if model.layout != "plain":
        raise ValueError("a sparse snapshot has no bytes to name blobs after: its layout must be plain")

    def write_data(file: _Output, plan: ShardPlan) -> None:
        assert not isinstance(file, _HashedOutput)
        file.truncate(file.tell() + plan.data_bytes)

    return _write(model, [_Plain(directory) for directory in (out, *more_directories)], write_data)


class _HashedOutput:
    """A file being written front to back, and the sha256 of what went in."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        self._file.write(data)


_Output = BinaryIO | _HashedOutput


class _Place(Protocol):
    """The directories that files of a snapshot are written to."""

    snapshot: Path

    def create(self, name: str) -> contextlib.AbstractContextManager[_Output]:
        """Return a shard, open for writing."""

    def put(self, name: str, data: bytes) -> None:
        """Write a whole small file."""


class _Plain:
    """A directory with the files in it."""

    def __init__(self, directory: Path) -> None:
        self.snapshot = directory
        directory.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        with (self.snapshot / name).open("wb") as file:
            yield file

    def put(self, name: str, data: bytes) -> None:
        (self.snapshot / name).write_bytes(data)


class _HubCache:
    """Hugging Face's download cache: content in blobs/, a tree of relative links to it for each revision."""

    def __init__(self, model: SyntheticModel, out: Path) -> None:
        repository = out / "models--synthetic--k3"
        revision = hashlib.sha1(repr(model).encode()).hexdigest()
        self.snapshot = repository / "snapshots" / revision
        self._blobs = repository / "blobs"
        for directory in (self.snapshot, self._blobs, repository / "refs"):
            directory.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(revision)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[_HashedOutput]:
        unfinished = self._blobs / f"{name}.incomplete"
        with unfinished.open("wb") as file:
            output = _HashedOutput(file)
            yield output
        self._publish(unfinished, name, output.sha256.hexdigest())

    def put(self, name: str, data: bytes) -> None:
        if name.endswith(".model") or len(data) > LFS_BYTES:
            digest = hashlib.sha256(data).hexdigest()
        else:
            digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        unfinished = self._blobs / f"{name}.incomplete"
        unfinished.write_bytes(data)
        self._publish(unfinished, name, digest)

    def _publish(self, unfinished: Path, name: str, digest: str) -> None:
        unfinished.rename(self._blobs / digest)
        (self.snapshot / name).symlink_to(Path("..", "..", "blobs", digest))


def _write(
    model: SyntheticModel, places: Sequence[_Place], write_data: Callable[[_Output, ShardPlan], None]
) -> Path:
    first = places[0]
    if (first.snapshot / "config.json").exists():
        raise FileExistsError(f"{first.snapshot} already holds a snapshot")

    total_bytes = 0
    weight_map = bytearray()
    for number, plan in enumerate(shard_plans(model)):
        with places[number % len(places)].create(plan.name) as file:
            file.write(plan.header())
            write_data(file, plan)
        total_bytes += plan.data_bytes
        for tensor in plan.tensors:
            weight_map += b'    "%s": "%s",\n' % (tensor.name.encode(), plan.name.encode())

    first.put(INDEX_NAME, _index(total_bytes, weight_map))
    first.put("generation_config.json", json_bytes(generation_config(model)))
    first.put("tiktoken.model", tiktoken_model(model))
    first.put("tokenizer_config.json", json_bytes(tokenizer_config(model)))
    first.put("config.json", json_bytes(config(model)))  # last: with it the snapshot counts as written
    return first.snapshot


def _index(total_bytes: int, weight_map: bytearray) -> bytes:
    """Return the index file, as `json_bytes` would write it; half a million entries stay text to save memory."""
    head = b'{\n  "metadata": {\n    "total_size": %d\n  },\n  "weight_map": {\n' % total_bytes
    return b"".join((head, memoryview(weight_map)[: -len(",\n")], b"\n  }\n}"))
