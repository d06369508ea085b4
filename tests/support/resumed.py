"""Unfinished repacks to be resumed: a snapshot, a request over two roots, and the tree that must come of it."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from k3.repack import run
from k3.repack.plan import Plan
from k3.repack.repack_request import RepackRequest
from k3.repack.run import RepackResult, Watcher, open_source, plan_for, repack
from tests.support.repacked import tree


class Listener(Watcher):
    """A watcher that keeps notes and items, and interrupts the run when shard `stop` (from 0) begins."""

    def __init__(self, stop: int | None = None) -> None:
        self.notes: list[str] = []
        self.items: list[str] = []
        self.stop = stop

    def note(self, text: str) -> None:
        self.notes.append(text)

    def item(self, name: str) -> None:
        self.items.append(name)
        if self.stop is not None and len(self.items) > self.stop:
            raise KeyboardInterrupt


@dataclass
class Case:
    """A copy of a snapshot, a request over two roots, and the tree that an uninterrupted run makes of it."""

    request: RepackRequest
    wanted: dict[str, str]

    @property
    def source(self) -> Path:
        return self.request.sources[0]

    @property
    def roots(self) -> tuple[Path, ...]:
        return self.request.root_directories()

    def tree(self) -> dict[str, str]:
        return tree(*self.roots)

    def plan(self) -> Plan:
        shares = self.request.root_shares(self.request.shares or (1,))
        return plan_for(self.request, open_source(self.request), shares)

    def finish(self, **changes: Any) -> tuple[RepackResult, Listener]:
        listener = Listener()
        return repack(dataclasses.replace(self.request, **changes), listener), listener

    def finishes_equal(self) -> tuple[RepackResult, Listener]:
        result, listener = self.finish()
        assert self.tree() == self.wanted
        return result, listener


SHARES = (2, 1)
STEPS = ("finish_data_files", "publish")
"""Steps before which `stopped` cases end: all is durable, and data files have not, or have, their final names."""


def request_in(place: Path) -> RepackRequest:
    home, drive = place / "home", place / "drive"
    return RepackRequest(sources=(place / "snapshot",), home=home, drives=(drive, home), shares=SHARES)


def prepared_case(prepared: dict[str, Path], state: str, place: Path) -> Case:
    shutil.copytree(prepared[state], place / "case")
    done = request_in(prepared["done"])
    return Case(request_in(place / "case"), tree(*done.root_directories()))


def stop_after(case: Case, shards: int) -> None:
    """Interrupt a run after that many shards."""
    with pytest.raises(KeyboardInterrupt):
        repack(case.request, Listener(stop=shards))


def stop_before(request: RepackRequest, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Stop a run before one of its last steps."""

    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, step, stop)
        with pytest.raises(KeyboardInterrupt):
            repack(request, Watcher())


def data_file(case: Case, number: int) -> Path:
    """Return the path of a data file of the plan: its final one if that exists, else the partial file's."""
    planned = case.plan().files[number]
    final = case.roots[planned.root] / planned.path
    return final if final.exists() else final.with_name(final.name + ".partial")
