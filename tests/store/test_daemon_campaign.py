"""Holds up: a thousand killed clients and a hundred killed daemons leave nothing behind, and no byte is wrong.

Run with `pytest -m campaign tests/store/test_daemon_campaign.py`; the seed is in each test's name.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from k3.model.keys import ExpertKey
from k3.store.client.daemon_source import DaemonSource
from tests.support.containers import Built, build_container
from tests.support.daemons import daemon_inside, start
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(3600)]

VICTIMS = """
    import os, random, sys
    from pathlib import Path
    from k3.store.client.daemon_source import DaemonSource
    # One warm process forks the victims, so that a thousand of them take minutes and not an hour.
    path = Path(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        dice = random.Random(int(line))
        source = DaemonSource(path, name="victim")
        held = []
        while True:
            stream = source.lease(dice.choice((1, 2)), dice.sample(range(5), dice.randint(1, 5)))
            for lease in stream:
                held.append(lease)
                while len(held) > dice.randint(0, 4):
                    held.pop(0).release()
"""


@pytest.mark.parametrize("seed", [0])
def test_a_thousand_clients_killed_at_any_instant(tmp_path: Path, seed: int) -> None:
    built = build_container(tmp_path / "home", [tmp_path / "a"], [1, 2])
    dice = random.Random(seed)
    with daemon_inside(
        tmp_path / "s", built.directories, quota=8, max_clients=4, cache_bytes=33 * 28672
    ) as inside:
        nursery = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(VICTIMS), str(tmp_path / "s")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=_reap_children,
        )  # fmt: skip
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        before = _descriptors()
        took_s = []
        for number in range(1000):
            nursery.stdin.write(f"{seed * 1000 + number}\n")
            nursery.stdin.flush()
            victim = int(nursery.stdout.readline())
            time.sleep(dice.random() * 0.03)
            os.kill(victim, 9)
            took_s.append(wait_until(lambda: _is_idle(inside.server.stats())))
        nursery.kill()
        nursery.communicate()
        took_s.sort()
        print(
            f"leases free after {took_s[500]:.4f} s (median), {took_s[990]:.4f} s (99 %), {took_s[-1]:.4f} s (all)"
        )
        assert took_s[990] < 0.1  # the rest is a crowded machine that lets the killed one die late
        assert _descriptors() <= before
        _take_all(DaemonSource(tmp_path / "s"), built)


@pytest.mark.parametrize("seed", [0])
def test_a_hundred_killed_daemons(tmp_path: Path, seed: int) -> None:
    built = build_container(tmp_path / "home", [tmp_path / "a"], [1, 2])
    dice = random.Random(seed)
    path = tmp_path / "s"
    daemon = start(path, built.directories)
    sources = [DaemonSource(path, reconnect_s=120) for _ in range(3)]
    stop = threading.Event()
    rounds = [0, 0, 0]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            while not stop.is_set():
                _take_all(sources[index], built, close=False)
                rounds[index] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    try:
        for kills in range(1, 101):
            time.sleep(dice.random() * 0.1)
            daemon.kill()
            seen = list(rounds)
            daemon = start(path, built.directories)

            def all_went_on(kills: int = kills, seen: list[int] = seen) -> bool:
                # A round may end with leases granted before the kill: only a source that came back has noticed it.
                back = all(source.reconnects >= kills for source in sources)
                return bool(failures) or (back and all(a > b for a, b in zip(rounds, seen, strict=True)))

            wait_until(all_went_on, 60)
            assert not failures
    finally:
        stop.set()
        for thread in threads:
            thread.join(150)
        for source in sources:
            source.close()
        daemon.kill()
    assert not failures
    assert [source.reconnects for source in sources] == [100, 100, 100]


def _reap_children() -> None:
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _is_idle(stats: dict[str, object]) -> bool:
    slots = stats["slots"]
    assert isinstance(slots, dict)
    return stats["clients"] == [] and slots["held"] == 0


def _take_all(source: DaemonSource, built: Built, *, close: bool = True) -> None:
    for layer in (1, 2):
        for lease in source.lease(layer, range(5)):
            with lease:
                assert lease.payload.tobytes() == built.payloads[ExpertKey(layer, lease.expert)]
    if close:
        source.close()
