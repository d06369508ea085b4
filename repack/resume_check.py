"""Before a resumed run trusts what it finds, it reads it back: every unit the journal holds against its digest."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from k3.base import checksum
from k3.base.direct_io import ReadFile
from k3.base.errors import DriveError
from k3.base.huge_pages import HugePages, huge_pages
from k3.base.presence import NOT_THERE, is_there
from k3.container.layout import PARTIAL_SUFFIX
from k3.model.keys import ExpertKey
from k3.repack.buffers import BufferPool
from k3.repack.journal import Journal
from k3.repack.plan import Plan, PlannedExtent

READ_BYTES = 16 << 20
READERS = 3


@dataclass(frozen=True, slots=True)
class Recheck:
    """The result of reading units back: those that are good, and those that are not what the journal says."""

    good_units: int
    checked_bytes: int
    bad_experts: tuple[ExpertKey, ...]
    bad_tensors: tuple[int, ...]
    huge_pages: HugePages


def journalled_bytes(plan: Plan, journal: Journal) -> int:
    """Bytes that `recheck` will read."""
    return sum(extent.stored_bytes for _, extents, _ in _units(plan, journal) for extent in extents)


def recheck(
    plan: Plan,
    directories: Mapping[int, Path],
    journal: Journal,
    *,
    direct: bool,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> Recheck:
    """Read every journalled unit back and compare its digests. Experts in place are their source: not read here.

    A file that is missing or short makes its units bad, as does a byte that differs and a place that the drive
    cannot read (EIO): they are made again. Any other error (no rights, no descriptors, a drive that is gone) says
    nothing about the bytes: DriveError, and what is there stays as it is.
    """
    bad_experts: list[ExpertKey] = []
    bad_tensors: list[int] = []
    good = checked_bytes = 0
    pool = ThreadPoolExecutor(READERS, "recheck")
    buffers = BufferPool(READERS, READ_BYTES)
    try:

        def check(unit: tuple[ExpertKey | int, tuple[PlannedExtent, ...], tuple[bytes, ...]]) -> bool:
            _, extents, digests = unit
            return all(
                _extent_digest(_written_path(plan, directories, extent.file), extent, buffers, direct) == digest
                for extent, digest in zip(extents, digests, strict=True)
            )

        units = list(_units(plan, journal))
        for unit, ok in zip(units, pool.map(check, units), strict=True):
            key, extents, _ = unit
            nbytes = sum(extent.stored_bytes for extent in extents)
            checked_bytes += nbytes
            on_bytes(nbytes)
            if ok:
                good += 1
            elif isinstance(key, ExpertKey):
                bad_experts.append(key)
            else:
                bad_tensors.append(key)
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted run does not read on
    return Recheck(good, checked_bytes, tuple(bad_experts), tuple(bad_tensors), huge_pages(buffers.made))


def _units(
    plan: Plan, journal: Journal
) -> Iterator[tuple[ExpertKey | int, tuple[PlannedExtent, ...], tuple[bytes, ...]]]:
    if not plan.in_place:
        for key, digests in sorted(journal.experts.items()):
            yield key, plan.expert_extents(key), digests
    for position, digests in sorted(journal.tensors.items()):
        tensor = plan.tensors[position]
        extents = (tensor.weights,) if tensor.scales is None else (tensor.weights, tensor.scales)
        yield position, extents, digests


def _written_path(plan: Plan, directories: Mapping[int, Path], number: int) -> Path:
    file = plan.files[number]
    final = directories[file.root] / file.path
    partial = final.with_name(final.name + PARTIAL_SUFFIX)
    return partial if is_there(partial) else final


def _extent_digest(path: Path, extent: PlannedExtent, buffers: BufferPool, direct: bool) -> bytes | None:
    hasher = checksum.Hasher()
    buffer = buffers.take()
    try:
        with ReadFile(path, direct=direct) as file:
            for start in range(0, extent.stored_bytes, READ_BYTES):
                length = min(READ_BYTES, extent.stored_bytes - start)
                hasher.update(file.read(extent.offset + start, length, buffer).data)
    except DriveError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, NOT_THERE) and cause.errno != errno.EIO:
            raise
        return None
    finally:
        buffers.give(buffer)
    return hasher.digest()
