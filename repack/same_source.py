"""A quick check that a finished container was made from this snapshot, by samples of both.

Two snapshots of one architecture have shards of equal names and sizes, so these prove nothing. A difference in a
sample whose digest fits proves that the source is another one. Equal samples prove nothing, nor do damaged ones:
that takes --verify-full.
"""

from __future__ import annotations

from k3.base import checksum
from k3.base.direct_io import ReadFile, aligned_buffer, span_bytes
from k3.base.pages import PAGE_BYTES
from k3.checkpoint.snapshot import Snapshot
from k3.container.reader import Container
from k3.model.keys import Encoding, Extent

TENSOR_BYTES_MAX = 64 << 10
"""Dense tensors up to this size that were taken over unchanged are compared whole: norms, biases, decays."""


def first_unlike(container: Container, snapshot: Snapshot) -> str | None:
    """Name of the first sample in which the container and the snapshot differ, None if all are equal.

    Samples are a page from the middle of one expert of each layer, and the small unchanged tensors.
    """
    if tuple(container.tensor_names()) != tuple(snapshot.tensor_names()):
        return "the list of tensors"
    if tuple(container.expert_layers()) != tuple(snapshot.expert_layers()):
        return "the list of expert layers"
    for layer in container.expert_layers():
        if (container.expert_count(layer), container.expert_layout(layer)) != (
            snapshot.expert_count(layer), snapshot.expert_layout(layer),
        ):  # fmt: skip
            return f"layer {layer}"
        expert = layer % container.expert_count(layer)
        theirs, ours = container.expert_extents(layer, expert), snapshot.expert_extents(layer, expert)
        if _middle(theirs) != _middle(ours) and all(map(_is_sound, theirs)):
            return f"layer {layer} expert {expert}"
    for name in container.tensor_names():
        entry = container.tensor(name)
        if entry.encoding is Encoding.RAW and entry.weights.payload_bytes <= TENSOR_BYTES_MAX:
            extent = container.extent(entry.weights)
            mine = snapshot.read_tensor(name).data.tobytes()
            if _read(extent, 0, extent.payload_bytes) != mine and _is_sound(extent):
                return f"tensor {name}"
    return None


def _middle(extents: tuple[Extent, ...]) -> bytes:
    """Up to a page from the middle of an expert's payload."""
    total_bytes = sum(extent.payload_bytes for extent in extents)
    begin = total_bytes // 2
    end = min(total_bytes, begin + PAGE_BYTES)
    found = b""
    position = 0
    for extent in extents:
        start, stop = max(begin - position, 0), min(end - position, extent.payload_bytes)
        if start < stop:
            found += _read(extent, start, stop - start)
        position += extent.payload_bytes
    return found


def _is_sound(extent: Extent) -> bool:
    return checksum.digest(_read(extent, 0, extent.stored_bytes)) == extent.digest


def _read(extent: Extent, start: int, length: int) -> bytes:
    with ReadFile(extent.path) as file:
        offset = extent.offset + start
        return file.read(offset, length, aligned_buffer(span_bytes(offset, length))).tobytes()
