"""One repack from request to published container: check, plan, resume, stream, publish, prove.

The order is the promise: everything that can be refused is refused before a byte is written, and whatever stops
the run afterwards leaves a journal from which the same command continues.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3.base import checksum
from k3.base.direct_io import drive_error, sync_directory
from k3.base.errno_advice import Operation
from k3.base.errors import DamageError, K3Error, ResumeError, ShardError
from k3.base.huge_pages import HugePages, huge_pages
from k3.base.presence import is_named, is_there
from k3.base.regular_file import RegularFile
from k3.checkpoint.model_check import check_model
from k3.checkpoint.odd_experts import odd_experts_note
from k3.checkpoint.shard import Shard
from k3.checkpoint.snapshot import Snapshot
from k3.container.layout import (
    DIGEST_BYTES,
    EXPERTS_DIRECTORY,
    JOURNAL_NAME,
    PARTIAL_SUFFIX,
)
from k3.container.manifest import Manifest
from k3.container.reader import Container
from k3.model.kinds import MANIFEST_NAME
from k3.repack.assemble import Assembler
from k3.repack.compare import compare_with_source
from k3.repack.comparison import Comparison
from k3.repack.destination_state import is_in_place, recognise, refuse_foreign_files
from k3.repack.durable import refuse_unfinished
from k3.repack.jobs import Jobs
from k3.repack.journal import Journal
from k3.repack.journal_file import START_ANEW, ShardRecord
from k3.repack.lock import RootLocks
from k3.repack.plan import Plan
from k3.repack.preflight import check_file_sizes, check_space, drive_needs
from k3.repack.probe import drive_rate, shares_from_rates, source_jobs
from k3.repack.publish import finish_data_files, publish, remove_journal
from k3.repack.repack_request import RepackRequest
from k3.repack.resume_check import Recheck, journalled_bytes, recheck
from k3.repack.root_marks import check_marks, is_marked, mark_roots, remove_marks, written_roots
from k3.repack.shard_stream import ShardBegun, ShardEnded, ShardStreamer
from k3.repack.small_files import SmallFiles
from k3.repack.throttle import Throttle
from k3.repack.write import WriteDestination

SCRATCH_NAME = "scratch.partial"


class Watcher:
    """A receiver of what a run tells while it works. Methods do nothing here; the command line overrides them."""

    def phase(self, what: str, total_bytes: int) -> None:
        """Show a new phase with this many bytes to go."""

    def item(self, name: str) -> None:
        """Show the name of what is being worked on, usually a shard."""

    def advance(self, nbytes: int) -> None:
        """Show that so many bytes more are done."""

    def note(self, text: str) -> None:
        """Show one sentence to the user."""


@dataclass(frozen=True, slots=True)
class RepackResult:
    """The result of a run. Bytes are of data files; a complete container found at the start has read_bytes 0."""

    manifest: Manifest
    read_bytes: int
    written_bytes: int
    recheck: Recheck | None
    already_complete: bool
    huge_pages: HugePages = field(default_factory=HugePages)  # what the buffers got


def open_source(request: RepackRequest) -> Snapshot:
    """Open and check the snapshot, and refuse destinations inside it."""
    snapshot = Snapshot.open(request.sources, layers=request.layers)
    request.check_places([*request.sources, *snapshot.directories])
    return snapshot


def model_notes(request: RepackRequest, snapshot: Snapshot) -> list[str]:
    """Refuse a snapshot that no engine could run (SourceError); return what k3-run cannot, one sentence each."""
    return check_model(snapshot, request.layers)


def read_small_files(request: RepackRequest, snapshot: Snapshot) -> SmallFiles:
    """Read what the container takes along, once. SourceError or DriveError for what cannot be taken."""
    small_files = SmallFiles.read(snapshot)
    small_files.check_names(request.home)
    return small_files


def plan_for(request: RepackRequest, snapshot: Snapshot, shares: tuple[int, ...]) -> Plan:
    """Return the plan of a request under root shares."""
    return Plan(snapshot, request.recipe, shares, in_place=request.in_place)


def root_directories(request: RepackRequest, plan: Plan) -> dict[int, Path]:
    """Directory of every root, by number."""
    if plan.in_place:
        return dict(enumerate((request.home, *plan.snapshot.directories)))
    return dict(enumerate(request.root_directories()))


def plan_of_container(snapshot: Snapshot, manifest: Manifest, request: RepackRequest) -> Plan:
    """Return the plan of a finished container for this snapshot: with its own shares and the request's recipe."""
    return Plan(snapshot, request.recipe, manifest.shares, in_place=is_in_place(manifest))


