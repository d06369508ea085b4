"""One expert from its extents into one buffer: where each piece goes, the reads, the check, the second try.

A piece is one extent. Pieces are read at page-aligned places one after the other, so the pieces of a
container (whole pages, only the last one padded) make up the payload where they land; pieces of a raw
snapshot, which start anywhere, are moved together afterwards.

A piece is read in parts, so that a drive works on one expert with its whole depth and experts arrive one after
the other, not all of them late. The functions keep no state and may be called from any thread; any parts may be
read at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3.base import checksum
from k3.base.direct_io import Bytes, span_bytes
from k3.base.errors import DamageError, DriveError, ExpertError, K3Error
from k3.base.pages import PAGE_BYTES, page_ceil
from k3.model.keys import ExpertKey, ExpertLayout, Extent
from k3.store.local.open_files import OpenFiles

PART_BYTES = 4 << 20
"""Bytes asked of a drive at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One extent and the page-aligned part of the buffer that it is read into."""

    extent: Extent
    start: int
    capacity: int

    @property
    def payload_start(self) -> int:
        """Where in the buffer the content begins."""
        return self.start + self.extent.offset % PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes [offset, offset + nbytes) of a file; the page that they begin in goes to `start` in the buffer."""

    path: Path
    offset: int
    nbytes: int
    start: int
    capacity: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of a piece after its parts had been read once."""

    retries: int
    checked_bytes: int


def buffer_bytes(layout: ExpertLayout) -> int:
    """Capacity that surely holds any expert of a layer, however its parts are scattered over files.

    Whole pages take no more than the payload rounded up; each part that starts and ends inside a page can
    add one page at either end.
    """
    return page_ceil(layout.payload_bytes) + 2 * PAGE_BYTES * len(layout.parts)


def place(key: ExpertKey, extents: Sequence[Extent], layout: ExpertLayout, capacity: int) -> tuple[Piece, ...]:
    """Give each extent its part of a buffer of `capacity` bytes.

    ExpertError when the extents do not add up to the layer's payload or are in more pieces than it has parts.
    """
    payload_bytes = sum(extent.payload_bytes for extent in extents)
    if payload_bytes != layout.payload_bytes:
        raise ExpertError(
            f"extents hold {payload_bytes} bytes, the layer's experts have {layout.payload_bytes}",
            path=extents[0].path if extents else None,
            layer=key.layer,
            expert=key.expert,
        )
    pieces = []
    start = 0
    for extent in extents:
        span = span_bytes(extent.offset, extent.stored_bytes)
        pieces.append(Piece(extent, start, span))
        start += span
    if start > capacity:
        raise ExpertError(
            f"scattered over {len(extents)} places that need {start} bytes, the buffers have {capacity}",
            path=extents[0].path,
            layer=key.layer,
            expert=key.expert,
        )
    return tuple(pieces)


def split(piece: Piece, part_bytes: int) -> tuple[Part, ...]:
    """Cut a piece into parts of at most `part_bytes`, a multiple of the page, at page boundaries of its file."""
    assert part_bytes > 0
    assert part_bytes % PAGE_BYTES == 0
    extent = piece.extent
    first_page = extent.offset // PAGE_BYTES * PAGE_BYTES
    end = extent.offset + extent.stored_bytes
    parts = []
    for page in range(first_page, end, part_bytes):
        begin, stop = max(page, extent.offset), min(page + part_bytes, end)
        capacity = min(part_bytes, first_page + piece.capacity - page)
        parts.append(Part(extent.path, begin, stop - begin, piece.start + page - first_page, capacity))
    return tuple(parts)


def read_part(files: OpenFiles, part: Part, buffer: Bytes) -> None:
    """Read one part to its place in `buffer`. DriveError with file and offset."""
    with files.reading(part.path) as file:
        file.read(part.offset, part.nbytes, buffer[part.start : part.start + part.capacity])


def finish_piece(
    files: OpenFiles, key: ExpertKey, piece: Piece, buffer: Bytes, *, check: bool, error: Exception | None
) -> Fetched:
    """Make sure of a piece whose parts were read, or met `error`; read all of it once more if need be.

    With `check`, the bytes are compared with the extent's digest if it has one. DriveError or DamageError
    with file, offset, layer and expert when the second try fails too; the buffer's content is then undefined.
    Any other error is no fault of a drive, and raised as it is.
    """
    extent = piece.extent
    into = buffer[piece.start : piece.start + piece.capacity]
    if error is None:
        skip = extent.offset % PAGE_BYTES
        try:
            return Fetched(0, _compare(extent, into[skip : skip + extent.stored_bytes]) if check else 0)
        except DamageError as damage:
            error = damage
    if not isinstance(error, DriveError | DamageError):
        raise error
    files.drop(extent.path)  # the file may have been replaced by a sound one meanwhile
    try:
        with files.reading(extent.path) as file:
            stored = file.read(extent.offset, extent.stored_bytes, into)
        return Fetched(1, _compare(extent, stored) if check else 0)
    except (DriveError, DamageError) as second:
        files.drop(extent.path)
        raise located(second, key) from second


def join(pieces: Sequence[Piece], buffer: Bytes) -> tuple[int, int]:
    """Make the payloads of all pieces contiguous, moving bytes only where needed.

    Returns where in the buffer the expert's payload begins and ends.
    """
    begin = pieces[0].payload_start
    end = begin
    for piece in pieces:
        source = piece.payload_start
        nbytes = piece.extent.payload_bytes
        if source != end:
            assert source > end, "pieces only ever move towards the beginning"
            buffer[end : end + nbytes] = buffer[source : source + nbytes]  # NumPy copies overlaps correctly
        end += nbytes
    return begin, end


def located(error: K3Error, key: ExpertKey) -> K3Error:
    """A new error like `error` that also says which expert it was. New, since several threads may raise it."""
    return type(error)(
        error.problem,
        path=error.path,
        tensor=error.tensor,
        layer=key.layer,
        expert=key.expert,
        offset=error.offset,
        advice=error.advice,
    )


def _compare(extent: Extent, stored: Bytes) -> int:
    """Bytes that were compared with a digest; DamageError when they differ from it."""
    if extent.digest is None:
        return 0
    found = checksum.digest(stored)
    if found != extent.digest:
        raise DamageError(
            f"{extent.stored_bytes} bytes have digest {found.hex()} instead of {extent.digest.hex()}",
            path=extent.path,
            offset=extent.offset,
            advice="Find everything that is damaged with k3-verify --read-data all, then restore it",
        )
    return extent.stored_bytes
