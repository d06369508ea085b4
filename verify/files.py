"""Checks of single files and of directory listings: is it there, is it whole, does its digest hold.

Functions without state; each returns what it proved and found, and raises nothing for what a drive or a user can
do.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k3 import kernels
from k3.base import checksum
from k3.base.direct_io import ReadFile, aligned_buffer, drive_error
from k3.base.errors import DriveError
from k3.base.presence import NOT_THERE
from k3.container.layout import EXPERTS_DIRECTORY, JOURNAL_NAME, PARTIAL_SUFFIX
from k3.container.manifest import DataFile, Manifest
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME
from k3.verify.finding import Finding, Kind, finding_of

RESTORE = "Restore it from a copy, or repack"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome of one check. `equal` is set by the comparison itself: no findings alone prove nothing."""

    findings: list[Finding] = field(default_factory=list)
    equal: bool = False


def check_size(path: Path, nbytes: int, *, root: int) -> tuple[int | None, list[Finding]]:
    """Return the size of a file that should have `nbytes`, None if it cannot be read, and what is wrong."""
    try:
        status = path.stat()
    except NOT_THERE:
        return None, [_missing(path, "file is missing", root)]
    except OSError as error:
        return None, [finding_of(drive_error("cannot look at", error, path), Kind.UNREADABLE, root=root)]
    if not stat.S_ISREG(status.st_mode):
        return None, [_missing(path, "not a file", root)]
    return status.st_size, _other_size(path, status.st_size, nbytes, root)


def check_small_file(path: Path, digest: str, nbytes: int | None, *, root: int) -> Checked:
    """Check a file that has one digest over all of it; `nbytes` None when its size is not recorded."""
    hasher = checksum.Hasher()
    try:
        # O_NONBLOCK: a pipe would be waited for. What was opened is looked at, not what has its name by then.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return Checked([_missing(path, "not a file", root)])
            if nbytes is not None and (findings := _other_size(path, status.st_size, nbytes, root)):
                return Checked(findings)
            while data := os.read(descriptor, _READ_BYTES):
                hasher.update(data)
        finally:
            os.close(descriptor)
    except NOT_THERE:
        return Checked([_missing(path, "file is missing", root)])
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            return Checked([_missing(path, "not a file", root)])
        return Checked([finding_of(drive_error("cannot read", error, path), Kind.UNREADABLE, root=root)])
    if hasher.hexdigest() == digest:
        return Checked(equal=True)
    problem = f"file has digest {hasher.hexdigest()} instead of {digest}"
    return Checked([Finding(Kind.DAMAGED, problem, str(path), root=root, advice=RESTORE)])


def _missing(path: Path, problem: str, root: int) -> Finding:
    return Finding(Kind.MISSING, problem, str(path), root=root, advice=RESTORE)


def _other_size(path: Path, size: int, nbytes: int, root: int) -> list[Finding]:
    """Return what is wrong with a file of `size` bytes that should have `nbytes`."""
    if size < nbytes:
        problem = f"file has {size} bytes instead of {nbytes}: {nbytes - size} are missing at the end"
        return [Finding(Kind.TRUNCATED, problem, str(path), size, nbytes - size, root, advice=RESTORE)]
    if size > nbytes:
        problem = f"file has {size} bytes instead of {nbytes}: {size - nbytes} too many at the end"
        return [Finding(Kind.TOO_LONG, problem, str(path), nbytes, size - nbytes, root, advice=RESTORE)]
    return []


def check_data_file(path: Path, file: DataFile, expected_header: Callable[[], bytes] | None) -> Checked:
    """Check a data file's size, and its header byte for byte; its content is for another grade.

    `expected_header` gives the header that the format prescribes, None when the catalog could not be used.
    """
    size, findings = check_size(path, file.bytes, root=file.root)
    if file.header_bytes == 0:  # a shard of the source: nothing but its size is looked at here
        return Checked(findings, equal=size == file.bytes)
    if size is None or size < file.header_bytes:
        return Checked(findings)
    try:
        with ReadFile(path) as opened:
            if not opened.direct:
                opened.drop_cache()
            found = opened.read(0, file.header_bytes, aligned_buffer(file.header_bytes))
    except DriveError as error:
        return Checked([*findings, finding_of(error, Kind.UNREADABLE, root=file.root)])
    if checksum.digest(found).hex() == file.header_digest:
        return Checked(findings, equal=size == file.bytes)
    offset = 0
    if expected_header is not None:
        right = np.frombuffer(expected_header(), np.uint8)
        if len(right) == len(found):
            offset = max(0, kernels.first_difference(found, right))
    problem = f"header of {file.header_bytes} bytes does not match its digest"
    findings.append(
        Finding(Kind.DAMAGED, problem, str(path), offset, file.header_bytes, file.root, advice=RESTORE)
    )
    return Checked(findings)


def find_extras(home: Path, manifest: Manifest, directories: Sequence[Path | None]) -> list[Finding]:
    """Files where only the container's own should be: anything in home and in `experts/`, leftovers in roots.

    A drive root is often a mount point with other things in it, so only `*.partial` is reported there; source
    roots belong to somebody else altogether.
    """
    wanted = {
        directories[file.root] / file.path  # type: ignore[operator]
        for file in manifest.files
        if directories[file.root] is not None
    }
    wanted |= {home / small.path for small in manifest.text_files}
    wanted |= {home / MANIFEST_NAME, home / CATALOG_NAME}
    roots = {directory for directory in directories if directory is not None}
    findings = []
    for number, (root, directory) in enumerate(zip(manifest.roots, directories, strict=True)):
        if directory is None or root.kind == "source":
            continue
        entries: list[Path] = []
        for place in (directory, directory / EXPERTS_DIRECTORY):
            try:
                entries += sorted(place.iterdir())
            except NOT_THERE:  # what should be in it is reported as missing, file by file
                continue
            except OSError as error:
                refused = drive_error("cannot list the directory", error, place)
                findings.append(finding_of(refused, Kind.UNREADABLE, root=number))
        for path in entries:
            if path in wanted or path == directory / EXPERTS_DIRECTORY or _holds(path, roots):
                continue
            leftover = path.suffix == PARTIAL_SUFFIX or path.name == JOURNAL_NAME
            if path.parent == directory and root.kind == "drive" and not leftover:
                continue
            problem = "left over from a repack that was stopped" if leftover else "not part of the container"
            findings.append(Finding(Kind.EXTRA, problem, str(path), root=number))
    return findings


def _holds(path: Path, roots: set[Path]) -> bool:
    """Return whether a path is a root, or a directory that a root lies in."""
    return any(path == root or path in root.parents for root in roots)
