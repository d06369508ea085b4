"""Every offset and size of the format: the only module that computes the place of a byte in a file.

`docs/container.md` is the specification. Invariants: extents start on pages and cover a file from its header to
its end without gaps, and one expert's payload is the concatenation of its pieces' payloads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3.base.pages import PAGE_BYTES, page_ceil
from k3.checkpoint.safetensors_header import build_header
from k3.model.keys import ExpertLayout, tensor_bytes
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME

FORMAT = "k3-container"
ROOT_FORMAT = "k3-container-root"
VERSION = 1

JOURNAL_NAME = "journal.mdb"
ROOT_NAME = "root.json"
DENSE_NAME = "dense.safetensors"
EXPERTS_DIRECTORY = "experts"
PARTIAL_SUFFIX = ".partial"
SCALES_SUFFIX = ".qs"
PAD_PREFIX = "__pad__."
RESERVED_NAMES = frozenset({MANIFEST_NAME, CATALOG_NAME, JOURNAL_NAME, ROOT_NAME, DENSE_NAME, EXPERTS_DIRECTORY})

DIGEST_BYTES = 16
PIECE_RECORD = struct.Struct("<IIQQQ16s")
EXPERT_KEY = struct.Struct(">II")
NUMBER_KEY = struct.Struct(">I")

assert PIECE_RECORD.size == 48, "the piece record of format version 1 has 48 bytes"
assert PAGE_BYTES == 4096, "format version 1 has pages of 4096 bytes"


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """One root's share of an expert, as whole pages of the expert's payload.

    `payload_offset` counts from the start of the payload.
    """

    root: int
    payload_offset: int
    payload_bytes: int
    stored_bytes: int


def expert_file_name(layer: int) -> str:
    """Return the path of a layer's expert file, relative to its root."""
    return f"{EXPERTS_DIRECTORY}/layer-{layer:05d}.safetensors"


def cut_expert(payload_bytes: int, shares: Sequence[int]) -> tuple[ExpertPiece, ...]:
    """Return the pieces of an expert over roots with these shares; a root without pages of it has no piece."""
    total_share = sum(shares)
    assert total_share > 0
    pages = page_ceil(payload_bytes) // PAGE_BYTES
    pieces = []
    start_page = 0
    share_so_far = 0
    for root, share in enumerate(shares):
        share_so_far += share
        end_page = (2 * pages * share_so_far + total_share) // (2 * total_share)
        if end_page > start_page:
            offset = start_page * PAGE_BYTES
            stored = (end_page - start_page) * PAGE_BYTES
            pieces.append(ExpertPiece(root, offset, min(stored, payload_bytes - offset), stored))
        start_page = end_page
    return tuple(pieces)


Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor, as a header lists them."""


class FileLayout:
    """The header and the extents of one data file, computed before any of it is written.

    `header` is complete (padded to whole pages); `extents` are (offset, payload bytes, stored bytes) in file
    order; `size_bytes` is the size of the whole file.
    """

    def __init__(self, groups: Iterable[Sequence[Tensor]]) -> None:
        """Lay out groups of tensors; each group becomes one padded extent."""
        entries: list[Tensor] = []
        spans: list[tuple[int, int, int]] = []
        position = 0
        pads = 0
        for group in groups:
            payload = sum(tensor_bytes(dtype, shape) for _, dtype, shape in group)
            stored = page_ceil(payload)
            entries.extend(group)
            if stored > payload:
                entries.append((f"{PAD_PREFIX}{pads}", "U8", (stored - payload,)))
                pads += 1
            spans.append((position, payload, stored))
            position += stored
        self.header = build_header(entries, align=PAGE_BYTES)
        base = len(self.header)
        self.extents = tuple((base + start, payload, stored) for start, payload, stored in spans)
        self.size_bytes = base + position


def expert_file_layout(layout: ExpertLayout, experts: int, pieces: Sequence[ExpertPiece], root: int) -> FileLayout:
    """Return the layout of one root's file of one layer: an extent for each expert, in ascending id.

    `pieces` is `cut_expert` of the layer's payload. With a single piece the tensors keep their source names.
    """
    mine = [piece for piece in pieces if piece.root == root]
    assert len(mine) == 1
    if len(pieces) == 1:
        return FileLayout(
            [(f"{layout.prefix}.{expert}.{part.name}", part.dtype, part.shape) for part in layout.parts]
            for expert in range(experts)
        )
    shape = (mine[0].payload_bytes,)
    return FileLayout([(f"{layout.prefix}.{expert}.piece.{root}", "U8", shape)] for expert in range(experts))


def pack_piece(file: int, offset: int, payload_bytes: int, stored_bytes: int, digest: bytes) -> bytes:
    """Return one 48-byte catalog record."""
    assert len(digest) == DIGEST_BYTES
    return PIECE_RECORD.pack(file, 0, offset, payload_bytes, stored_bytes, digest)


def unpack_pieces(value: bytes) -> list[tuple[int, int, int, int, bytes]]:
    """Return (file, offset, payload, stored, digest) of each record.

    Raises ValueError when the value is not a whole number of valid records.
    """
    if not value or len(value) % PIECE_RECORD.size:
        raise ValueError(f"expert record of {len(value)} bytes is not a multiple of {PIECE_RECORD.size}")
    pieces = []
    for file, reserved, offset, payload, stored, digest in PIECE_RECORD.iter_unpack(value):
        if reserved != 0 or payload > stored:
            raise ValueError("expert record has a non-zero reserved field or a payload larger than its extent")
        pieces.append((file, offset, payload, stored, digest))
    return pieces
