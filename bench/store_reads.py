"""Cold reads: through a daemon against a plain O_DIRECT loop over the same bytes; and two drives with shares."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from serving import Daemon

from k3.base.direct_io import ReadFile
from k3.container.layout import DIGEST_BYTES, pack_piece
from k3.container.reader import Container
from k3.model.keys import Extent
from k3.store.client.socket_link import Link
from k3.store.protocol.native import NativeRing, NativeServer, ServerSettings, slot_bytes_for
from k3.store.protocol.ring_layout import Op, Source, Status

READ_BYTES = 4 << 20
DEPTH = 4
WINDOW = 6  # experts asked for at once
PAGE_BYTES = 4096

Key = tuple[int, int]
Turn = Callable[[Sequence[Key]], tuple[float, float]]
"""Reads experts in this order; seconds, and CPU seconds."""


def all_keys(container: Container) -> list[Key]:
    """Every expert, as (layer, expert)."""
    return [
        (layer, expert) for layer in container.expert_layers() for expert in range(container.expert_count(layer))
    ]


def is_direct(container: Container) -> bool:
    """Return whether O_DIRECT works on every file that holds experts, and drop what the page cache has of them."""
    paths = {extent.path for key in all_keys(container) for extent in container.expert_extents(*key)}
    works = True
    for path in paths:
        with ReadFile(path) as file:
            works &= file.direct
            file.drop_cache()
    return works


class RawLoop:
    """raw_reads.c, compiled and running: on each root DEPTH threads that do nothing but pread."""

    def __init__(self, container: Container, direct: bool, *, huge: bool) -> None:
        self._container = container
        self._folder = tempfile.TemporaryDirectory(prefix="k3-bench-")
        program = Path(self._folder.name) / "raw_reads"
        source = Path(__file__).with_name("raw_reads.c")
        subprocess.run(["cc", "-O2", "-pthread", "-o", program, source], check=True)
        extents = (extent for key in all_keys(container) for extent in container.expert_extents(*key))
        roots = dict.fromkeys(extent_root(container, extent) for extent in extents)
        self._roots = {directory: number for number, directory in enumerate(roots)}
        self._files: dict[Path, int] = {}
        options = [str(DEPTH), str(len(self._roots)), str(int(direct)), str(int(huge))]
        self._process = subprocess.Popen(
            [program, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def turn(self, keys: Sequence[Key]) -> tuple[float, float]:
        """Read experts in this order, in the daemon's chunks. Seconds, and CPU seconds of all threads."""
        lines = []
        for key in keys:
            for extent in self._container.expert_extents(*key):
                if extent.path not in self._files:
                    self._files[extent.path] = len(self._files)
                    lines.append(f"file {extent.path}")
                root, file = self._roots[extent_root(self._container, extent)], self._files[extent.path]
                for at in range(0, extent.stored_bytes, READ_BYTES):
                    nbytes = min(READ_BYTES, extent.stored_bytes - at)
                    lines.append(f"read {root} {file} {extent.offset + at} {nbytes}")
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n".join([*lines, "go", ""]))
        self._process.stdin.flush()
        took_s, cpu_s = map(float, self._process.stdout.readline().split())
        return took_s, cpu_s

    def __enter__(self) -> RawLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        self._folder.cleanup()


def extent_root(container: Container, extent: Extent) -> Path:
    """Return the root that an extent's file lies in."""
    return next(root.directory for root in container.roots if extent.path.is_relative_to(root.directory))


def lease_all(ring: NativeRing, keys: Sequence[Key]) -> int:
    """Lease experts in this order, WINDOW at a time, and give each back as it comes; their bytes."""
    waiting = iter(keys)
    outstanding = read_bytes = 0

    def ask() -> int:
        key = next(waiting, None)
        return 0 if key is None else ring.submit(0, Op.LEASE, key[0], [key[1]])

    outstanding += sum(ask() for _ in range(WINDOW))
    while outstanding:
        ring.wait(60.0)
        for completion in ring.poll():
            assert completion.status == Status.OK, completion.status
            assert completion.source != Source.ARENA, "this was no cold read"
            read_bytes += completion.payload_bytes
            ring.release([completion.slot], [completion.generation])
            outstanding += ask() - 1
    return read_bytes


