"""Kills k3-repack at a chosen event, resumes it, and compares with an undisturbed run. One JSON line per point.

    python kill_runner.py DIRECTORY CONFIGURATION SEED POINTS

An event is a call by which a run changes the disk: a write (also done by half), an fsync, a rename, a new
directory, a removal, a commit of the journal, the writing of the catalog. The victim is a forked child that sends
itself SIGKILL before the N-th event, or in the middle of it. With "power" the child first undoes what was not yet
durable, as a power cut may: pages that were written since the last fsync become zeros, files that were renamed
get their old names. This process imports everything once and runs nothing itself, so that it can fork at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3.base import direct_io
from k3.base.errors import K3Error
from k3.model.tensor_recipe import Recipe
from k3.repack import assemble, jobs, publish, write
from k3.repack.journal import Journal
from k3.repack.repack_request import DEFAULT_RECIPE, RepackRequest
from k3.repack.run import Watcher, repack
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.repacked import SMALL, WIDE, tree

LAST_EVENTS = 24
"""Publishing is short and must not lose anything: a quarter of all kills fall into the last events."""

TINY = replace(SMALL, experts=3, vision=False, layers=2)


@dataclass(frozen=True)
class Configuration:
    """What is repacked and how."""

    model: SyntheticModel = WIDE
    drives: tuple[str, ...] = ()
    shares: tuple[int, ...] | None = None
    in_place: bool = False
    layers: tuple[int, ...] | None = None
    recipe: Recipe = DEFAULT_RECIPE
    split: bool = False
    jobs: int | None = None


CONFIGURATIONS = {
    "one-root": Configuration(replace(WIDE, experts=4)),
    "two-roots": Configuration(replace(WIDE, experts=4), ("home", "a"), (3, 1)),
    "three-roots": Configuration(
        replace(WIDE, experts=3), ("a", "b", "home"), (1, 2, 1), recipe=Recipe(4, 16, 32)
    ),
    "in-place": Configuration(TINY, in_place=True),
    "hf-cache": Configuration(replace(TINY, layout="hf_cache"), ("a", "b"), (1, 1)),
    "scattered": Configuration(replace(WIDE, experts=9, expert_order="scattered", shards_per_layer=3)),
    "split": Configuration(TINY, ("home", "a"), (1, 1), split=True),
    "layers": Configuration(WIDE, layers=(0, 2)),
    "jobs": Configuration(replace(WIDE, experts=4, expert_order="scattered", shards_per_layer=3), jobs=4),
}


class Killer:
    """Counts events and ends the process at the chosen one. Threads write concurrently, so it holds a lock."""

    def __init__(self, at: int, half: bool, power: bool, seed: int) -> None:
        self.at = at
        self.half = half
        self.power = power
        self.random = random.Random(seed)
        self.count = 0
        self.lock = threading.RLock()
        self.unsynced: dict[str, list[tuple[int, int]]] = {}
        self.renames: list[tuple[str, str]] = []

    def event(self, half: Callable[[], None] | None = None) -> None:
        """One event begins. `half` does a part of it."""
        self.count += 1
        if self.count != self.at:
            return
        if self.half and half is not None:
            half()
        if self.power:
            self.cut_power()
        os.kill(os.getpid(), signal.SIGKILL)

    def cut_power(self) -> None:
        """Lose some of what was not made durable."""
        for path, ranges in self.unsynced.items():
            for offset, nbytes in ranges:
                if self.random.random() < 0.5:
                    with contextlib.suppress(FileNotFoundError), open(path, "r+b", buffering=0) as file:
                        os.pwrite(file.fileno(), bytes(nbytes), offset)
        for old, new in reversed(self.renames):
            if self.random.random() < 0.5 and Path(new).exists():
                _rename(new, old)


_rename = os.rename


def install(killer: Killer) -> None:
    """Route every change that a run makes on the disk through the killer."""

    def counted(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            with killer.lock:
                killer.event()
                result = original(*arguments, **options)
                if name in ("rename", "replace"):
                    old, new = map(os.fspath, arguments[:2])
                    killer.renames.append((old, new))
                    killer.unsynced[new] = killer.unsynced.pop(old, [])
                return result

        setattr(os, name, call)

    for name in ("rename", "replace", "mkdir", "unlink", "ftruncate", "posix_fallocate"):
        counted(name)
    fsync, pwritev, pwrite = os.fsync, os.pwritev, os.pwrite

    def syncing(fd: Any) -> None:
        with killer.lock:
            killer.event()
            fsync(fd)
            path = _path_of(fd)
            killer.unsynced.pop(path, None)
            killer.renames = [(old, new) for old, new in killer.renames if str(Path(new).parent) != path]

    def writing(fd: int, buffers: Any, offset: int) -> int:
        (buffer,) = buffers
        with killer.lock:
            killer.event(lambda: _write_half(pwritev, fd, buffer, offset))
            killer.unsynced.setdefault(_path_of(fd), []).append((offset, len(buffer)))
            return pwritev(fd, [buffer], offset)

    def spilling(fd: int, data: Any, offset: int) -> int:
        with killer.lock:
            killer.event(lambda: _discard(pwrite(fd, data[: len(data) // 2], offset)))
            return pwrite(fd, data, offset)

    os.fsync, os.pwrite = syncing, spilling
    defaults = direct_io.WriteFile.__init__.__kwdefaults__
    assert defaults is not None
    defaults["pwritev"] = writing
    for name in ("begin", "commit", "forget"):
        around(Journal, name, killer)
    around(publish, "write_catalog", killer)


def _path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def _write_half(pwritev: Callable[..., int], fd: int, buffer: Any, offset: int) -> None:
    half = len(buffer) // 2 // 4096 * 4096
    if half:
        pwritev(fd, [buffer[:half]], offset)


def _discard(count: int) -> None:
    """Take notice of a part that was written."""


def around(owner: Any, name: str, killer: Killer) -> None:
    """Make a call an event before and after it."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        with killer.lock:
            killer.event()
        result = original(*arguments, **options)
        with killer.lock:
            killer.event()
        return result

    setattr(owner, name, call)


