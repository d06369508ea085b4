"""Files that downloaders leave in a snapshot: digests that prove other files, and signs of an unfinished download.

    .cache/huggingface/download/NAME.metadata   of `hf download --local-dir`: revision, digest, time, a line each
    blobs/<digest>                              of a download cache, to which a snapshot's files are links
    NAME.aria2, NAME.part and so on             of a download that has not ended

A digest is the SHA-256 of a large file, or else its Git blob id: the SHA-1 of "blob", the size and the bytes.

Reads directories, links and small files; safe to use from any thread.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3.base.direct_io import drive_error
from k3.base.errors import DriveError, K3Error, SourceError
from k3.base.presence import is_named
from k3.base.regular_file import read_small_file
from k3.base.safe_text import shown_name
from k3.checkpoint.hf_cache import list_directory

METADATA_DIRECTORY = Path(".cache", "huggingface", "download")
METADATA_BYTES_MAX = 4096

CONTROL_SUFFIXES = (".aria2", ".aria2__temp", ".st")
"""Endings of control files of aria2 and axel: the file beside one has its full size from the start, and holes."""

LEFTOVER_SUFFIXES = (
    *CONTROL_SUFFIXES, ".!qB", ".!ut", ".crdownload", ".download", ".filepart", ".incomplete", ".lock",
    ".opdownload", ".part", ".partial", ".tmp",
)  # fmt: skip
"""Endings of files that belong to an unfinished download or write, never to a model."""

_DIGEST = re.compile(r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")


@dataclass(frozen=True, slots=True)
class PublishedDigest:
    """The digest that a file was published under: 64 digits of SHA-256, or 40 of a Git blob's SHA-1."""

    hexadecimal: str
    source: Path  # the link or the metadata file that says so

    @property
    def sha256(self) -> str | None:
        """The SHA-256, or None if the digest is a Git blob's."""
        return self.hexadecimal if len(self.hexadecimal) == 64 else None

    def check(self, data: bytes, path: Path, error: type[K3Error]) -> None:
        """Raise `error` when `data` are not the bytes that were published."""
        found = hashlib.sha256(data) if self.sha256 is not None else _git_blob(data)
        if found.hexdigest() != self.hexadecimal:
            kind = "SHA-256" if self.sha256 is not None else "Git SHA-1"
            advice = "The file is damaged or was changed: fetch it again"
            if self.source != path:
                advice += f"; if the change is meant, remove {self.source}"
            raise error(
                f"the file's {kind} is {found.hexdigest()}, but it was published as {self.hexadecimal}",
                path=path,
                advice=advice,
            )


def published_digest(path: Path) -> PublishedDigest | None:
    """Return the digest that the downloader recorded for a file of a snapshot, None when there is no record.

    Raises DriveError when a record cannot be read.
    """
    try:
        target = path.readlink()
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):  # without it nothing would be compared
            raise drive_error("cannot read the link", error, path) from error
        target = None  # not a link
    if target is not None and target.parent.name == "blobs" and _DIGEST.match(target.name):
        return PublishedDigest(target.name, path)
    record = path.parent / METADATA_DIRECTORY / f"{path.name}.metadata"
    if not is_named(record):
        return None
    try:
        lines = read_small_file(record, METADATA_BYTES_MAX, SourceError).decode("ascii", "replace").splitlines()
    except SourceError:
        return None  # not a record that hf download wrote
    etag = lines[1].strip().strip('"').lower() if len(lines) > 1 else ""
    return PublishedDigest(etag, record) if _DIGEST.match(etag) else None


def is_leftover(name: str) -> bool:
    """Return True if a file of this name belongs to an unfinished download or write."""
    return name.endswith(LEFTOVER_SUFFIXES)


def leftovers_of(path: Path) -> list[str]:
    """Return the names of the files beside `path` that belong to an unfinished download of it."""
    names = [path.name + suffix for suffix in LEFTOVER_SUFFIXES]
    return [name for name in names if is_named(path.with_name(name))]


def refuse_holes(path: Path, error: type[K3Error]) -> None:
    """Raise `error` when a control file beside `path` shows that its download has not ended."""
    for suffix in CONTROL_SUFFIXES:
        if is_named(path.with_name(path.name + suffix)):
            raise error(
                f"its download has not ended: {path.name}{suffix} is beside it, so the file has holes",
                path=path,
                advice="Let the downloader finish; if the file is whole, remove its control file",
            )


def download_notes(directories: Sequence[Path]) -> list[str]:
    """Return a sentence for every sign of an unfinished download or of another revision. Refuses nothing."""
    notes = []
    for directory in directories:
        beside = sorted(
            name for name, is_directory in _entries(directory) if not is_directory and is_leftover(name)
        )
        if beside:
            notes.append(f"{directory} has files of unfinished downloads: {_listed(beside)}; they are ignored")
        places = [directory / METADATA_DIRECTORY]
        if directory.parent.name == "snapshots":
            places.append(directory.parent.parent / "blobs")
        for place in places:
            unfinished = [name for name, _ in _entries(place) if name.endswith(".incomplete")]
            if unfinished:
                notes.append(f"{place} has files of unfinished downloads: {_listed(unfinished)}; they are ignored")
        main = main_revision(directory)
        if main is not None and main != directory.name:
            notes.append(f"refs/main of the download cache names revision {main}, this is {directory.name}")
    return notes


def main_revision(directory: Path) -> str | None:
    """Return the revision that refs/main names, or None; `directory` is a revision's, in a download cache."""
    if directory.parent.name != "snapshots":
        return None
    reference = directory.parent.parent / "refs" / "main"
    try:
        text = read_small_file(reference, METADATA_BYTES_MAX, SourceError).decode("ascii", "replace").strip()
    except (SourceError, DriveError):
        return None  # it only serves a note
    return text if text.isalnum() else None


def _git_blob(data: bytes) -> hashlib._Hash:
    hasher = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    hasher.update(data)
    return hasher


def _entries(directory: Path) -> list[tuple[str, bool]]:
    try:
        return list_directory(directory)
    except (SourceError, DriveError):
        return []  # it only serves a note; a file that is needed is refused where it is opened


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(map(shown_name, names[:4])) + more
