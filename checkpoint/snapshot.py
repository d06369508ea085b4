"""A raw Hugging Face snapshot, checked as a whole before any of its weights is used.

`Snapshot.open` reads every header once and proves that config.json, index and shards agree: no shard is missing or
truncated, no tensor is missing or there twice, every expert is complete. The result fulfils `ModelSource`, so an
engine can run from it and the repacker can plan from it. No descriptor stays open.

A `Snapshot` is immutable after `open`; its methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from k3.base import checksum
from k3.base.errors import SourceError
from k3.base.regular_file import RegularFile
from k3.checkpoint import snapshot_checks as checks
from k3.checkpoint import tensor_reader
from k3.checkpoint.downloads import published_digest
from k3.checkpoint.expert_census import ExpertCensus
from k3.checkpoint.expert_table import ExpertTable
from k3.checkpoint.index_check import IndexCheck
from k3.checkpoint.read_ahead import READ_AHEAD, ReadAhead
from k3.checkpoint.safetensors_header import Header, read_header
from k3.checkpoint.shard import Shard, SourceTensor
from k3.checkpoint.snapshot_files import SnapshotFiles
from k3.checkpoint.tensor_table import TensorTable
from k3.model.encoded_tensor import bytes_of
from k3.model.identity import (
    GENERATION_CONFIG_NAME,
    TEXT_FILES,
    ModelIdentity,
    config_identity,
    text_identity,
)
from k3.model.keys import Encoding, ExpertLayout, Extent, is_vision, layer_of
from k3.model.kinds import is_container
from k3.model.model_config import text_config
from k3.model.model_source import DenseInfo, EncodedTensor
from k3.model.tensor_recipe import (
    Recipe,
    execution_order,
    is_known,
    mla_layers,
)

SAMPLE_BYTES = 4096
"""Bytes that `identity` samples in the middle, and as many at the end, of each shard."""


class Snapshot:
    """A snapshot in one or several directories. Create it with `open`."""

    has_extents = True

    def __init__(self, files: SnapshotFiles, recipe: Recipe | None, layers: Sequence[int] | None) -> None:
        self._files = files
        self._recipe = recipe
        self._text = text_config(files.config, files.config_path)
        self._layers = None if layers is None else frozenset(layers)
        self._shards: list[Shard] = []
        self._shard_tuple: tuple[Shard, ...] = ()
        self._plain: dict[str, SourceTensor] = {}  # dense and vision
        form = (recipe, self._layers and sorted(self._layers))
        self._digest = xxhash.xxh3_128(repr(form).encode())
        self._experts: dict[int, ExpertTable] = {}
        self._tensors = TensorTable(self._plain, self._experts)
        self._dense: tuple[str, ...] = ()
        self._vision: tuple[str, ...] = ()
        self._mla: frozenset[int] = frozenset()

    @classmethod
    def open(
        cls,
        directories: Sequence[Path],
        *,
        recipe: Recipe | None = None,
        layers: Sequence[int] | None = None,
    ) -> Snapshot:
        """Open and check the snapshot whose files are in `directories`.

        `recipe` decides the encoding in which `read_tensor` returns dense tensors (None: as they are). `layers`
        restricts the snapshot to some decoder layers and everything outside of layers; shards that hold none of it
        need not be there. Raises the SourceError of the fitting kind for anything invalid, DriveError when the
        operating system refuses.
        """
        for directory in directories:
            if is_container(directory):
                raise SourceError(
                    "this is a K3 container, not a snapshot",
                    path=directory,
                    advice="A snapshot is what containers are made from; name a container with --container",
                )
        snapshot = cls(SnapshotFiles.find(directories), recipe, layers)
        snapshot._read_shards()
        snapshot._check()
        return snapshot

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories of the files: absolute, cache folders replaced by their revision, links not resolved."""
        return self._files.directories

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards, sorted by name; `SourceTensor.shard` is an index into them."""
        return self._shard_tuple

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor by name, also of experts and vision. Tensors of experts are created on request."""
        return self._tensors

    def shard_tensors(self, shard: int) -> list[SourceTensor]:
        """Return the tensors of one shard, given its index in `shards`, in storage order."""
        return self._tensors.in_shard(shard)

    @property
    def config_path(self) -> Path:
        """The path of the config.json that was read."""
        return self._files.config_path

    @property
    def text(self) -> Mapping[str, Any]:
        """The text model's configuration, flat and with one name for each key (see `model_config.text_config`)."""
        return MappingProxyType(self._text)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Oddities that are no errors, one sentence each."""
        return tuple(self._files.warnings)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe by which `read_tensor` stores dense tensors, or None."""
        return self._recipe

    @property
    def vision(self) -> tuple[str, ...]:
        """Names of the tensors of the vision tower and the projector, sorted."""
        return self._vision

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of dense text tensors that K3 does not have; they are read as they are."""
        return tuple(name for name in self._dense if not is_known(name))

    # --- ModelSource ---

    @cached_property
    def identity(self) -> ModelIdentity:
        """Digests of the weights, of the configuration and of the vocabulary.

        That of the weights covers recipe, headers, sizes, published digests and a few sampled bytes of each shard.
        It is equal for the same files in other directories, except that a download cache, which knows the
        published digests, and a plain copy of it differ. It differs for other weights of the same shape, unless
        all samples are equal. It proves no other bytes; the digests of a container do.
        """
        texts = {name: data for name in TEXT_FILES if (data := self.text_bytes(name)) is not None}
        return ModelIdentity(
            weights=f"snapshot:{self._digest.hexdigest()}",
            config=config_identity(self.config, self.text_bytes(GENERATION_CONFIG_NAME), self.config_path),
            text=text_identity({name: checksum.digest(data).hex() for name, data in texts.items()}),
        )

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json as parsed."""
        return MappingProxyType(self._files.config)

    def files(self) -> Iterator[Path]:
        """Yield the path of every shard."""
        for shard in self._shards:
            yield shard.path

    def text_file(self, name: str) -> Path | None:
        """Return the path of a small file of the model, or None. Raises SourceError for a link that dangles."""
        return self._files.text_file(name)

    def text_bytes(self, name: str) -> bytes | None:
        """Return the bytes of a small file, None without it.

        They are read once, and compared with the downloader's record.
        """
        return self._files.text_bytes(name)

    def small_file(self, path: Path) -> bytes:
        """Return the bytes of a small file in one of the directories, checked and kept as by `text_bytes`."""
        return self._files.small_file(path)

    def tensor_names(self) -> Sequence[str]:
        """Return the dense tensors in execution order, without vision and experts."""
        return self._dense

    def dense(self, name: str) -> DenseInfo:
        """Return form and memory of a dense tensor, by headers and recipe. Raises KeyError when there is none."""
        tensor, encoding = self._plain[name], self.encoding(name)
        stored_bytes = bytes_of(encoding, tensor.dtype, tensor.shape)
        return DenseInfo(tensor.dtype, tensor.shape, encoding, stored_bytes, stored_bytes, 0)

    def encoding(self, name: str) -> Encoding:
        """Return the encoding in which `read_tensor` returns a dense tensor.

        Raises KeyError when there is none.
        """
        tensor = self._plain[name]
        if self._recipe is None:
            return Encoding.RAW
        return self._recipe.encoding(name, tensor.dtype, tensor.shape, layer_of(name) in self._mla)

    def read_tensor(self, name: str) -> EncodedTensor:
        """Read one dense (or vision) tensor, and quantize it by the recipe exactly as the repacker does.

        Raises KeyError when there is none of this name, QuantizeError for a weight that is not finite, ShardError
        when the file has become shorter, DriveError when a read fails.
        """
        tensor = self._plain[name]
        return tensor_reader.read_tensor(self._shards[tensor.shard].path, tensor, self.encoding(name))

    def begin_load(
        self,
        names: Sequence[str],
        *,
        on_read: Callable[[str], None] = lambda name: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> ReadAhead:
        """Start to read and quantize dense tensors, a few ahead of those that are taken."""
        return ReadAhead(self.read_tensor, names, on_read=on_read, on_end=on_end)

    def loading_bytes(self, names: Sequence[str]) -> int:
        """Return the stored bytes of the largest tensors that can be read at the same time."""
        return sum(sorted(self._plain[name].nbytes for name in names)[-READ_AHEAD:])

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def expert_layers(self) -> Sequence[int]:
        """Return the 0-based layers that have routed experts, ascending."""
        return tuple(self._experts)

    def expert_count(self, layer: int) -> int:
        """Return the number of routed experts of a layer; ids run from 0.

        Raises KeyError for a layer without experts.
        """
        return self._experts[layer].count

    def expert_layout(self, layer: int) -> ExpertLayout:
        """Return the parts of an expert's payload, sorted by name. Raises KeyError for a layer without experts."""
        return self._experts[layer].layout

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Return an expert's extents in payload order, with adjacent parts in one extent.

        Raises ExpertError for an id that the layer does not have, KeyError for a layer without experts.
        """
        return self._experts[layer].extents(expert, self._shards)

    # --- opening ---

    def _read_shards(self) -> None:
        """Read every header once, compare the shards with the index, and sort the tensors by kind."""
        census = ExpertCensus(self._shards)
        dense: list[str] = []
        vision: list[str] = []
        index, self._files.index = self._files.index, None
        if index is None:
            check = None
            paths = [self._files.single_shard()]
        else:
            check = IndexCheck(index, None if self._layers is None else self._wanted)
            paths = self._files.indexed_shards(index, check.needed_shards())
        for path in paths:
            with RegularFile(path) as file:
                header = self._read_shard(file)
                if check is not None:
                    check.add(path, header)
                shard = len(self._shards) - 1
                for entry in header.tensors:
                    if not self._wanted(entry.name):
                        continue
                    seen = is_vision(entry.name)
                    if not seen and census.add(entry, shard):
                        continue
                    (vision if seen else dense).append(entry.name)
                    self._plain[entry.name] = tensor = SourceTensor(
                        entry.name, entry.dtype, entry.shape, shard, entry.offset, entry.nbytes
                    )
                    checks.check_padding(file, tensor, self._text)
        if check is not None:
            self._files.warnings += check.finish()
        self._experts = census.tables(checks.count(self._text, "num_experts", self._files.config_path))
        self._shard_tuple = tuple(self._shards)
        self._tensors = TensorTable(self._plain, self._experts)
        self._vision = tuple(sorted(vision))
        self._dense = tuple(execution_order(dense))
        self._mla = mla_layers(dense)

    def _read_shard(self, file: RegularFile) -> Header:
        """Read the header of one shard, and add the shard to the list and to the digest of the weights."""
        raw, header = read_header(file)
        record = published_digest(file.path)
        published = None if record is None else record.sha256
        shard = Shard(file.path.name, file.path, header.file_bytes, header.header_bytes, published)
        self._shards.append(shard)
        self._digest.update(f"\0{shard.name}\0{shard.size_bytes}\0{published}\0".encode())
        self._digest.update(raw)
        data_bytes = header.file_bytes - header.header_bytes
        length = min(SAMPLE_BYTES, data_bytes)
        self._digest.update(file.read(header.header_bytes + (data_bytes - length) // 2, length))
        self._digest.update(file.read(header.file_bytes - length, length))
        return header

    def _wanted(self, name: str) -> bool:
        if self._layers is None or is_vision(name):
            return True
        layer = layer_of(name)
        return layer is None or layer in self._layers

    def _check(self) -> None:
        """Check the whole snapshot against config.json."""
        config, path = self._text, self._files.config_path
        twice = checks.same_tensor_twice(self._dense)
        if twice is not None:
            raise SourceError(
                f"is the same tensor as {twice[0]}",
                path=self._shards[self._plain[twice[1]].shard].path,
                tensor=twice[1],
                advice="Nothing says which of them is right: fetch the snapshot again",
            )
        present = {layer for layer in map(layer_of, self._dense) if layer is not None} | self._experts.keys()
        self._files.warnings += checks.check_layers(present, self._layers, config, path)
        checks.check_expert_layers(present, self._experts, config, path)
        if self._recipe is not None:
            self._files.warnings += checks.odd_matrices(self._plain[name] for name in self._dense)