class Bench:
    """One configuration on disk: its source, its destination and the undisturbed result."""

    def __init__(self, place: Path, configuration: Configuration) -> None:
        self.place = place
        self.configuration = configuration
        more = [place / "more"] if configuration.split else []
        self.source = write_snapshot(configuration.model, place / "source", more_directories=more)
        self.out = place / "out"
        drives = tuple(self.out / name for name in configuration.drives)
        self.request = RepackRequest(
            sources=(self.source, *more), home=self.out / "home", drives=drives, shares=configuration.shares,
            recipe=configuration.recipe, in_place=configuration.in_place, layers=configuration.layers,
            jobs=configuration.jobs,
        )  # fmt: skip
        self.source_tree = tree(place / "source", *more)
        self.events = 0
        code = self.child(Killer(0, half=False, power=False, seed=0))
        assert code == 0, code
        self.events = int((place / "events").read_text())
        self.wanted = tree(self.out)
        assert self.wanted

    def child(self, killer: Killer | None) -> int:
        """Run a repack in a forked child: 0 when it finished, 9 when it was killed, else what went wrong."""
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                small_units()
                if killer is not None:
                    install(killer)
                repack(self.request, Watcher())
                if killer is not None:
                    (self.place / "events").write_text(str(killer.count))
                status = 0
            except K3Error as error:
                sys.stderr.write(f"{error}\n")
                status = int(error.exit_code)
            finally:
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def point(self, rng: random.Random) -> dict[str, Any]:
        """One kill (or two in a row), one resumption, one comparison."""
        shutil.rmtree(self.out)
        kills = rng.choice([1, 1, 1, 2, 3])
        story: list[list[Any]] = []
        for _ in range(kills):
            first = max(1, self.events - LAST_EVENTS) if rng.random() < 0.25 else 1
            at, half, power = rng.randint(first, self.events), rng.random() < 0.5, rng.random() < 0.5
            code = self.child(Killer(at, half, power, rng.randrange(1 << 30)))
            story.append([at, half, power, code])
            if code not in (0, 9):
                break
        code = self.child(None)
        problem = None
        if code != 0 or any(step[3] not in (0, 9) for step in story):
            problem = f"resuming ended with {code}"
        elif (found := tree(self.out)) != self.wanted:
            names = sorted(name for name in {*found, *self.wanted} if found.get(name) != self.wanted.get(name))
            problem = f"differs in {names}"
        elif tree(self.place / "source", *self.request.sources[1:]) != self.source_tree:
            problem = "the source has changed"
        return {"story": story, "problem": problem, "killed": sum(step[3] == 9 for step in story)}


def small_units() -> None:
    """Blocks, commits and open files in the model's proportions, so that a tiny run has a large run's course."""
    write.COMMIT_BYTES = 40_000
    write.OPEN_FILES_MAX = 2
    jobs.BLOCK_BYTES = 16384
    vars(assemble)["OUTPUT_BYTES"] = 8192


def points(place: Path, name: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Run `count` seeded points of one configuration."""
    bench = Bench(place, CONFIGURATIONS[name])
    for number in range(count):
        rng = random.Random(f"{name}/{seed}/{number}")
        yield {"configuration": name, "seed": seed, "number": number, "events": bench.events, **bench.point(rng)}


def main() -> None:
    """Parse, run, print."""
    place, names, seed, count = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), int(sys.argv[4])
    for name in names:
        for result in points(place / name, name, seed, count):
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
