"""The plan of a repack: the place of every source byte, decided from headers alone. Pure; no I/O.

A `Plan` gives every data file's header and size, every dense tensor's place in the blob, and the rule that
places experts. `routes(shard)` says what becomes of each run of a shard, in file order. The repacker executes
the plan, the verifier compares with it, and `--plan` prints it: three users of one decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from k3.base.errors import ExpertError, SourceError
from k3.checkpoint.shard import SourceTensor
from k3.checkpoint.snapshot import Snapshot
from k3.container.layout import (
    DENSE_NAME,
    PAD_PREFIX,
    SCALES_SUFFIX,
    ExpertPiece,
    FileLayout,
    Tensor,
    cut_expert,
    expert_file_layout,
    expert_file_name,
)
from k3.model.encoded_tensor import stored_arrays
from k3.model.keys import (
    Encoding,
    ExpertKey,
    ExpertLayout,
    Extent,
    is_vision,
    layer_of,
    parse_expert_name,
    tensor_bytes,
)
from k3.model.tensor_recipe import Recipe, mla_layers


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A data file of the container. Source files (of an in-place container) are only pointed into."""

    root: int
    path: str
    kind: str  # experts, dense or source
    size_bytes: int
    header_bytes: int
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedExtent:
    """An extent as it is planned, before it has a digest: payload first, then zeros up to the stored size."""

    file: int
    offset: int
    payload_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A dense tensor: what it is in the source and where its numbers go."""

    position: int
    source: SourceTensor
    encoding: Encoding
    weights: PlannedExtent
    scales: PlannedExtent | None


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """The experts of one layer. `files` are the file numbers of `pieces`, in the same order."""

    layer: int
    experts: int
    layout: ExpertLayout
    pieces: tuple[ExpertPiece, ...]
    files: tuple[int, ...]
    header_bytes: tuple[int, ...]

    def extents(self, expert: int) -> tuple[PlannedExtent, ...]:
        """Return the extents of an expert's pieces. A layer's experts are equally large: ids tell places."""
        return tuple(
            PlannedExtent(file, header + expert * piece.stored_bytes, piece.payload_bytes, piece.stored_bytes)
            for piece, file, header in zip(self.pieces, self.files, self.header_bytes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ExpertRoute:
    """A run of a shard that belongs to an expert: where in the expert's payload it goes."""

    key: ExpertKey
    payload_offset: int


@dataclass(frozen=True, slots=True)
class Route:
    """The destination of [offset, offset + nbytes) of a shard: part of an expert, a dense tensor, or nothing."""

    offset: int
    nbytes: int
    to: ExpertRoute | PlannedTensor | None


@dataclass(frozen=True, slots=True)
class PlannedRoot:
    """A root as planned: kind is home, drive or source. Directories are bound later, where I/O happens."""

    kind: str
    share: int