def repack(request: RepackRequest, watcher: Watcher) -> RepackResult:
    """Make (or continue, or recognise) the container that `request` asks for. K3Error for whatever is refused."""
    snapshot = open_source(request)
    small_files = read_small_files(request, snapshot)
    for warning in [*snapshot.warnings, *model_notes(request, snapshot), *small_files.left_behind]:
        watcher.note(warning)
    if is_there(request.home / MANIFEST_NAME):
        manifest = recognise(request, snapshot, small_files)
        remove_marks(dict(enumerate(request.root_directories())))  # a kill after the manifest left these
        (request.home / JOURNAL_NAME).unlink(missing_ok=True)
        return RepackResult(manifest, 0, 0, None, already_complete=True)
    check_marks(request)
    refuse_foreign_files(request, small_files)
    made: list[Path] = []
    try:
        _make_directories(request, made)
        with RootLocks(request.root_directories()):
            return _repack_locked(request, snapshot, small_files, watcher)
    finally:
        # A run that was refused before its journal existed leaves no empty directories behind.
        with contextlib.suppress(
            K3Error, OSError
        ):  # what ended the run says more than a drive that fails here too
            if not is_named(request.home / JOURNAL_NAME) and not is_named(request.home / MANIFEST_NAME):
                for directory in reversed(made):
                    if not any(directory.iterdir()):
                        directory.rmdir()


def _repack_locked(
    request: RepackRequest, snapshot: Snapshot, small_files: SmallFiles, watcher: Watcher
) -> RepackResult:
    journal_path = request.home / JOURNAL_NAME
    shares, probes = _shares(request, journal_path)
    plan = plan_for(request, snapshot, shares)
    directories = root_directories(request, plan)
    check_file_sizes(plan, directories)
    jobs = source_jobs(request.jobs, snapshot)
    check_space(drive_needs(plan, directories, small_files.total_bytes, jobs))
    journal = Journal(journal_path)
    try:
        continues = journal.begin(_request_record(request, snapshot, small_files, shares, probes))
        sync_directory(request.home)
        if not is_marked(request.home):
            _mark(request, directories, journal)
        checked = _resume(plan, directories, journal, request, watcher) if continues else None
        read_bytes, written_bytes, granted = _stream(plan, directories, journal, request, jobs, watcher)
        refuse_unfinished(plan, journal)
        finish_data_files(plan, directories, direct=request.direct)
        manifest = publish(plan, directories, journal, probes, small_files)
    finally:
        journal.close()
    remove_marks({number: directories[number] for number in written_roots(request, directories)})
    remove_journal(request.home, JOURNAL_NAME)
    granted += HugePages() if checked is None else checked.huge_pages
    return RepackResult(
        manifest, read_bytes, written_bytes, checked, already_complete=False, huge_pages=granted
    )  # fmt: skip


def verify_full(request: RepackRequest, watcher: Watcher) -> Comparison:
    """Prove a finished container against a second read of its source."""
    snapshot = open_source(request)
    drives = () if request.in_place else request.drives
    container = Container.open(request.home, (*drives, *snapshot.directories))
    try:
        plan = plan_of_container(snapshot, container.manifest, request)
        watcher.phase("verifying", plan.read_bytes)
        return compare_with_source(
            plan,
            container,
            scratch=request.home / SCRATCH_NAME,
            direct=request.direct,
            throttle=Throttle(request.bytes_per_s),
            jobs=source_jobs(request.jobs, snapshot),
            on_shard=watcher.item,
            on_bytes=watcher.advance,
        )
    finally:
        container.close()


# -- steps


