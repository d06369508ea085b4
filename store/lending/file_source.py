"""`FileSource`: experts from files, without a daemon. The source that an engine uses by default.

The native data plane (`store/src/lending.h`) does the work in this process: its threads read, check digests and
choose which experts stay in memory. This module says where experts lie, makes leases of what was read, and turns
what went wrong into errors with file, layer, expert and offset. No call holds the interpreter's lock while it
waits, and a signal ends a wait.

Memory is one region that is reserved here and used bit by bit: pages that no expert was read into take none.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from k3.base.direct_io import CUT_ADVICE, IRREGULAR_ADVICE, drive_error, memory_error
from k3.base.errno_advice import Operation
from k3.base.errors import DamageError, DriveError, ExpertError, K3Error
from k3.base.huge_pages import HugePages, huge_pages
from k3.base.page_buffers import huge_memory
from k3.base.pages import PAGE_BYTES
from k3.model.keys import ExpertKey, Extent
from k3.model.model_source import ModelSource
from k3.store._store import Lending, LoanFailure, LoanRequest, NoRoom
from k3.store.protocol.plane_sizes import default_open_files, slot_bytes_for
from k3.store.request_stream import RequestStream
from k3.store.source import (
    BudgetError,
    Lease,
    Payload,
    SourceStats,
    checked_request,
    poisoned_on_release,
    read_only,
)

Verify = Literal["always", "first", "never"]

WORKING_SLOTS = 16
"""Experts that can be held without any cache: as many as a token of the real model picks in a layer."""

DEFAULT_THREADS = 8
"""Reads in flight: bench/read_depth.py shows what a drive gains from more."""

PART_BYTES = 4 << 20
"""Bytes asked of a drive at once, and the most that may be."""

POLICY = "least-stale"
"""The rule by which experts leave memory (docs/decisions/0018)."""

_log = logging.getLogger("k3.store")


class FileSource:
    """An `ExpertSource` that reads the extents of any `ModelSource`.

    RAM is (`working_slots` + `cache_bytes` // slot + `prefetch_slots`) slots; a slot holds the largest expert of
    `layers` (None: all that the model has) plus a page or two. `prefetch_slots` are what prefetches may fill; with
    none, they are let go. `verify` says which reads are compared with their digests: all, the first of each
    expert, or none; what was read from a file that has changed since is always compared. `threads` read, and
    drives are asked for `part_bytes` at a time. `max_open_files` None means a quarter of what the process may
    have.
    """

    def __init__(
        self,
        model: ModelSource,
        *,
        layers: Collection[int] | None = None,
        cache_bytes: int = 0,
        working_slots: int = WORKING_SLOTS,
        prefetch_slots: int = 0,
        direct: bool = True,
        verify: Verify = "always",
        threads: int = DEFAULT_THREADS,
        part_bytes: int = PART_BYTES,
        max_open_files: int | None = None,
        patience_s: float = 60.0,
        debug: bool = False,
    ) -> None:
        if cache_bytes < 0 or working_slots < 1 or prefetch_slots < 0 or threads < 1:
            raise ValueError(f"{cache_bytes=}, {working_slots=}, {prefetch_slots=}, {threads=} make no source")
        if not 0 < part_bytes <= PART_BYTES or part_bytes % PAGE_BYTES:
            raise ValueError(f"part_bytes must be whole pages, at most {PART_BYTES}, not {part_bytes}")
        if verify not in ("always", "first", "never"):
            raise ValueError(f"verify must be always, first or never, not {verify!r}")
        if max_open_files is not None and max_open_files < 0:
            raise ValueError(f"limit of open files must be at least 1, not {max_open_files}")
        self._model = model
        self._patience_s = patience_s
        self._direct = direct
        self._debug = debug
        served = [layer for layer in model.expert_layers() if layers is None or layer in layers]
        self._payload_bytes = {layer: model.expert_layout(layer).payload_bytes for layer in served}
        self._counts = {layer: model.expert_count(layer) for layer in served}
        self._slot_bytes = slot_bytes_for(max(self._payload_bytes.values(), default=0))
        cached = min(cache_bytes // self._slot_bytes, sum(self._counts.values()))
        self._slots = working_slots + cached + prefetch_slots
        self._region = huge_memory(self._slots * self._slot_bytes)
        self._view: Payload | None = None
        self._plane = Lending(
            memory=self._region,
            slot_bytes=self._slot_bytes,
            slots=self._slots,
            working_slots=working_slots,
            prefetch_slots=prefetch_slots,
            policy=POLICY,
            layer_counts=self._counts,
            verify=verify,
            threads=threads,
            checkers=_checkers(model),
            chunk_bytes=part_bytes,
            direct=direct,
            open_files=max_open_files or default_open_files(),
            patience_s=patience_s,
        )
        self._placing = threading.Lock()
        self._placed: dict[int, set[int]] = {layer: set() for layer in served}
        self._paths: list[Path] = []
        self._file_numbers: dict[Path, int] = {}
        self._refused_direct = 0
        self._told: set[Path] = set()

    @property
    def plane(self) -> Lending:
        """The native data plane, for tests that let drives fail."""
        return self._plane

    def file_number(self, path: Path) -> int:
        """Return the number by which the data plane knows a file."""
        number = self._file_numbers.get(path)
        if number is None:
            number = self._file_numbers[path] = self._plane.add_file(os.fsencode(path))
            assert number == len(self._paths)
            self._paths.append(path)
        return number

    def lease(self, layer: int, experts: Sequence[int]) -> RequestStream[LoanRequest]:
        """See `ExpertSource.lease`. Waits for its turn when other requests hold the slots."""
        ids = checked_request(layer, experts, self._counts)
        self._place(layer, ids)
        try:
            request = self._plane.request(layer, ids)
        except OSError as error:
            raise memory_error("experts cannot be read", error, Operation.THREAD) from error
        if isinstance(request, NoRoom):
            raise self._out_of_room(len(ids), request)
        return RequestStream(self, request)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """See `ExpertSource.prefetch`. Of all hints, the latest `prefetch_slots` experts count."""
        ids = checked_request(layer, experts, self._counts)
        for expert in ids:
            with contextlib.suppress(K3Error):  # a request for it will meet the error
                self._place(layer, (expert,))
        try:
            hint = self._plane.prefetch(layer, ids)
        except OSError:  # no threads to be had: likewise
            return lambda: None
        return partial(self._plane.take_back, hint)

    def stats(self) -> SourceStats:
        """See `ExpertSource.stats`."""
        return SourceStats(
            slots=self._slots, slot_bytes=self._slot_bytes, direct=self._direct_by_directory(),
            **self._plane.stats(),
        )  # fmt: skip

    def huge_pages(self) -> HugePages:
        """See `ExpertSource.huge_pages`."""
        return huge_pages([self._region])

    def close(self) -> None:
        """See `ExpertSource.close`. Waits for the reads that are in progress."""
        self._plane.close()

    # Where experts lie

    def _place(self, layer: int, experts: Sequence[int]) -> None:
        """Tell the data plane where experts lie that it does not know. ExpertError when one cannot be read."""
        placed = self._placed[layer]
        unknown = [expert for expert in experts if expert not in placed]
        if not unknown:
            return
        with self._placing:
            for expert in unknown:
                extents = self._model.expert_extents(layer, expert)
                self._check(ExpertKey(layer, expert), extents)
                pieces = [
                    (self.file_number(it.path), it.offset, it.payload_bytes, it.stored_bytes, it.digest)
                    for it in extents
                ]
                try:
                    self._plane.place(layer, expert, self._payload_bytes[layer], pieces)
                except ValueError as error:
                    raise ExpertError(str(error), path=extents[0].path, layer=layer, expert=expert) from error
                placed.add(expert)

    def _check(self, key: ExpertKey, extents: Sequence[Extent]) -> None:
        found_bytes, payload_bytes = sum(it.payload_bytes for it in extents), self._payload_bytes[key.layer]
        if found_bytes != payload_bytes:
            raise ExpertError(
                f"extents hold {found_bytes} bytes, the layer's experts have {payload_bytes}",
                path=extents[0].path if extents else None,
                layer=key.layer,
                expert=key.expert,
            )

    def _direct_by_directory(self) -> dict[Path, bool]:
        """For each directory that was read from: do reads go past the page cache there."""
        found: dict[Path, bool] = {}
        for number, direct in self._plane.opened():
            directory = self._paths[number].parent
            found[directory] = found.get(directory, True) and direct
        return found

    def _tell_refused_direct(self) -> None:
        """Log once of each directory that cannot be read past the page cache."""
        self._refused_direct = self._plane.refused_direct
        for directory, direct in self._direct_by_directory().items():
            if not direct and directory not in self._told:
                self._told.add(directory)
                _log.warning("%s cannot be read with O_DIRECT: reads go through the page cache", directory)

    # Handing out and giving back

    def take(self, request: LoanRequest) -> Lease:
        """Wait for a stream's next expert. StopIteration after the last one, or its error."""
        item = self._plane.next(request)
        if self._plane.refused_direct != self._refused_direct:
            self._tell_refused_direct()
        if item is None:
            raise StopIteration
        if isinstance(item, LoanFailure):
            raise self._error_of(item)
        if isinstance(item, NoRoom):
            raise self._out_of_room(1, item)
        layer, expert, slot, at, payload_bytes = item
        payload: Payload = self._memory()[at : at + payload_bytes]
        on_release: Callable[[], None] = partial(self._plane.release, request, slot)
        if self._debug:
            payload, on_release = poisoned_on_release(payload, on_release)
        return Lease(layer, expert, payload, on_release)

    def give_up(self, request: LoanRequest) -> None:
        """Give back what a stream has not handed out."""
        self._plane.give_up(request)

    forget = give_up
    """The data plane's lock is never held while Python runs: a forgotten stream is given up at once."""

    def _memory(self) -> Payload:
        """Return a read-only view of all slots, made with the first lease: it imports NumPy."""
        if self._view is None:
            self._view = read_only(self._region)
        return self._view

    # Errors

    def _out_of_room(self, wanted: int, room: NoRoom) -> BudgetError:
        return BudgetError(
            f"{wanted} more experts asked for while {room.held} of {room.all} slots are held "
            f"({self._slot_bytes} bytes each), for {self._patience_s:g} s",
            advice="Give leases back while taking new ones, or allow more cache",
        )

    def _error_of(self, failure: LoanFailure) -> K3Error:
        """Return a new error that says why an expert did not come: two threads must not share one traceback."""
        path = self._paths[failure.file]
        if failure.is_damage:
            found, right = failure.found.hex(), failure.digest.hex()
            error: K3Error = DamageError(
                f"{failure.stored_bytes} bytes have digest {found} instead of {right}",
                path=path,
                offset=failure.offset,
                advice="Find everything that is damaged with k3-verify --read-data all, then restore it",
            )
        elif not failure.is_open:
            error = _not_opened(path, failure.error)
        elif failure.error == errno.ENODATA:
            error = _cut_short(path, failure)
        else:
            refused = OSError(failure.error, os.strerror(failure.error))
            error = drive_error("cannot read", refused, path, failure.offset, operation=Operation.READ)
        return type(error)(
            error.problem, path=path, layer=failure.layer, expert=failure.expert, offset=error.offset,
            advice=error.advice,
        )  # fmt: skip


def _not_opened(path: Path, number: int) -> K3Error:
    """Return the error for a file that could not be opened."""
    if number == errno.EINVAL and path.exists() and not path.is_file():
        return DriveError(
            "is not a regular file but a pipe, device or directory", path=path, advice=IRREGULAR_ADVICE
        )
    return drive_error("cannot open for reading", OSError(number, os.strerror(number)), path)


def _cut_short(path: Path, failure: LoanFailure) -> K3Error:
    """Return the error for a file that ends before the expert does."""
    end = failure.extent_offset + failure.stored_bytes
    try:
        size_bytes = path.stat().st_size
    except OSError:
        size_bytes = end
    if size_bytes < end:
        return DriveError(
            f"the file ends at {size_bytes} bytes, {end - size_bytes} bytes too early",
            path=path,
            offset=failure.extent_offset,
            advice="The file is truncated; verify it and restore it",
        )
    return DriveError("the file ended while being read", path=path, offset=failure.offset, advice=CUT_ADVICE)


def _checkers(model: ModelSource) -> int:
    """Return how many threads compute digests: one for each directory, on at most half of the processors."""
    return max(1, min(len(model.directories), (os.cpu_count() or 1) // 2))