def cold_rounds(
    container: Container, directories: Sequence[Path], rounds: int, seed: int, direct: bool
) -> Iterator[dict[str, float]]:
    """Every expert once a round: in turns by the plain loop and through one daemon that was just started.

    Turns are long, so that what counts is the steady state and not how one begins and ends, and the two change
    places within a round and from round to round, since a drive's rate wanders. Each reads what the other read in
    the round before: the daemon's cache, smaller than a turn, has nothing of it.
    """
    slot_bytes = slot_bytes_for(container.expert_layout(container.expert_layers()[0]).payload_bytes)
    cache_gb = f"{(3 * WINDOW + 2) * slot_bytes / 1e9:.9f}"
    options = ("--cache-gb", cache_gb, "--max-clients", "1", "--quota", str(WINDOW + 2), "--io-depth", str(DEPTH))
    with Daemon(directories, *options) as daemon, RawLoop(container, direct, huge=True) as loop:
        link = Link.open(daemon.socket, "bench")

        def lease(keys: Sequence[Key]) -> tuple[float, float]:
            began_s, began_cpu_s, before = time.perf_counter(), daemon.cpu_s(), daemon.read_bytes()
            lease_all(link.ring, keys)
            took_s = time.perf_counter() - began_s
            assert daemon.read_bytes() - before == stored_bytes(container, keys)
            return took_s, daemon.cpu_s() - began_cpu_s

        for rates in in_turns(container, {"raw": loop.turn, "daemon": lease}, rounds, seed):
            yield {"cold_ratio": rates["daemon_gb_per_s"] / rates["raw_gb_per_s"], **rates}
        link.close()


def page_rounds(container: Container, rounds: int, seed: int, direct: bool) -> Iterator[dict[str, float]]:
    """Measure the plain loop with buffers in huge pages against the same with small ones."""
    with RawLoop(container, direct, huge=True) as huge, RawLoop(container, direct, huge=False) as small:
        for rates in in_turns(container, {"raw": huge.turn, "raw_small": small.turn}, rounds, seed):
            yield {"small_pages_ratio": rates["raw_small_gb_per_s"] / rates["raw_gb_per_s"], **rates}


def in_turns(container: Container, ways: dict[str, Turn], rounds: int, seed: int) -> Iterator[dict[str, float]]:
    """GB/s and CPU seconds per GB of two ways to read, each of them given half of the experts in each round."""
    keys = [tuple(key) for key in np.random.default_rng(seed).permutation(all_keys(container)).tolist()]
    blocks = [keys[at::4] for at in range(4)]
    first, second = ways
    for number in range(rounds):
        order = (first, second, second, first) if number % 2 == 0 else (second, first, first, second)
        found = {}
        for way in ways:
            found[way] = np.zeros(3)
        for way, block in zip(order, blocks, strict=True):
            took_s, cpu_s = ways[way](block)
            found[way] += (stored_bytes(container, block) / 1e9, took_s, cpu_s)
        yield {f"{way}_gb_per_s": float(gb / took_s) for way, (gb, took_s, _) in found.items()} | {
            f"{way}_cpu_s_per_gb": float(cpu_s / gb) for way, (gb, _, cpu_s) in found.items()
        }


def stored_bytes(container: Container, keys: Sequence[Key]) -> int:
    """Return what is read of the drives for these experts."""
    return sum(extent.stored_bytes for key in keys for extent in container.expert_extents(*key))


def shares_round(folder: Path, experts: int, expert_bytes: int, rates: tuple[int, int]) -> dict[str, float]:
    """Experts divided 7:3 over two simulated drives of these rates, against all of them on the faster one.

    The files are holes: what is measured is the division and the queues, not the drive below.
    """
    pages = expert_bytes // PAGE_BYTES
    first = pages * 7 // 10 * PAGE_BYTES
    both = _served(folder, experts, [first, expert_bytes - first], rates)
    alone = _served(folder, experts, [expert_bytes], rates[:1])
    return {
        "shares_finish_ratio": min(both) / max(both),
        "shares_speedup": max(alone) / max(both),
    }


def _served(folder: Path, experts: int, pieces: list[int], rates: Sequence[int]) -> list[float]:
    """Seconds that each drive worked until all experts were read."""
    settings = ServerSettings(
        slot_bytes=slot_bytes_for(sum(pieces)), slots=WINDOW + 2, max_clients=1, quota=WINDOW + 2, verify="never",
        policy="lru", io_depth=DEPTH,
    )  # fmt: skip
    with NativeServer(settings) as server:
        for root, piece in enumerate(pieces):
            path = folder / f"shares.{root}"
            path.touch()
            os.truncate(path, piece * experts)
            server.add_file(root, path, direct=False)
        records = b"".join(
            pack_piece(root, n * piece, piece, piece, bytes(DIGEST_BYTES))
            for n in range(experts)
            for root, piece in enumerate(pieces)
        )
        server.set_layer(0, sum(pieces), [len(pieces)] * experts, records)
        server.start()
        for root, rate in enumerate(rates):
            server.throttle(root, rate)
        grant = server.add_client("bench")
        ring = NativeRing(
            grant.ring_fd, server.arena_fd, server.arena_bytes, grant.request_doorbell, grant.completion_doorbell
        )
        lease_all(ring, [(0, n) for n in range(experts)])
        worked_s = [drive["busy_ns"] / 1e9 for drive in server.stats()["roots"]]
        ring.close()
        grant.close()
    for root in range(len(pieces)):
        (folder / f"shares.{root}").unlink()
    return worked_s
