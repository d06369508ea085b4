"""The layout that the format demands: headers and extents computed anew from the catalog's shapes. Pure.

Nothing here looks at a recorded offset. `structure` compares what this gives with the catalog, the manifest and
the files, so that the three cannot agree with each other on something that the format does not allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3.base import checksum
from k3.container.catalog import CatalogLayer, CatalogTensor
from k3.container.layout import (
    DENSE_NAME,
    SCALES_SUFFIX,
    FileLayout,
    Tensor,
    cut_expert,
    expert_file_layout,
    expert_file_name,
)
from k3.model.encoded_tensor import stored_arrays

Place = tuple[int, int, int]
"""(offset, payload bytes, stored bytes) of an extent in its file."""


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A data file as the format has it. `header` is not kept: a layer's can be a megabyte. See `header()`."""

    root: int
    path: str
    kind: str
    size_bytes: int
    header_bytes: int
    header_digest: str
    places: tuple[Place, ...]  # one for each expert, or for each stored dense tensor
    layer: CatalogLayer | None = None


def expected_expert_files(layer: CatalogLayer, shares: Sequence[int]) -> list[ExpectedFile]:
    """Return the files that hold one layer's experts, in root order; extent i of each is expert i's piece."""
    pieces = cut_expert(layer.layout.payload_bytes, shares)
    name = expert_file_name(layer.layer)
    return [
        _expected(
            piece.root, name, "experts", expert_file_layout(layer.layout, layer.experts, pieces, piece.root), layer
        )
        for piece in pieces
    ]


def expected_dense_file(tensors: Sequence[CatalogTensor]) -> ExpectedFile:
    """Return the dense blob; its extents are each tensor's weights and then, where it has them, its scales."""
    return _expected(0, DENSE_NAME, "dense", _dense_layout(tensors), None)


def header(file: ExpectedFile, shares: Sequence[int], tensors: Sequence[CatalogTensor]) -> bytes:
    """Return the complete header of an expected file, made again."""
    if file.layer is None:
        return _dense_layout(tensors).header
    pieces = cut_expert(file.layer.layout.payload_bytes, shares)
    return expert_file_layout(file.layer.layout, file.layer.experts, pieces, file.root).header


def stored_tensors(tensor: CatalogTensor) -> list[Tensor]:
    """Return what the blob holds for a dense tensor: itself, or its weights followed by its scales."""
    arrays = stored_arrays(tensor.encoding, tensor.dtype, tensor.shape)
    return [
        (name, *array) for name, array in zip((tensor.name, tensor.name + SCALES_SUFFIX), arrays, strict=False)
    ]


def _dense_layout(tensors: Iterable[CatalogTensor]) -> FileLayout:
    return FileLayout([stored] for tensor in tensors for stored in stored_tensors(tensor))


def _expected(root: int, path: str, kind: str, layout: FileLayout, layer: CatalogLayer | None) -> ExpectedFile:
    digest = checksum.digest(layout.header).hex()
    return ExpectedFile(root, path, kind, layout.size_bytes, len(layout.header), digest, layout.extents, layer)