def _mark(request: RepackRequest, directories: Mapping[int, Path], journal: Journal) -> None:
    """Mark the roots of a run that has written nothing yet."""
    if journal.experts or journal.tensors or journal.shards:
        raise ResumeError(
            "home has a journal of an unfinished repack, and not its mark",
            path=request.home,
            advice="Files were removed here, or an earlier version began this. Empty the roots to begin anew",
        )
    mark_roots(request, directories)


def _stream(
    plan: Plan,
    directories: Mapping[int, Path],
    journal: Journal,
    request: RepackRequest,
    jobs: Jobs,
    watcher: Watcher,
) -> tuple[int, int, HugePages]:
    """Stream every shard that still has something to give.

    Return the bytes read, the bytes written, and the huge pages that the buffers got.
    """
    todo = _shards_to_read(plan, journal)
    read_bytes = sum(plan.snapshot.shards[number].size_bytes for number in todo)
    watcher.phase("repacking", read_bytes)
    destination = WriteDestination(plan, directories, journal, direct=request.direct)
    throttle = Throttle(request.bytes_per_s)
    with ShardStreamer(jobs, direct=request.direct, throttle=throttle) as streamer:
        assembler = Assembler(plan, destination, streamer, directories[0] / SCRATCH_NAME)
        try:
            _create_empty_files(plan, destination)
            _stream_shards(plan, todo, assembler, destination, journal, watcher)
            destination.drain()
            granted = huge_pages([*streamer.buffers, *assembler.buffers])
            if unfinished := assembler.unfinished():
                key = unfinished[0]
                raise ShardError("source ended inside an expert", layer=key.layer, expert=key.expert)
        except (KeyboardInterrupt, K3Error):
            destination.save()
            raise
        finally:
            assembler.close()
            destination.close()
            if note := odd_experts_note(assembler.odd):  # the run that goes on will not read them again
                watcher.note(note)
        for place in sorted({*destination.fell_back, *(path.parent for path in streamer.fell_back)}):
            if request.direct:
                watcher.note(f"{place}: the file system does not take O_DIRECT; went through the page cache")
    return read_bytes, destination.written_bytes, granted


def _stream_shards(
    plan: Plan,
    todo: Sequence[int],
    assembler: Assembler,
    destination: WriteDestination,
    journal: Journal,
    watcher: Watcher,
) -> None:
    """Stream shards through, and check and record the digest of each as soon as it is known."""
    found: dict[str, os.stat_result] = {}

    def look(shard: Shard) -> None:
        found[shard.name] = _status(shard.path)

    with contextlib.closing(assembler.stream(todo, watcher.advance, look)) as events:
        for event in events:
            shard = plan.snapshot.shards[event.number]
            if isinstance(event, ShardBegun):
                watcher.item(shard.name)
                continue
            _check_shard(plan, event, destination, journal)
            status = found.pop(shard.name)
            destination.shard(shard.name, ShardRecord(event.sha256, status.st_size, status.st_mtime_ns))


def _check_shard(plan: Plan, ended: ShardEnded, destination: WriteDestination, journal: Journal) -> None:
    """Compare a shard's digest with what is known of it. ShardError, and what came from it is forgotten."""
    shard, digest = plan.snapshot.shards[ended.number], ended.sha256
    known = journal.shards.get(shard.name)
    if shard.blob_sha256 is not None and digest != shard.blob_sha256:
        problem = f"shard's SHA-256 is {digest}, but it was published as {shard.blob_sha256}"
    elif known is not None and known.sha256 != digest:
        problem = f"shard's SHA-256 is {digest}; the unfinished run read {known.sha256}"
    else:
        return
    destination.drain()
    journal.forget(*plan.shard_units(ended.number))
    raise ShardError(
        problem, path=shard.path, advice="The file is damaged or another one: fetch it again, then run again"
    )


