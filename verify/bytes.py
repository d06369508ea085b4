"""Grades two and three: extents are read back from the drives and compared with their digests.

Reads go past the page cache where the file system allows; where it does not, cached pages are dropped first and
the result names the directory, since a check that may have read from RAM proves less. Each root is read by
threads of its own, so that all drives work at once. Chosen extents that lie next to each other are read together,
larger ones in chunks. What is wrong is read a second time, to tell bad bytes from a bad drive or cable.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from k3.container import checksum
from k3.container.direct import Bytes, ReadFile
from k3.container.errors import DriveError
from k3.container.huge_pages import HugePages, huge_pages
from k3.container.keys import PAGE_BYTES
from k3.container.pages import huge_buffer
from k3.verify.files import RESTORE
from k3.verify.finding import Finding, Kind, finding_of
from k3.verify.structure import Structure
from k3.verify.target import Target

CHUNK_BYTES = 16 << 20
"""Most bytes asked of a drive at once."""

THREADS_PER_ROOT = 3
"""One waits for the drive while another hashes; a third covers the gaps."""

OpenFile = Callable[[Path, bool], ReadFile]


def open_file(path: Path, direct: bool) -> ReadFile:
    """How files are opened when no test says otherwise."""
    return ReadFile(path, direct=direct)


@dataclass
class BytesCheck:
    """What was read and found. `skipped` extents lie in files or roots that are not there."""

    findings: list[Finding] = field(default_factory=list)
    extents: int = 0
    read_bytes: int = 0
    skipped: int = 0
    elapsed_s: float = 0.0
    through_page_cache: set[str] = field(default_factory=set)
    huge_pages: HugePages = field(default_factory=HugePages)  # what the buffers got


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
    return _Check(structure, direct, on_bytes, opener).run(targets)


def runs(targets: Sequence[Target]) -> Iterator[list[Target]]:
    """Targets in file order, cut into what is read at once: neighbours up to CHUNK_BYTES, or a single one."""
    run: list[Target] = []
    for target in targets:
        if run:
            adjoins = target.file == run[-1].file and target.offset == run[-1].end
            if not adjoins or target.end - run[0].offset > CHUNK_BYTES:
                yield run
                run = []
        run.append(target)
    if run:
        yield run


class _Check:
    def __init__(
        self, structure: Structure, direct: bool, on_bytes: Callable[[int], None], opener: OpenFile
    ) -> None:
        self._structure = structure
        self._direct = direct
        self._on_bytes = on_bytes
        self._opener = opener
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._result = BytesCheck()
        self._found: list[tuple[Target, Finding]] = []
        self._buffers: list[Bytes] = []

    def run(self, targets: Sequence[Target]) -> BytesCheck:
        began_s = time.monotonic()
        manifest = self._structure.manifest
        assert manifest is not None
        by_root: dict[int, list[Target]] = defaultdict(list)
        for target in targets:
            by_root[manifest.files[target.file].root].append(target)
        with ThreadPoolExecutor(max(1, THREADS_PER_ROOT * len(by_root)), "k3-verify") as pool:
            futures = []
            for root in by_root.values():
                work = runs(root)
                futures += [pool.submit(self._work, work) for _ in range(THREADS_PER_ROOT)]
            try:
                for future in futures:
                    future.result()
            finally:
                self._stop.set()  # after Ctrl-C: the pool waits only for reads under way
        self._found.sort(key=lambda item: (item[0].file, item[0].offset))
        self._result.findings = [finding for _, finding in self._found]
        self._result.elapsed_s = time.monotonic() - began_s
        self._result.huge_pages = huge_pages(self._buffers)
        return self._result

    def _work(self, work: Iterator[list[Target]]) -> None:
        """One thread of one root: take the next run, until there is none. Keeps one file open."""
        buffer = huge_buffer(CHUNK_BYTES + 2 * PAGE_BYTES)
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
                    if file is not None:
                        file.close()
                    file, number = self._open(run[0].file), run[0].file
                self._check_run(file, run, buffer)
        finally:
            if file is not None:
                file.close()

    def _open(self, number: int) -> ReadFile | None:
        path = self._structure.file_path(number)
        if path is None:
            return None
        try:
            file = self._opener(path, self._direct)
        except DriveError:
            return None  # the structure check has said why
        if not file.direct:
            file.drop_cache()
            with self._lock:
                self._result.through_page_cache.add(str(path.parent))
        return file

    def _check_run(self, file: ReadFile | None, run: list[Target], buffer: Bytes) -> None:
        nbytes = run[-1].end - run[0].offset
        good: list[Target] = []
        if file is not None and len(run) > 1 and run[-1].end <= file.size_bytes:
            good = self._good_together(file, run, buffer)
        for target in run:
            if target not in good:
                finding = None if file is None else self._check_alone(file, target, buffer)
                if finding is not None:
                    with self._lock:
                        self._found.append((target, finding))
        with self._lock:
            if file is None:
                self._result.skipped += len(run)
            else:
                self._result.extents += len(run)
                self._result.read_bytes += nbytes
            self._on_bytes(nbytes)

    @staticmethod
    def _good_together(file: ReadFile, run: list[Target], buffer: Bytes) -> list[Target]:
        """Of neighbours read at once, those that are right; the others get a closer look."""
        start = run[0].offset
        try:
            stored = file.read(start, run[-1].end - start, buffer)
        except DriveError:
            return []
        return [t for t in run if checksum.digest(stored[t.offset - start : t.end - start]) == t.digest]

    def _check_alone(self, file: ReadFile, target: Target, buffer: Bytes) -> Finding | None:
        """What is wrong with one extent, None if nothing is."""
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
            try:
                found = self._digest(file, target, buffer)
            except DriveError as raised:
                error = raised
                continue
            if found == target.digest:
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

    def _digest(self, file: ReadFile, target: Target, buffer: Bytes) -> bytes:
        hasher = checksum.Hasher()
        for offset in range(target.offset, target.end, CHUNK_BYTES):
            if self._stop.is_set():
                break
            hasher.update(file.read(offset, min(CHUNK_BYTES, target.end - offset), buffer))
        return bytes(hasher.digest())

    def _finding(self, kind: Kind, problem: str, file: ReadFile, target: Target) -> Finding:
        return Finding(
            kind, problem, str(file.path), target.offset, target.stored_bytes, self._root(target),
            target.layer, target.expert, target.tensor, RESTORE,
        )  # fmt: skip

    def _root(self, target: Target) -> int:
        assert self._structure.manifest is not None
        return self._structure.manifest.files[target.file].root
