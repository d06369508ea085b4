"""The journal of an earlier run, read without trusting a bit of it.

Every value in `journal.mdb` begins with the digest of its key and of what follows, so that a record is either what
was written or is known not to be. A record that is not makes its unit unknown, which is then made again; only what
the run was asked to do cannot be done without. The tree around the records is read by `base.page_tree`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3.base import checksum
from k3.base.errors import DamageError, ResumeError
from k3.base.page_tree import PageTree
from k3.base.regular_file import read_small_file
from k3.base.strict_json import parse_object
from k3.container.layout import DIGEST_BYTES, EXPERT_KEY, NUMBER_KEY
from k3.model.keys import ExpertKey

DATABASES = (b"request", b"experts", b"tensors", b"shards")
REQUEST_KEY = b"request-2"
"""The key of what a run was asked to do; its number is the version of the journal."""

START_ANEW = "Remove the unfinished container and repack again; the source is untouched"

_FIRST_REQUEST_KEY = b"request"  # of version 1, whose records had no digests
_BYTES_MAX = 1 << 30
_LOST_MAX = 20
_SHARD = struct.Struct("<32sQq")  # SHA-256, bytes, time of change in ns
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard that was read to its end."""

    sha256: str
    size_bytes: int
    mtime_ns: int


@dataclass(slots=True)
class JournalContent:
    """All records that are what was written. `request` is None for a run that never began."""

    request: dict[str, Any] | None = None
    experts: dict[ExpertKey, tuple[bytes, ...]] = field(default_factory=dict)
    tensors: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    shards: dict[str, ShardRecord] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


def sealed(key: bytes, value: bytes) -> bytes:
    """Return what is stored under `key` for `value`."""
    return _seal(key, value) + value


def pack_shard(record: ShardRecord) -> bytes:
    """Return the value of a shard's record."""
    assert _SHA256.fullmatch(record.sha256)
    return _SHARD.pack(bytes.fromhex(record.sha256), record.size_bytes, record.mtime_ns)


def read_journal(path: Path) -> JournalContent:
    """Return what the journal at `path` holds; nothing when there is none, or one that is empty.

    DamageError when the file is no journal, or the request in it is not what was written. ResumeError for one of
    version 1.
    """
    content = JournalContent()
    try:
        path.lstat()
    except FileNotFoundError:
        return content
    data = read_small_file(path, _BYTES_MAX, DamageError, START_ANEW)
    if not data:
        return content
    try:
        _Reader(PageTree(data, path), content).read()
    except (struct.error, UnicodeDecodeError) as error:  # of a record that has its digest and is none of ours
        raise DamageError(
            "the journal holds a record of a form that k3-repack does not write", path=path, advice=START_ANEW
        ) from error
    except DamageError as error:
        raise DamageError(
            f"the journal is damaged: {error.problem}", path=path, offset=error.offset, advice=START_ANEW
        ) from error
    return content


class _Reader:
    def __init__(self, tree: PageTree, content: JournalContent) -> None:
        self._tree = tree
        self._content = content

    def read(self) -> None:
        content = self._content
        if self._tree.sound_meta_pages < 2:
            self._lose("a meta page of the file is damaged")
        request = dict(self._records(b"request", refuse_first_version=True))
        for key, value in self._records(b"experts"):
            content.experts[ExpertKey(*EXPERT_KEY.unpack(key))] = _split(value)
        for key, value in self._records(b"tensors"):
            content.tensors[NUMBER_KEY.unpack(key)[0]] = _split(value)
        for key, value in self._records(b"shards"):
            sha256, size_bytes, mtime_ns = _SHARD.unpack(value)
            content.shards[key.decode()] = ShardRecord(sha256.hex(), size_bytes, mtime_ns)
        if REQUEST_KEY in request:
            content.request = parse_object(
                request[REQUEST_KEY],
                what="the request",
                path=self._tree.path,
                error=DamageError,
                advice=START_ANEW,
            )
        elif content.lost or content.experts or content.tensors or content.shards:
            raise DamageError("the record of what the run was asked to do is missing", path=self._tree.path)

    def _records(self, name: bytes, *, refuse_first_version: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Return the sound records of a database; of the others, that they are lost."""
        try:
            database = self._tree.database(name)
        except DamageError as error:
            self._lose(error.problem)
            return
        if database is None:
            self._lose(f"the file has no database {name.decode()}")
            return
        for key, value in database.items(lambda error: self._lose(error.problem)):
            if refuse_first_version and key == _FIRST_REQUEST_KEY and value[:1] == b"{":
                raise _first_version(self._tree.path)
            if value[:DIGEST_BYTES] != _seal(key, value[DIGEST_BYTES:]):
                self._lose(f"a record of {name.decode()} does not match its digest")
            else:
                yield key, value[DIGEST_BYTES:]

    def _lose(self, problem: str) -> None:
        """Note that something is gone; of a file in ruins, the first few notes say enough."""
        if len(self._content.lost) < _LOST_MAX:
            self._content.lost.append(problem)


def _first_version(path: Path) -> ResumeError:
    return ResumeError(
        "an unfinished repack of an earlier release is here, whose journal has no digests to trust it by",
        path=path,
        advice="Finish it with that release, or empty this directory to start anew",
    )


def _seal(key: bytes, value: bytes) -> bytes:
    return checksum.digest(struct.pack("<I", len(key)) + key + value)


def _split(value: bytes) -> tuple[bytes, ...]:
    return tuple(value[i : i + DIGEST_BYTES] for i in range(0, len(value), DIGEST_BYTES))
