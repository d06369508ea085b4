"""Holds up that a journal's records are those that were written, or known not to be."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from k3.base.errors import DamageError, K3Error, ResumeError
from k3.model.keys import ExpertKey
from k3.repack.journal import Journal
from k3.repack.journal_file import ShardRecord, read_journal, sealed
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.mutants import MUTATIONS, mutated
from tests.support.repacked import WIDE, tree
from tests.support.resumed import Case, request_in, stop_after

REQUEST = {"shares": [1, 2], "probes": {}, "shards": [[f"model-{n:05}", n, None] for n in range(300)]}
EXPERTS = {ExpertKey(n // 60, n % 60): (n.to_bytes(16, "big"), bytes(16)) for n in range(400)}
TENSORS = {n: (n.to_bytes(16, "little"),) for n in range(90)}
SHARDS = {f"model-{n}.safetensors": ShardRecord(f"{n:064x}", n, -n) for n in range(40)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "journal.mdb"
    journal = Journal(path)
    journal.begin(REQUEST)
    for start in range(0, 400, 50):
        journal.commit(dict(list(EXPERTS.items())[start : start + 50]), {}, {})
    journal.commit({}, TENSORS, SHARDS)
    journal.close()
    return path.read_bytes()


@pytest.mark.parametrize("kind", MUTATIONS)
def test_a_damaged_journal_says_nothing_that_was_not_written(written: bytes, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal.mdb"
    told = 0
    for number in range(60):
        path.write_bytes(mutated(written, kind, random.Random(f"{kind}/{number}")))
        try:
            found = read_journal(path)
        except DamageError:
            told += 1
            continue
        if found.request is None:
            assert path.stat().st_size == 0
            continue
        assert found.request == REQUEST
        assert found.experts.items() <= EXPERTS.items()
        assert found.tensors.items() <= TENSORS.items()
        assert found.shards.items() <= SHARDS.items()
        told += bool(found.lost)
    assert told > 5


def change_record(path: Path, database: bytes, change: Callable[[bytes, bytes], bytes]) -> None:
    """Put another value under the first key of a database."""
    environment = lmdb.open(str(path), subdir=False, lock=False, max_dbs=4)
    handle = environment.open_db(database, create=False)
    with environment.begin(write=True, db=handle) as transaction:
        key, value = next(iter(transaction.cursor()))
        transaction.put(bytes(key), change(bytes(key), bytes(value)))
    environment.close()


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run stopped after three shards under `stopped`, and what an undisturbed one makes under `done`."""
    place = tmp_path_factory.mktemp("prepared")
    for name in ("done", "stopped"):
        write_snapshot(WIDE, place / name / "snapshot")
        case = Case(request_in(place / name), {})
        if name == "done":
            case.finish()
        else:
            stop_after(case, 3)
    return place


@pytest.fixture
def case(snapshot: Path, tmp_path: Path) -> Case:
    shutil.copytree(snapshot / "stopped", tmp_path / "case")
    return Case(request_in(tmp_path / "case"), tree(*request_in(snapshot / "done").root_directories()))


@pytest.mark.parametrize("database", [b"experts", b"tensors", b"shards"])
def test_a_changed_record_is_told_and_its_unit_made_again(case: Case, database: bytes) -> None:
    path = case.request.home / "journal.mdb"
    change_record(path, database, lambda key, value: value[:-1] + bytes([value[-1] ^ 1]))
    _, listener = case.finishes_equal()
    assert any("the journal is damaged" in note for note in listener.notes)


def test_a_changed_request_is_refused_with_advice(case: Case) -> None:
    path = case.request.home / "journal.mdb"
    change_record(path, b"request", lambda key, value: value.replace(b"3", b"4", 1))
    before = path.read_bytes()
    with pytest.raises(DamageError, match="what the run was asked to do") as caught:
        case.finish()
    assert "repack again" in str(caught.value.advice)
    assert path.read_bytes() == before


@pytest.mark.parametrize("number", range(12))
def test_a_flipped_bit_is_never_published(case: Case, number: int) -> None:
    path = case.request.home / "journal.mdb"
    path.write_bytes(mutated(path.read_bytes(), "page heads" if number % 2 else "bit", random.Random(number)))
    try:
        case.finish()
    except DamageError:
        return
    assert case.tree() == case.wanted


FORGED: dict[str, tuple[bytes, bytes, bytes]] = {
    "a unit of no layer": (b"experts", b"\xff" * 8, bytes(16)),
    "a key of no unit": (b"experts", b"x", bytes(16)),
    "too few digests": (b"experts", bytes([0, 0, 0, 1, 0, 0, 0, 0]), bytes(16)),
    "a digest that is cut": (b"tensors", bytes(4), bytes(9)),
    "a tensor of no plan": (b"tensors", b"\xff" * 4, bytes(16)),
    "a shard of nothing": (b"shards", b"s", b""),
    "a name that is no text": (b"shards", b"\xff", bytes(48)),
    "a request without shares": (b"request", b"request-2", b"{}"),
    "a request that is no object": (b"request", b"request-2", b"[]"),
}


@pytest.mark.parametrize("what", FORGED)
def test_records_with_right_digests_that_make_no_sense_are_typed(case: Case, what: str) -> None:
    database, key, value = FORGED[what]
    path = case.request.home / "journal.mdb"
    environment = lmdb.open(str(path), subdir=False, lock=False, max_dbs=4)
    with environment.begin(write=True, db=environment.open_db(database, create=False)) as transaction:
        transaction.put(key, sealed(key, value))
    environment.close()
    with contextlib.suppress(K3Error):
        case.finishes_equal()


@pytest.mark.parametrize("request_", [{}, {"shares": 3, "probes": {}}, {"shares": [1], "probes": {"x": 1}}])
def test_shares_that_were_measured_are_taken_from_a_sound_request_only(
    case: Case, request_: dict[str, Any]
) -> None:
    path = case.request.home / "journal.mdb"
    path.unlink()
    journal = Journal(path)
    journal.begin(request_)
    journal.close()
    with pytest.raises(DamageError, match="the shares of the drives is not valid"):
        case.finish(shares=None)


def test_a_journal_of_the_first_version_is_refused_by_name(case: Case) -> None:
    path = case.request.home / "journal.mdb"
    path.unlink()
    environment = lmdb.open(str(path), subdir=False, lock=False, max_dbs=4)
    for name in (b"request", b"experts", b"tensors", b"shards"):
        environment.open_db(name)
    with environment.begin(write=True, db=environment.open_db(b"request")) as transaction:
        transaction.put(b"request", b'{"bits": 8}')
    environment.close()
    before = path.read_bytes()
    with pytest.raises(ResumeError, match="earlier release"):
        case.finish()
    assert path.read_bytes() == before


def test_links_and_second_names_are_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "journal.mdb.partial").symlink_to(victim)
    journal = Journal(tmp_path / "journal.mdb")
    journal.begin(REQUEST)
    journal.close()
    assert victim.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".k3")] == []
