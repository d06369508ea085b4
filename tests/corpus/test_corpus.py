"""Holds up that damage to any file that others may hand us ends in an operating error, or is read as it was.

Each batch runs in a forked child, so that a signal is a finding and not the end of the run. The campaign's length
for each target is K3_CORPUS (100,000 without it).
"""

from __future__ import annotations

import collections
import json
import os
import random
import sys
import traceback
from pathlib import Path

import pytest

from k3.base.errors import K3Error
from tests.support.corpus import TARGETS, Target, make_target

QUICK = 150
BATCH = 2000
SHOWN_MAX = 3
MESSAGE_MAX = 2000


def outcome(target: Target, seed: str) -> str:
    """Return "refused", "read", or what is wrong with the answer to one damaged file."""
    data = target.mutate(random.Random(seed))
    try:
        found = target.read(data)
    except K3Error as error:
        text = str(error)
        if not text.isprintable() or len(text) > MESSAGE_MAX:
            return f"{seed}: a message of {len(text)} characters, printable {text.isprintable()}"
        return "refused"
    except Exception:
        return f"{seed}: {traceback.format_exc(limit=-4)}"
    return "read" if target.agrees(found) else f"{seed}: another content"


def batch(target: Target, name: str, start: int, count: int) -> collections.Counter[str]:
    """Outcomes of `count` damaged files, made and read in a child process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            counts: collections.Counter[str] = collections.Counter()
            for number in range(start, start + count):
                counts[outcome(target, f"{name}/{number}")] += 1
            with os.fdopen(writing, "w") as pipe:
                json.dump(counts, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) or not text:
        return collections.Counter({f"{name}/{start}...: ended by signal {os.WTERMSIG(status)}": 1})
    return collections.Counter(json.loads(text))


def run(name: str, place: Path, count: int) -> collections.Counter[str]:
    """All outcomes of a target; AssertionError shows the first that are wrong."""
    target = make_target(name, place)
    assert target.agrees(target.read(target.sound))
    counts: collections.Counter[str] = collections.Counter()
    for start in range(0, count, BATCH):
        counts += batch(target, name, start, min(BATCH, count - start))
    wrong = [what for what in counts if what not in ("refused", "read")]
    assert not wrong, "\n".join([f"{len(wrong)} of {count}:", *wrong[:SHOWN_MAX]])
    return counts


@pytest.mark.parametrize("name", TARGETS)
def test_damage_is_refused_or_read_as_it_was(name: str, tmp_path: Path) -> None:
    counts = run(name, tmp_path, QUICK)
    assert counts["refused"] > QUICK // 10, counts


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", TARGETS)
def test_campaign(name: str, tmp_path: Path) -> None:
    count = int(os.environ.get("K3_CORPUS", "100000"))
    counts = run(name, tmp_path, count)
    sys.stderr.write(f"\n{name}: {count} damaged files, {dict(counts)}\n")