def _shards_to_read(plan: Plan, journal: Journal) -> list[int]:
    """Shards that have something to give, and those that share an expert with one of them.

    An expert can be checked only as a whole: with a part of it from this run and the rest from an earlier one,
    nothing would tell whether the source has changed between them.
    """
    shards = range(len(plan.snapshot.shards))
    todo = {number for number in shards if not _is_done(plan, journal, number)}
    if len(todo) in (0, len(shards)):
        return sorted(todo)
    experts = {number: plan.shard_units(number)[0] for number in shards}
    more = todo
    while more:
        touched = set().union(*(experts[number] for number in more))
        more = {number for number in shards if number not in todo and experts[number] & touched}
        todo |= more
    return sorted(todo)


def _is_done(plan: Plan, journal: Journal, number: int) -> bool:
    """Return whether a shard need not be read again: unchanged, hashed, and all it gives is durable."""
    shard = plan.snapshot.shards[number]
    record = journal.shards.get(shard.name)
    status = _status(shard.path)
    if record is None or (record.size_bytes, record.mtime_ns) != (status.st_size, status.st_mtime_ns):
        return False
    keys, positions = plan.shard_units(number)
    return keys <= journal.experts.keys() and positions <= journal.tensors.keys()


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise drive_error("cannot look at", error, path, operation=Operation.LOOK) from error


def _resume(
    plan: Plan, directories: Mapping[int, Path], journal: Journal, request: RepackRequest, watcher: Watcher
) -> Recheck:
    unknown = _forget_unfit(plan, journal)
    if journal.lost or unknown:
        first = journal.lost[0] if journal.lost else "units are recorded that do not fit the plan"
        watcher.note(f"the journal is damaged ({first}); the units that it lost are made again")
    _forget_unproven(plan, journal)
    total = journalled_bytes(plan, journal)
    watcher.note(f"continuing an unfinished repack: {total / 1e9:.2f} GB are there and are read back first")
    watcher.phase("re-checking", total)
    result = recheck(plan, directories, journal, direct=request.direct, on_bytes=watcher.advance)
    if bad := len(result.bad_experts) + len(result.bad_tensors):
        watcher.note(f"{bad} of {bad + result.good_units} units did not match their digests and are made again")
        journal.forget(result.bad_experts, result.bad_tensors)
    _reopen_incomplete(plan, directories, journal)
    return result


def _forget_unfit(plan: Plan, journal: Journal) -> int:
    """Drop units that the plan does not have, or that have another number of extents in it; returns how many."""
    known = set(plan.experts())
    experts = [
        key
        for key, digests in journal.experts.items()
        if key not in known or not _are_digests(digests, len(plan.expert_extents(key)))
    ]
    extents = {tensor.position: 1 if tensor.scales is None else 2 for tensor in plan.tensors}
    tensors = [
        position
        for position, digests in journal.tensors.items()
        if position not in extents or not _are_digests(digests, extents[position])
    ]
    journal.forget(experts, tensors)
    return len(experts) + len(tensors)


def _are_digests(found: tuple[bytes, ...], count: int) -> bool:
    return len(found) == count and all(len(digest) == DIGEST_BYTES for digest in found)


def _forget_unproven(plan: Plan, journal: Journal) -> None:
    """Drop what came from a shard whose published digest was not reached: the shard may be repaired by now."""
    for number, shard in enumerate(plan.snapshot.shards):
        if shard.blob_sha256 is not None and shard.name not in journal.shards:
            journal.forget(*plan.shard_units(number))


def _reopen_incomplete(plan: Plan, directories: Mapping[int, Path], journal: Journal) -> None:
    """Files that had their final name but lack units again become partial ones."""
    wanting = {
        extent.file for key in plan.experts() if key not in journal.experts for extent in plan.expert_extents(key)
    }
    if any(tensor.position not in journal.tensors for tensor in plan.tensors):
        wanting.add(0)
    for number in wanting:
        file = plan.files[number]
        final = directories[file.root] / file.path
        partial = final.with_name(final.name + PARTIAL_SUFFIX)
        if file.kind != "source" and is_there(final) and not is_there(partial):
            final.rename(partial)
            sync_directory(final.parent)


def _create_empty_files(plan: Plan, destination: WriteDestination) -> None:
    """Make the data files that have no content, such as those of a model without dense tensors."""
    for number, file in enumerate(plan.files):
        if file.kind != "source" and file.size_bytes == file.header_bytes:
            destination.touch(number)


