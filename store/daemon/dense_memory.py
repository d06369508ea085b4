"""The dense tensors of a container, read once into a memfd that every engine maps.

Extents that follow each other in a file are read together, in runs of at most RUN_BYTES or one extent, several
runs at a time, past the page cache and straight to their place. Each extent is compared with its digest; a run
that fails is read once more. Called by the daemon before it serves; the threads end before `load_dense` returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from k3.base import checksum
from k3.base.direct_io import Bytes, ReadFile
from k3.base.errors import DamageError, DriveError, K3Error, UnsupportedError
from k3.base.pages import PAGE_BYTES, page_ceil
from k3.container.catalog import CatalogTensor
from k3.container.catalog_record import CatalogExtent
from k3.container.reader import Container
from k3.store.protocol.native import map_shared

RUN_BYTES = 16 << 20
THREADS = 8
ATTEMPTS = 2

_log = logging.getLogger("k3.store")


@dataclass(frozen=True, slots=True)
class _Piece:
    """One extent of one tensor and its place in the memfd."""

    tensor: str
    extent: CatalogExtent
    start: int


@dataclass(frozen=True, slots=True)
class Run:
    """Extents that lie one after the other in a file and in the memfd."""

    path: Path
    pieces: tuple[_Piece, ...]

    @property
    def offset(self) -> int:
        """Where in the file it begins."""
        return self.pieces[0].extent.offset

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        last = self.pieces[-1].extent
        return last.offset + last.stored_bytes - self.offset


def plan_runs(container: Container, tensors: Sequence[CatalogTensor]) -> list[Run]:
    """Return the reads that fill the memfd of the dense weights, in its order (`model_descriptor.place_dense`)."""
    runs: list[list[_Piece]] = []
    for piece in _pieces(tensors):
        last = runs[-1][-1] if runs else None
        if last is not None and _follows(piece, last) and _run_bytes(runs[-1], piece) <= RUN_BYTES:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [Run(container.file_path(pieces[0].extent.file), tuple(pieces)) for pieces in runs]


def _pieces(tensors: Sequence[CatalogTensor]) -> Iterator[_Piece]:
    end = 0
    for tensor in tensors:
        for extent in (tensor.weights, tensor.scales):
            if extent is not None:
                if extent.offset % PAGE_BYTES or extent.stored_bytes % PAGE_BYTES:
                    raise UnsupportedError(
                        "a dense tensor does not lie on whole pages", tensor=tensor.name, offset=extent.offset
                    )
                yield _Piece(tensor.name, extent, end)
                end += page_ceil(extent.stored_bytes)


def _follows(piece: _Piece, last: _Piece) -> bool:
    return (
        piece.extent.file == last.extent.file
        and piece.extent.offset == last.extent.offset + last.extent.stored_bytes
        and piece.start == last.start + last.extent.stored_bytes
    )


def _run_bytes(run: Sequence[_Piece], more: _Piece) -> int:
    return sum(piece.extent.stored_bytes for piece in run) + more.extent.stored_bytes


def load_dense(
    descriptor: int, nbytes: int, runs: Sequence[Run], *, direct: bool, on_read: Callable[[int], None]
) -> None:
    """Fill the memfd `descriptor` of `nbytes` (whole pages). The mapping is gone when this returns.

    `on_read` is told the bytes of each run as it ends, in this thread. DriveError or DamageError name file,
    tensor and offset.
    """
    into: Bytes = map_shared(descriptor, nbytes, writable=True)
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="k3-dense")
    try:
        reads = [pool.submit(_read_run, run, into, direct) for run in runs]
        through_cache: set[Path] = set()
        for read in as_completed(reads):
            nbytes, directory, is_direct = read.result()
            if direct and not is_direct and directory not in through_cache:
                through_cache.add(directory)
                _log.warning("%s cannot be read with O_DIRECT: reads go through the page cache", directory)
            on_read(nbytes)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read_run(run: Run, into: Bytes, direct: bool) -> tuple[int, Path, bool]:
    """Read one run and check it, twice if need be. Returns its bytes, its directory, and past the cache or not."""
    start = run.pieces[0].start
    target = into[start : start + run.nbytes]
    failure: K3Error | None = None
    for _ in range(ATTEMPTS):
        try:
            with ReadFile(run.path, direct=direct) as file:  # opened for each run: little beside its bytes
                file.read(run.offset, run.nbytes, target)
            for piece in run.pieces:
                _check(run, piece, into)
            return run.nbytes, run.path.parent, file.direct
        except (DriveError, DamageError) as error:
            failure = error
    assert failure is not None
    raise failure


def _check(run: Run, piece: _Piece, into: Bytes) -> None:
    stored = into[piece.start : piece.start + piece.extent.stored_bytes]
    if checksum.digest(stored) != piece.extent.digest:
        raise DamageError(
            "tensor does not match its digest", path=run.path, tensor=piece.tensor, offset=piece.extent.offset,
            advice="Run k3-verify, then repack the damaged file from the source",
        )  # fmt: skip
