"""What is durable so far: the restart point of an unfinished repack, in `journal.mdb` beside the container.

A unit (expert or dense tensor) is recorded only after the bytes that hold it have been made durable, so whatever
the journal says was true before the last crash. It also holds what the run was asked to do; a run that is asked
for something else is refused. LMDB commits are atomic: a kill leaves the state before or after, never between.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb

from k3.container.catalog import lmdb_error, refuse_cut_map
from k3.container.errors import DamageError, K3Error, ResumeError
from k3.container.keys import ExpertKey
from k3.container.layout import DIGEST_BYTES, EXPERT_KEY, NUMBER_KEY

_DATABASES = (b"request", b"experts", b"tensors", b"shards")
_REQUEST_KEY = b"request"
_START_ANEW = "Remove the unfinished container and repack again; the source is untouched"
_MAP_BYTES = 1 << 30  # address space only; a full K3 journal holds about 12 MB


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A shard that was read to its end."""

    sha256: str
    size_bytes: int
    mtime_ns: int


class Journal:
    """The journal of one run. `experts`, `tensors` and `shards` mirror what is durable.

    Opened by one process; `commit` may be called from any one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the journal. DamageError when the file is not one; SpaceError when there is no room."""
        self.path = path
        self.experts: dict[ExpertKey, tuple[bytes, ...]] = {}
        self.tensors: dict[int, tuple[bytes, ...]] = {}
        self.shards: dict[str, ShardRecord] = {}
        try:
            self._environment = lmdb.open(
                os.fspath(path), subdir=False, lock=False, max_dbs=len(_DATABASES), map_size=_MAP_BYTES
            )
        except lmdb.Error as error:
            raise self._trouble("cannot open the journal", error) from error
        try:
            refuse_cut_map(self._environment, path)
            self._databases = {name: self._environment.open_db(name) for name in _DATABASES}
            self.request = self._load()
        except lmdb.Error as error:
            self.close()
            raise self._trouble("cannot open the journal", error) from error
        except DamageError as error:
            self.close()
            error.advice = _START_ANEW
            raise
        except (ValueError, TypeError, struct.error) as error:
            self.close()
            raise DamageError(f"the journal is damaged: {error}", path=path, advice=_START_ANEW) from error

    def _trouble(self, problem: str, error: lmdb.Error) -> K3Error:
        found = lmdb_error(problem, error, self.path)
        if isinstance(found, DamageError):
            found.advice = _START_ANEW
        return found

    def _load(self) -> dict[str, Any] | None:
        with self._environment.begin() as transaction:
            for key, value in transaction.cursor(self._databases[b"experts"]):
                self.experts[ExpertKey(*EXPERT_KEY.unpack(key))] = _split(value)
            for key, value in transaction.cursor(self._databases[b"tensors"]):
                self.tensors[NUMBER_KEY.unpack(key)[0]] = _split(value)
            for key, value in transaction.cursor(self._databases[b"shards"]):
                self.shards[bytes(key).decode()] = ShardRecord(**json.loads(value))
            stored = transaction.get(_REQUEST_KEY, db=self._databases[b"request"])
        return None if stored is None else dict(json.loads(stored))

    @contextlib.contextmanager
    def _write(self) -> Iterator[Any]:
        """A write transaction: all of it becomes durable, or nothing. SpaceError or DriveError if it cannot."""
        try:
            with self._environment.begin(write=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise self._trouble("cannot write the journal", error) from error

    def begin(self, request: Mapping[str, Any]) -> bool:
        """Bind the journal to a request. True when it continues one; ResumeError names what differs."""
        if self.request is None:
            with self._write() as transaction:
                transaction.put(_REQUEST_KEY, json.dumps(request).encode(), db=self._databases[b"request"])
            self.request = dict(request)
            return False
        before = self.request
        now = json.loads(json.dumps(request))
        differing = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if differing:
            details = "; ".join(
                f"{key} was {_short(before.get(key))}, is {_short(now.get(key))}" for key in differing
            )
            raise ResumeError(
                f"an unfinished repack with other parameters is here: {details}",
                path=self.path.parent,
                advice="Repeat the first command to continue it, or empty this directory to start anew",
            )
        return True

    def commit(
        self,
        experts: Mapping[ExpertKey, tuple[bytes, ...]],
        tensors: Mapping[int, tuple[bytes, ...]],
        shards: Mapping[str, ShardRecord],
    ) -> None:
        """Record units and shards whose bytes are durable."""
        with self._write() as transaction:
            for key, digests in experts.items():
                packed = EXPERT_KEY.pack(key.layer, key.expert)
                transaction.put(packed, b"".join(digests), db=self._databases[b"experts"])
            for position, digests in tensors.items():
                transaction.put(NUMBER_KEY.pack(position), b"".join(digests), db=self._databases[b"tensors"])
            for name, record in shards.items():
                value = {"sha256": record.sha256, "size_bytes": record.size_bytes, "mtime_ns": record.mtime_ns}
                transaction.put(name.encode(), json.dumps(value).encode(), db=self._databases[b"shards"])
        self.experts.update(experts)
        self.tensors.update(tensors)
        self.shards.update(shards)

    def forget(self, experts: Iterable[ExpertKey], tensors: Iterable[int]) -> None:
        """Strike out units that cannot be trusted; those that are not there are no matter."""
        experts = [key for key in experts if key in self.experts]
        tensors = [position for position in tensors if position in self.tensors]
        with self._write() as transaction:
            for key in experts:
                transaction.delete(EXPERT_KEY.pack(key.layer, key.expert), db=self._databases[b"experts"])
            for position in tensors:
                transaction.delete(NUMBER_KEY.pack(position), db=self._databases[b"tensors"])
        for key in experts:
            del self.experts[key]
        for position in tensors:
            del self.tensors[position]

    def close(self) -> None:
        """Close the file."""
        self._environment.close()


def _split(value: bytes) -> tuple[bytes, ...]:
    data = bytes(value)
    return tuple(data[i : i + DIGEST_BYTES] for i in range(0, len(data), DIGEST_BYTES))


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"
