"""The restart point of an unfinished repack: the units that are durable, in `journal.mdb` beside the container.

A unit (expert or dense tensor) is recorded only after the bytes that hold it have been made durable, so whatever
the journal says was true before the last crash. It also holds what the run was asked to do; a run that is asked
for something else is refused. LMDB commits are atomic: a kill leaves the state before or after, never between.
`journal_file` reads what an earlier run left.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb

from k3.base.direct_io import drive_error, sync_directory, sync_file
from k3.base.errno_advice import Operation
from k3.base.errors import DamageError, K3Error, ResumeError
from k3.base.new_file import create_unguessed, path_of, remove_unguessed
from k3.container.catalog import lmdb_error
from k3.container.layout import EXPERT_KEY, NUMBER_KEY
from k3.model.keys import ExpertKey
from k3.repack.journal_file import (
    DATABASES,
    REQUEST_KEY,
    START_ANEW,
    ShardRecord,
    pack_shard,
    read_journal,
    sealed,
)

_MAP_BYTES = 1 << 30  # address space only; a full K3 journal holds about 15 MB


class Journal:
    """The journal of one run. `experts`, `tensors` and `shards` mirror what is durable.

    Opened by one process; `commit` may be called from any one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        """Read what is there; nothing is written before `begin`.

        DamageError when the file is no journal or what the run was asked for cannot be read, ResumeError for the
        journal of another version.
        """
        self.path = path
        self._environment: Any = None
        self._databases: dict[bytes, Any] = {}
        found = read_journal(path)
        self.request = found.request
        self.experts = found.experts
        self.tensors = found.tensors
        self.shards = found.shards
        self.lost = found.lost
        """A sentence for each record of an earlier run that cannot be trusted; its units are left out."""

    def begin(self, request: Mapping[str, Any]) -> bool:
        """Bind the journal to a request. True when it continues one; ResumeError names what differs."""
        before = self.request
        if before is not None:
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
        self.request = dict(request)
        self._write_anew()
        return before is not None

    def _write_anew(self) -> None:
        """Write all that is known into a new file under the journal's name: LMDB never opens one that it finds.

        Pages that were damaged, or made by somebody else, are so left behind.
        """
        with contextlib.ExitStack() as undo:
            try:
                remove_unguessed(self.path.parent, "journal")
                descriptor, aside = create_unguessed(self.path.parent, "journal")
                undo.callback(lambda: aside.unlink(missing_ok=True))
                undo.callback(os.close, descriptor)
                self._environment = lmdb.open(
                    path_of(descriptor, aside),
                    subdir=False,
                    lock=False,
                    max_dbs=len(DATABASES),
                    map_size=_MAP_BYTES,
                )
                with self._write() as transaction:
                    self._databases = {
                        name: self._environment.open_db(name, txn=transaction) for name in DATABASES
                    }
                    self._put_request(transaction)
                with self._write() as transaction:  # so that each of LMDB's two meta pages knows the request
                    self._put_request(transaction)
                    self._put(transaction, self.experts, self.tensors, self.shards)
                sync_file(descriptor, aside)
                os.replace(aside, self.path)  # noqa: PTH105 - one system call that tests can watch on every Python
                undo.pop_all()
                os.close(descriptor)
            except lmdb.Error as error:
                raise self._trouble("cannot write the journal", error) from error
            except OSError as error:
                raise drive_error(
                    "cannot write the journal", error, self.path, operation=Operation.MAKE
                ) from error
        sync_directory(self.path.parent)

    def commit(
        self,
        experts: Mapping[ExpertKey, tuple[bytes, ...]],
        tensors: Mapping[int, tuple[bytes, ...]],
        shards: Mapping[str, ShardRecord],
    ) -> None:
        """Record units and shards whose bytes are durable."""
        with self._write() as transaction:
            self._put(transaction, experts, tensors, shards)
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
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    @contextlib.contextmanager
    def _write(self) -> Iterator[Any]:
        """Give a write transaction: all of it becomes durable, or nothing. SpaceError or DriveError if not."""
        try:
            with self._environment.begin(write=True) as transaction:
                yield transaction
        except lmdb.Error as error:
            raise self._trouble("cannot write the journal", error) from error

    def _put_request(self, transaction: Any) -> None:
        value = json.dumps(self.request).encode()
        transaction.put(REQUEST_KEY, sealed(REQUEST_KEY, value), db=self._databases[b"request"])

    def _put(
        self,
        transaction: Any,
        experts: Mapping[ExpertKey, tuple[bytes, ...]],
        tensors: Mapping[int, tuple[bytes, ...]],
        shards: Mapping[str, ShardRecord],
    ) -> None:
        def put(database: bytes, key: bytes, value: bytes) -> None:
            transaction.put(key, sealed(key, value), db=self._databases[database])

        for expert, digests in experts.items():
            put(b"experts", EXPERT_KEY.pack(expert.layer, expert.expert), b"".join(digests))
        for position, digests in tensors.items():
            put(b"tensors", NUMBER_KEY.pack(position), b"".join(digests))
        for name, record in shards.items():
            put(b"shards", name.encode(), pack_shard(record))

    def _trouble(self, problem: str, error: lmdb.Error) -> K3Error:
        found = lmdb_error(problem, error, self.path)
        if isinstance(found, DamageError):
            found.advice = START_ANEW
        return found


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"