class Plan:
    """The whole decision for one snapshot, recipe and set of roots. Immutable after construction."""

    def __init__(
        self, snapshot: Snapshot, recipe: Recipe, shares: Sequence[int], *, in_place: bool = False
    ) -> None:
        """`shares[0]` is home's. In place, experts stay where they are and shares are not used."""
        self.snapshot = snapshot
        self.recipe = recipe
        self.in_place = in_place
        kinds = ["home", *("drive" for _ in shares[1:])]
        if in_place:
            kinds = ["home", *("source" for _ in snapshot.directories)]
            shares = [0] * len(kinds)
        self.roots = tuple(PlannedRoot(kind, share) for kind, share in zip(kinds, shares, strict=True))
        self.files: list[PlannedFile] = []
        self.tensors: tuple[PlannedTensor, ...] = ()
        self.layers: dict[int, PlannedLayer] = {}
        self._by_name: dict[str, PlannedTensor] = {}
        self._source_files: dict[str, int] = {}
        self._place_dense()
        for layer in snapshot.expert_layers():
            if not snapshot.expert_layout(layer).payload_bytes:
                raise ExpertError("the layer's experts have no bytes", path=snapshot.config_path, layer=layer)
        if in_place:
            self._point_at_source()
        else:
            self._place_experts()

    # -- construction

    def _place_dense(self) -> None:
        names = self.snapshot.tensor_names()
        full_attention = mla_layers(names)
        encodings = []
        for name in names:
            source = self.snapshot.tensors[name]
            is_mla = layer_of(name) in full_attention
            encodings.append(self.recipe.encoding(name, source.dtype, source.shape, is_mla))
        self._dense_names = tuple(zip(names, encodings, strict=True))
        self._check_names()
        layout = self._dense_layout()
        self.files.append(PlannedFile(0, DENSE_NAME, "dense", layout.size_bytes, len(layout.header)))
        extents = iter(layout.extents)
        planned = []
        for position, (name, encoding) in enumerate(self._dense_names):
            weights = PlannedExtent(0, *next(extents))
            scales = PlannedExtent(0, *next(extents)) if encoding in (Encoding.INT8, Encoding.INT4) else None
            planned.append(PlannedTensor(position, self.snapshot.tensors[name], encoding, weights, scales))
        self.tensors = tuple(planned)
        self._by_name = {tensor.source.name: tensor for tensor in planned}

    def _check_names(self) -> None:
        """Refuse a source that has a tensor of a name that the blob needs for scales or padding."""
        taken: set[str] = set()
        for name, encoding in self._dense_names:
            source = self.snapshot.tensors[name]
            for stored, _, _ in stored_tensors(source, encoding):
                if stored in taken or stored.startswith(PAD_PREFIX):
                    raise SourceError(
                        f"the container needs the tensor name {stored} for itself",
                        path=self.snapshot.shards[source.shard].path,
                        tensor=name,
                        advice="This is no published snapshot: rename the tensor, or leave it out",
                    )
                taken.add(stored)

    def _dense_layout(self) -> FileLayout:
        return FileLayout(
            [group]
            for name, encoding in self._dense_names
            for group in stored_tensors(self.snapshot.tensors[name], encoding)
        )

    def _place_experts(self) -> None:
        shares = [root.share for root in self.roots]
        for layer in self.snapshot.expert_layers():
            layout = self.snapshot.expert_layout(layer)
            experts = self.snapshot.expert_count(layer)
            pieces = cut_expert(layout.payload_bytes, shares)
            files, headers = [], []
            for piece in pieces:
                built = expert_file_layout(layout, experts, pieces, piece.root)
                files.append(len(self.files))
                headers.append(len(built.header))
                self.files.append(
                    PlannedFile(
                        piece.root, expert_file_name(layer), "experts", built.size_bytes, len(built.header), layer
                    )
                )
            self.layers[layer] = PlannedLayer(layer, experts, layout, pieces, tuple(files), tuple(headers))

    def _point_at_source(self) -> None:
        directories = list(self.snapshot.directories)
        for shard in self.snapshot.shards:
            root = 1 + directories.index(shard.path.parent)
            self._source_files[str(shard.path)] = len(self.files)
            self.files.append(PlannedFile(root, shard.path.name, "source", shard.size_bytes, 0))
        for layer in self.snapshot.expert_layers():
            layout = self.snapshot.expert_layout(layer)
            experts = self.snapshot.expert_count(layer)
            self.layers[layer] = PlannedLayer(layer, experts, layout, (), (), ())

    # -- questions

    def header(self, number: int) -> bytes:
        """Return the complete header of a written file, rebuilt: one layer's is too large to keep all of them."""
        file = self.files[number]
        if file.kind == "dense":
            return self._dense_layout().header
        assert file.kind == "experts"
        assert file.layer is not None
        layer = self.layers[file.layer]
        return expert_file_layout(layer.layout, layer.experts, layer.pieces, file.root).header

    def expert_extents(self, key: ExpertKey) -> tuple[PlannedExtent, ...]:
        """Return the extents of an expert in the finished container, in payload order."""
        if not self.in_place:
            return self.layers[key.layer].extents(key.expert)
        return tuple(
            PlannedExtent(
                self._source_files[str(extent.path)], extent.offset, extent.payload_bytes, extent.stored_bytes
            )
            for extent in self.source_extents(key)
        )

    def source_extents(self, key: ExpertKey) -> tuple[Extent, ...]:
        """Return the extents of an expert in the snapshot, in payload order."""
        return self.snapshot.expert_extents(key.layer, key.expert)

    def experts(self) -> Iterator[ExpertKey]:
        """Every expert in (layer, id) order."""
        for layer in self.layers.values():
            for expert in range(layer.experts):
                yield ExpertKey(layer.layer, expert)

    def routes(self, shard: int) -> list[Route]:
        """Return what becomes of a shard's bytes, in file order. Tensors left out have no destination."""
        tensors = self.snapshot.shard_tensors(shard)
        return [Route(tensor.offset, tensor.nbytes, self._target(tensor)) for tensor in tensors]

    def _target(self, tensor: SourceTensor) -> ExpertRoute | PlannedTensor | None:
        name = None if is_vision(tensor.name) else parse_expert_name(tensor.name)
        if name is not None and name.key.layer in self.layers:
            return ExpertRoute(name.key, self.layers[name.key.layer].layout.part(name.part).offset)
        return self._by_name.get(tensor.name)

    def shard_units(self, shard: int) -> tuple[set[ExpertKey], set[int]]:
        """Return the experts and dense tensors (by position) that this shard's bytes take part in."""
        keys: set[ExpertKey] = set()
        positions: set[int] = set()
        for route in self.routes(shard):
            if isinstance(route.to, ExpertRoute):
                keys.add(route.to.key)
            elif route.to is not None:
                positions.add(route.to.position)
        return keys, positions

    @property
    def read_bytes(self) -> int:
        """Bytes read from the snapshot's shards: each is read whole, once."""
        return sum(shard.size_bytes for shard in self.snapshot.shards)

    def write_bytes(self) -> Mapping[int, int]:
        """Bytes of data files to be written, per root number."""
        totals = {number: 0 for number, root in enumerate(self.roots) if root.kind != "source"}
        for file in self.files:
            if file.kind != "source":
                totals[file.root] += file.size_bytes
        return totals


def stored_tensors(source: SourceTensor, encoding: Encoding) -> list[Tensor]:
    """Return what a dense tensor is stored as: itself, or weights followed by scales (docs/container.md 2.2)."""
    arrays = stored_arrays(encoding, source.dtype, source.shape)
    return [
        (name, *array) for name, array in zip((source.name, source.name + SCALES_SUFFIX), arrays, strict=False)
    ]


def row_bytes(source: SourceTensor) -> int:
    """Bytes of one row of a matrix in the source."""
    return tensor_bytes(source.dtype, source.shape[1:])
