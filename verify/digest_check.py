"""Grades two and three: extents are read back from the drives and compared with their digests.

Reads go past the page cache where the file system allows; where it does not, cached pages are dropped first and
the result names the directory, since a check that may have read from RAM proves less. Each root is read by
threads of its own, so that all drives work at once. Chosen extents that lie next to each other are read together,
larger ones in chunks. What is wrong is read a second time, to tell bad bytes from a bad drive or cable.

Each chosen extent is a unit of a ledger and settled by the comparison of its digest, by nothing else. Whatever is
left open at the end gets a finding with its file, its extents and the reason.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from k3.base import checksum
from k3.base.direct_io import Bytes, ReadFile, memory_error
from k3.base.errors import DriveError, K3Error, UnsupportedError
from k3.base.huge_pages import HugePages, huge_pages
from k3.base.ledger import Ledger, Tally
from k3.base.notes import note_once
from k3.base.page_buffers import huge_buffer
from k3.base.pages import PAGE_BYTES
from k3.base.presence import was_absent
from k3.checkpoint.odd_experts import ExpertWatch
from k3.container.reader import went_away
from k3.model.keys import ExpertKey
from k3.verify.files import RESTORE
from k3.verify.finding import Finding, Kind, finding_of
from k3.verify.odd_pieces import OddPieces
from k3.verify.structure import Structure
from k3.verify.target import Target
from k3.verify.verdict import VerifyUnit, unexplained

READ_BYTES = 16 << 20
"""Most bytes asked of a drive at once."""

THREADS_PER_ROOT = 3
"""One waits for the drive while another hashes; a third covers the gaps."""

RESTORE_ROOT = "Look at the drive and its mount, then check again"

OpenFile = Callable[[Path, bool], ReadFile]


def open_file(path: Path, direct: bool) -> ReadFile:
    """Open a file as the product does; tests hand in another function."""
    return ReadFile(path, direct=direct)


@dataclass
class BytesCheck:
    """The extents that were compared, and the findings. `skipped` ones lie in what could not be opened."""

    ledger: Ledger[Target]
    findings: list[Finding] = field(default_factory=list)
    skipped: int = 0
    elapsed_s: float = 0.0
    through_page_cache: set[str] = field(default_factory=set)
    huge_pages: HugePages = field(default_factory=HugePages)  # what the buffers got
    odd: dict[ExpertKey, tuple[str, ...]] = field(default_factory=dict)  # experts that are sound and yet no use


def check_bytes(
    structure: Structure,
    targets: Sequence[Target],
    *,
    direct: bool = True,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
    opener: OpenFile = open_file,
) -> BytesCheck:
    """Read `targets` (in file order) and compare each with its digest.

    `on_bytes` is told of bytes as they are done, from several threads but one at a time. Everything wrong is in
    the result, in the order of `targets`; nothing is raised for what a drive does.
    """
    return _Check(structure, targets, direct, on_bytes, opener).run()


def runs(targets: Sequence[Target]) -> Iterator[list[Target]]:
    """Targets in file order, cut into what is read at once: neighbours up to READ_BYTES, or a single one."""
    run: list[Target] = []
    for target in targets:
        if run:
            adjoins = target.file == run[-1].file and target.offset == run[-1].end
            if not adjoins or target.end - run[0].offset > READ_BYTES:
                yield run
                run = []
        run.append(target)
    if run:
        yield run


class _Check:
    def __init__(
        self,
        structure: Structure,
        targets: Sequence[Target],
        direct: bool,
        on_bytes: Callable[[int], None],
        opener: OpenFile,
    ) -> None:
        self._structure = structure
        self._targets = targets
        self._tally = Tally({target: target.stored_bytes for target in targets})
        self._direct = direct
        self._on_bytes = on_bytes
        self._opener = opener
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._skipped = 0
        self._through_page_cache: set[str] = set()
        self._found: list[tuple[Target, Finding]] = []
        self._refused: dict[str, tuple[Kind, K3Error]] = {}  # by path: the first error of opening or closing
        self._refused_memory: UnsupportedError | None = None  # what kept a thread from its work
        self._buffers: list[Bytes] = []
        self._odd = OddPieces(structure.layouts)

    def run(self) -> BytesCheck:
        began_s = time.monotonic()
        manifest = self._structure.manifest
        assert manifest is not None
        by_root: dict[int, list[Target]] = defaultdict(list)
        for target in self._targets:
            by_root[manifest.files[target.file].root].append(target)
        with ThreadPoolExecutor(max(1, THREADS_PER_ROOT * len(by_root)), "k3-verify") as pool:
            futures = []
            try:
                for root in by_root.values():
                    work = runs(root)
                    futures += [pool.submit(self._work, work) for _ in range(THREADS_PER_ROOT)]
                for future in futures:
                    future.result()
            finally:
                self._stop.set()  # after Ctrl-C: the pool waits only for reads under way
        self._found.sort(key=lambda item: (item[0].file, item[0].offset))
        ledger = self._tally.ledger()
        if self._refused_memory is not None:
            if not ledger.complete and not self._found and not self._refused:
                raise self._refused_memory
            note_once("verify-memory", f"fewer threads read: {self._refused_memory.problem}")
        return BytesCheck(
            ledger=ledger,
            findings=self._findings(ledger),
            skipped=self._skipped,
            elapsed_s=time.monotonic() - began_s,
            through_page_cache=self._through_page_cache,
            huge_pages=huge_pages(self._buffers),
            odd=self._odd.found(),
        )

    def _findings(self, ledger: Ledger[Target]) -> list[Finding]:
        """Return the findings, with one more for each file whose extents are left open and nothing says why."""
        findings = [finding for _, finding in self._found]
        told = [*self._structure.findings, *findings]
        findings += unexplained(
            map(self._unit, ledger.open()), told, lost_roots=self._structure.lost_roots(), reasons=self._refused,
            otherwise=self._refused_memory,
        )  # fmt: skip
        told_paths = {finding.path for finding in [*self._structure.findings, *findings]}
        # Every extent was compared, and still a file met an error: that is no sound drive.
        findings += [
            finding_of(error, kind) for path, (kind, error) in self._refused.items() if path not in told_paths
        ]
        return findings

    def _unit(self, target: Target) -> VerifyUnit:
        path = self._structure.file_path(target.file)
        return VerifyUnit(
            "" if path is None else str(path), self._root(target), target.stored_bytes, target.offset,
            target.layer, target.expert, target.tensor,
        )  # fmt: skip

    def _work(self, work: Iterator[list[Target]]) -> None:
        """Take the next run of one root until there is none, in one of its threads. Keeps one file open."""
        try:
            buffer = huge_buffer(READ_BYTES + 2 * PAGE_BYTES)
        except (OSError, MemoryError) as error:
            refused = error if isinstance(error, OSError) else OSError(errno.ENOMEM, str(error))
            self._refused_memory = memory_error("cannot allocate a read buffer", refused)
            return
        self._buffers.append(buffer)
        file: ReadFile | None = None
        number = -1
        try:
            while not self._stop.is_set():
                with self._lock:
                    run = next(work, None)
                if run is None:
                    return
                if run[0].file != number:
                    self._close(file)
                    file = None
                    file, number = self._open(run[0]), run[0].file
                self._check_run(file, run, buffer)
        finally:
            self._close(file)

    def _open(self, target: Target) -> ReadFile | None:
        path = self._structure.file_path(target.file)
        if path is None:
            return None
        try:
            file = self._opener(path, self._direct)
        except DriveError as error:
            self._refuse(path, error, target)
            return None
        if file.direct:
            return file
        try:
            file.drop_cache()
        except DriveError as error:
            self._refuse(path, error, target)
            self._close(file)
            return None
        with self._lock:
            self._through_page_cache.add(str(path.parent))
        return file

    def _close(self, file: ReadFile | None) -> None:
        if file is None:
            return
        try:
            file.close()
        except DriveError as error:
            with self._lock:
                self._refused.setdefault(str(file.path), (Kind.UNREADABLE, error))

    def _refuse(self, path: Path, error: DriveError, target: Target) -> None:
        """Note why a file that the structure check has looked at cannot be read now."""
        manifest = self._structure.manifest
        assert manifest is not None
        kind = Kind.UNREADABLE
        if was_absent(error):
            root = self._root(target)
            directory = self._structure.directories[root]
            problem = "the file has gone since its structure was checked"
            if directory is not None and went_away(root, manifest, directory):
                kind, problem = Kind.INCOMPLETE, f"root {root} has gone while it was read"
            error = DriveError(f"{problem}: {error.problem}", path=path, advice=RESTORE_ROOT)
        with self._lock:
            self._refused.setdefault(str(path), (kind, error))

    def _check_run(self, file: ReadFile | None, run: list[Target], buffer: Bytes) -> None:
        nbytes = run[-1].end - run[0].offset
        found: list[tuple[Target, Finding]] = []
        if file is not None:
            good: set[Target] = set()
            together = len(run) > 1 and run[-1].end <= file.size_bytes
            refused = together and not self._read_together(file, run, buffer, good)
            for target in run:
                finding = None if target in good else self._check_alone(file, target, buffer)
                if finding is None and together and not refused and target not in good:
                    problem = "read together with its neighbours it had another digest, the second read was right"
                    finding = self._finding(Kind.UNSTABLE, problem, file, target)
                if finding is not None:
                    found.append((target, finding))
            if refused and not found:
                problem = f"the drive refused to read {nbytes} bytes from here at once, then gave them one by one"
                found.append((run[0], self._finding(Kind.UNSTABLE, problem, file, run[0])))
        with self._lock:
            self._found += found
            if file is None:
                self._skipped += len(run)
            self._on_bytes(nbytes)

    def _read_together(self, file: ReadFile, run: list[Target], buffer: Bytes, good: set[Target]) -> bool:
        """Read neighbours at once and add those that are right to `good`; others get a closer look, one by one.

        False when the drive refused.
        """
        start = run[0].offset
        try:
            stored = file.read(start, run[-1].end - start, buffer)
        except DriveError:
            return False
        good.update(t for t in run if checksum.digest(stored[t.offset - start : t.end - start]) == t.digest)
        for target in good:
            self._tally.settle(target)
            watch = self._odd.watch(target)
            _show(watch, target, target.offset, stored[target.offset - start : target.end - start])
            self._odd.add(target, watch)
        return True

    def _check_alone(self, file: ReadFile, target: Target, buffer: Bytes) -> Finding | None:
        """Return what is wrong with one extent, None if nothing is."""
        place = {
            "root": self._root(target),
            "layer": target.layer,
            "expert": target.expert,
            "tensor": target.tensor,
        }
        if target.end > file.size_bytes:
            problem = f"lies beyond the end of the file, which has {file.size_bytes} bytes"
            return self._finding(Kind.MISSING, problem, file, target)
        first = error = None
        for attempt in (1, 2):
            watch = self._odd.watch(target)
            try:
                found = self._digest(file, target, buffer, watch)
            except DriveError as raised:
                error = raised
                continue
            if found == target.digest:
                self._tally.settle(target)
                self._odd.add(target, watch)
                if attempt == 1:
                    return None
                what = "the drive refused the first read" if error else f"the first read gave digest {first}"
                return self._finding(Kind.UNSTABLE, f"{what}, the second was right", file, target)
            first = first or found.hex()
        if first is None:
            assert error is not None
            return finding_of(error, Kind.UNREADABLE, nbytes=target.stored_bytes, **place)
        problem = f"{target.stored_bytes} bytes have digest {first} instead of {target.digest.hex()}"
        return self._finding(Kind.DAMAGED, problem, file, target)

    def _digest(self, file: ReadFile, target: Target, buffer: Bytes, watch: ExpertWatch | None) -> bytes:
        hasher = checksum.Hasher()
        for offset in range(target.offset, target.end, READ_BYTES):
            if self._stop.is_set():
                break
            data = file.read(offset, min(READ_BYTES, target.end - offset), buffer)
            hasher.update(data.data)
            _show(watch, target, offset, data)
        return bytes(hasher.digest())

    def _finding(self, kind: Kind, problem: str, file: ReadFile, target: Target) -> Finding:
        return Finding(
            kind, problem, str(file.path), target.offset, target.stored_bytes, self._root(target),
            target.layer, target.expert, target.tensor, RESTORE,
        )  # fmt: skip

    def _root(self, target: Target) -> int:
        assert self._structure.manifest is not None
        return self._structure.manifest.files[target.file].root


def _show(watch: ExpertWatch | None, target: Target, offset: int, data: Bytes) -> None:
    """Let a watch see the bytes of a piece that begin at `offset` of its file, without padding."""
    if watch is not None:
        begun = offset - target.offset
        watch.feed(target.payload_offset + begun, data[: max(0, target.payload_bytes - begun)])