def _shares(request: RepackRequest, journal_path: Path) -> tuple[tuple[int, ...], dict[int, int]]:
    """Root shares and, where they were measured, MB/s by root number."""
    drives = request.drives or (request.home,)
    if request.in_place:
        return (0,), {}
    if request.shares is not None:
        return request.root_shares(request.shares), {}
    if len(drives) == 1:
        return request.root_shares((1,)), {}
    recorded = _recorded_shares(journal_path)
    if recorded is not None:
        return recorded
    rates = [drive_rate(drive) for drive in drives]
    shares = request.root_shares(shares_from_rates(rates))
    numbers = {path.resolve(): number for number, path in enumerate(request.root_directories())}
    return shares, {numbers[d.resolve()]: round(rate / 1e6) for d, rate in zip(drives, rates, strict=True)}


def _recorded_shares(journal_path: Path) -> tuple[tuple[int, ...], dict[int, int]] | None:
    """Return the shares an unfinished run measured: it must go on with them."""
    if not is_there(journal_path):
        return None
    journal = Journal(journal_path)
    try:
        before = journal.request
    finally:
        journal.close()
    if before is None:
        return None
    return _shares_of(before, journal_path)


def _shares_of(before: Mapping[str, Any], path: Path) -> tuple[tuple[int, ...], dict[int, int]]:
    """Shares and rates of a journal's request: it is ours by its digest, and may be anybody's all the same."""
    shares, probes = before.get("shares"), before.get("probes")
    if (
        type(shares) is not list
        or not all(type(share) is int and share >= 0 for share in shares)
        or type(probes) is not dict
        or not all(key.isdecimal() and type(rate) is int and rate >= 0 for key, rate in probes.items())
    ):
        raise DamageError(
            "the journal's record of the shares of the drives is not valid", path=path, advice=START_ANEW
        )
    return tuple(shares), {int(number): rate for number, rate in probes.items()}


def _request_record(
    request: RepackRequest,
    snapshot: Snapshot,
    small_files: SmallFiles,
    shares: tuple[int, ...],
    probes: Mapping[int, int],
) -> dict[str, Any]:
    """Return what a resumed run must have in common with the first one."""
    return {
        "source": _source_record(snapshot),
        "shards": [[shard.name, shard.size_bytes, shard.blob_sha256] for shard in snapshot.shards],
        "bits": request.recipe.bits,
        "mla_bits": request.recipe.mla_bits,
        "head_bits": request.recipe.head_bits,
        "in_place": request.in_place,
        "layers": None if request.layers is None else list(request.layers),
        "directories": [
            os.path.relpath(path.resolve(), request.home.resolve()) for path in request.root_directories()
        ],
        "shares": list(shares),
        "probes": {str(number): rate for number, rate in probes.items()},
        **{f"digest of {name}": digest for name, digest in small_files.decisive().items()},
    }


def _source_record(snapshot: Snapshot) -> str:
    """Return what a source must still be when a run goes on.

    Shards with a published digest prove themselves when they are read; one of them may have been repaired since.
    Then only the headers, from which everything is planned, must be the same.
    """
    if any(shard.blob_sha256 is None for shard in snapshot.shards):
        return snapshot.identity.weights
    headers = checksum.Hasher()
    for shard in snapshot.shards:
        with RegularFile(shard.path) as file:
            headers.update(file.read(0, shard.header_bytes))
    return f"headers:{headers.hexdigest()}"


def _make_directories(request: RepackRequest, made: list[Path]) -> None:
    """Make the destination's directories; those that are new are added to `made`, parents first."""
    wanted = list(request.root_directories())
    if not request.in_place:
        wanted += [drive / EXPERTS_DIRECTORY for drive in (request.drives or (request.home,))]
    for directory in wanted:
        missing = [place for place in (directory, *directory.absolute().parents) if not is_there(place)]
        for place in reversed(missing):
            try:
                place.mkdir()
                sync_directory(place.parent)
            except OSError as error:
                raise drive_error("cannot make the directory", error, place, operation=Operation.MAKE) from error
            made.append(place)
