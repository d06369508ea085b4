"""The snapshot's small files that a container takes along: configuration, tokenizer, code, licence.

They are read once, while a run is planned, and published from memory: what happens to them while shards are
streamed changes nothing. What cannot be taken is refused here, before byte one; what is left out is said. Reads
only; for one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from k3.base import checksum
from k3.base.errors import DamageError, ResumeError, SourceError
from k3.base.presence import is_there
from k3.base.regular_file import RegularFile, regular_size
from k3.checkpoint.downloads import is_leftover, published_digest
from k3.checkpoint.hf_cache import list_directory
from k3.checkpoint.snapshot import Snapshot
from k3.checkpoint.snapshot_files import SMALL_FILE_BYTES_MAX
from k3.container.layout import PARTIAL_SUFFIX, RESERVED_NAMES
from k3.container.manifest import Manifest

ALL_BYTES_MAX = 512 << 20
"""All small files together: they are held in memory for the whole run."""

NAME_BYTES_MAX = 255
"""Longest name on file systems that do not say another number."""

_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")
_LOG_SUFFIX = ".log"
_LOG_NAMES = frozenset(("nohup.out",))
_DECISIVE_SUFFIXES = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
_FINISHED = "Choose another directory; a finished container is never changed"


@dataclass(frozen=True, slots=True)
class SmallSource:
    """A small file of the snapshot as it was when the run was planned."""

    name: str
    data: bytes
    digest: str


@dataclass(frozen=True)
class SmallFiles:
    """All small files by name, and one sentence for each that is left behind."""

    files: tuple[SmallSource, ...]
    left_behind: tuple[str, ...]

    @classmethod
    def read(cls, snapshot: Snapshot) -> SmallFiles:
        """Read every small file beside the shards. SourceError or DriveError for one that cannot be taken."""
        taken: dict[str, SmallSource] = {}
        reasons = []
        total_bytes = 0
        for path in _beside_shards(snapshot):
            reason = _reason_to_leave(path)
            if reason is not None:
                reasons.append(f"{path.name} is not taken along: {reason}")
                continue
            data = _read(path, snapshot)
            total_bytes += len(data)
            if total_bytes > ALL_BYTES_MAX:
                raise SourceError(
                    f"the small files beside the shards have more than {ALL_BYTES_MAX >> 20} MiB together",
                    path=path,
                    advice="Move what is not the model's out of the snapshot's directory",
                )
            found = SmallSource(path.name, data, checksum.digest(data).hex())
            first = taken.setdefault(path.name, found)
            if first.digest != found.digest:
                raise SourceError(
                    "differs from the file of this name in another directory of the snapshot",
                    path=path,
                    advice="Keep one of them, or make them equal",
                )
        return cls(tuple(taken[name] for name in sorted(taken)), tuple(reasons))

    @cached_property
    def names(self) -> frozenset[str]:
        """Names of the files that are taken."""
        return frozenset(small.name for small in self.files)

    @property
    def total_bytes(self) -> int:
        """Sizes of all files that are taken."""
        return sum(len(small.data) for small in self.files)

    def check_names(self, home: Path) -> None:
        """SourceError for a file whose name, while it is written, is longer than the destination takes."""
        place = next(place for place in (home, *home.absolute().parents) if is_there(place))
        try:
            most_bytes = os.pathconf(place, "PC_NAME_MAX")
        except OSError:
            most_bytes = NAME_BYTES_MAX
        for small in self.files:
            length_bytes = len(os.fsencode(small.name + PARTIAL_SUFFIX))
            if length_bytes > most_bytes:
                raise SourceError(
                    f"the file {small.name} cannot be written to {home}: while it is written its name has "
                    f"{length_bytes} bytes, and {most_bytes} are taken there",
                    path=small.name,
                    advice="Give it a shorter name, or move it out of the snapshot's directory",
                )

    def decisive(self) -> Mapping[str, str]:
        """Digests of the files that must be the same when an unfinished run goes on, by name.

        These are configurations, vocabularies, templates and code. A readme or a picture may have changed since;
        the run that publishes takes it as it is then.
        """
        return {
            small.name: small.digest for small in self.files if small.name.lower().endswith(_DECISIVE_SUFFIXES)
        }

    def check_finished(self, manifest: Manifest, home: Path) -> None:
        """ResumeError unless a finished container was made from these files."""
        theirs = {file.path: file.digest for file in manifest.text_files if not is_leftover(file.path)}
        ours = {small.name: small.digest for small in self.files}
        differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if differing:
            details = "; ".join(f"{name}: {_difference(theirs.get(name), ours.get(name))}" for name in differing)
            raise ResumeError(
                f"a finished container with other small files is here: {details[:1000]}",
                path=home,
                advice=_FINISHED,
            )


def check_present(manifest: Manifest, home: Path) -> None:
    """DamageError unless a finished container has all of its small files, as they were written."""
    for file in manifest.text_files:
        path = home / file.path
        with RegularFile(path, missing=DamageError) as opened:
            sound = opened.size_bytes == file.bytes
            sound = sound and checksum.digest(opened.read(0, file.bytes)).hex() == file.digest
        if not sound:
            raise DamageError(
                "small file does not match its digest", path=path,
                advice="Copy it from the snapshot, which has the right bytes",
            )  # fmt: skip


def _beside_shards(snapshot: Snapshot) -> Iterator[Path]:
    """Yield the files beside the shards that are neither weights nor hidden; folders are left out."""
    for directory in snapshot.directories:
        for name, is_directory in list_directory(directory):
            if is_directory or name.startswith(".") or name.endswith(_WEIGHT_SUFFIXES):
                continue
            if not is_leftover(name):  # of these the snapshot's own notes tell
                yield directory / name


def _reason_to_leave(path: Path) -> str | None:
    if not path.name.isprintable():
        raise SourceError(f"file name {path.name!a} is not printable text", path=path.parent, advice="Rename it")
    if path.name in RESERVED_NAMES:
        return "a container has a file of this name"
    if path.suffix == _LOG_SUFFIX or path.name in _LOG_NAMES:
        return "it is a log"
    if regular_size(path, SourceError) > SMALL_FILE_BYTES_MAX:
        return f"it is larger than {SMALL_FILE_BYTES_MAX >> 20} MiB"
    return None


def _read(path: Path, snapshot: Snapshot) -> bytes:
    """Return the file's bytes; those that planning has read already are not read again."""
    _refuse_foreign_link(path, snapshot)
    return snapshot.small_file(path)


def _refuse_foreign_link(path: Path, snapshot: Snapshot) -> None:
    """SourceError for a link out of the snapshot: what it leads to was never meant to be copied and served.

    Links into the download cache's own blobs are what a cache consists of. A blob elsewhere is taken if it is
    named by the digest of its bytes, which are compared when it is read.
    """
    if not path.is_symlink():
        return
    target = path.resolve()
    for directory in map(Path.resolve, snapshot.directories):
        if directory in target.parents:
            return
        if directory.parent.name == "snapshots" and target.parent == directory.parent.parent / "blobs":
            return
    record = published_digest(path)
    if record is None or record.source != path:
        raise SourceError(
            f"is a link out of the snapshot, to {target}",
            path=path,
            advice="Put the file itself there, or remove the link: only what lies in the snapshot is taken along",
        )


def _difference(theirs: str | None, ours: str | None) -> str:
    if theirs is None:
        return "not there, but in the snapshot"
    if ours is None:
        return "there, but not in the snapshot"
    return f"digest {theirs} there, {ours} in the snapshot"
