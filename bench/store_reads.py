"""Cold reads: through a daemon against a plain O_DIRECT loop over the same bytes; and two drives with shares."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from serving import Daemon

from k3.container.direct import ReadFile
from k3.container.layout import DIGEST_BYTES, pack_piece
from k3.container.reader import Container
from k3.store.link import Link
from k3.store.native import NativeRing, NativeServer, ServerSettings, slot_bytes_for
from k3.store.ring_layout import Op, Source, Status

CHUNK_BYTES = 4 << 20
DEPTH = 4
WINDOW = 6  # experts asked for at once
BLOCK_EXPERTS = 12
PAGE_BYTES = 4096

Key = tuple[int, int]


def all_keys(container: Container) -> list[Key]:
    """Every expert, as (layer, expert)."""
    return [
        (layer, expert) for layer in container.expert_layers() for expert in range(container.expert_count(layer))
    ]


def is_direct(container: Container) -> bool:
    """Whether O_DIRECT works on every file that holds experts; drops what the page cache has of them."""
    paths = {extent.path for key in all_keys(container) for extent in container.expert_extents(*key)}
    works = True
    for path in paths:
        with ReadFile(path) as file:
            works &= file.direct
            file.drop_cache()
    return works


def raw_read(container: Container, keys: Sequence[Key], direct: bool) -> float:
    """Seconds to read the experts in this order: on each root DEPTH threads that do nothing but pread."""
    queues: dict[Path, list[tuple[Path, int, int]]] = {}
    for key in keys:
        for extent in container.expert_extents(*key):
            root = next(r.directory for r in container.roots if extent.path.is_relative_to(r.directory))
            for at in range(0, extent.stored_bytes, CHUNK_BYTES):
                part = (extent.path, extent.offset + at, min(CHUNK_BYTES, extent.stored_bytes - at))
                queues.setdefault(root, []).append(part)
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    files = {path: os.open(path, flags) for queue in queues.values() for path, _, _ in queue}
    failures: list[BaseException] = []

    def work(todo: Iterator[tuple[Path, int, int]], lock: threading.Lock, buffer: mmap.mmap) -> None:
        try:
            while True:
                with lock:
                    part = next(todo, None)
                if part is None:
                    return
                path, offset, nbytes = part
                with memoryview(buffer) as view, view[:nbytes] as target:
                    assert os.preadv(files[path], [target], offset) == nbytes
        except BaseException as error:
            failures.append(error)

    threads = []
    for queue in queues.values():
        shared = (iter(queue), threading.Lock())
        for _ in range(DEPTH):
            buffer = mmap.mmap(-1, CHUNK_BYTES)
            buffer[::PAGE_BYTES] = b"\0" * (CHUNK_BYTES // PAGE_BYTES)
            threads.append(threading.Thread(target=work, args=(*shared, buffer)))
    took_s = timed(threads)
    for descriptor in files.values():
        os.close(descriptor)
    if failures:
        raise failures[0]
    return took_s


def timed(threads: Sequence[threading.Thread]) -> float:
    """Seconds from the first start to the last end."""
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began_s


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


def cold_round(container: Container, directories: Sequence[Path], seed: int, direct: bool) -> dict[str, float]:
    """Every expert once: in blocks, in turns through a daemon that was just started and by the plain loop.

    Each way reads bytes of its own, since below a virtual machine's drive there may be one more cache; turns are
    short, since such a drive's rate wanders.
    """
    keys = [tuple(key) for key in np.random.default_rng(seed).permutation(all_keys(container)).tolist()]
    blocks = [keys[at : at + BLOCK_EXPERTS] for at in range(0, len(keys), BLOCK_EXPERTS)]
    blocks = blocks[: max(2, len(blocks) // 4 * 4)]  # as many turns for each way, each first as often as second
    slot_bytes = slot_bytes_for(container.expert_layout(keys[0][0]).payload_bytes)
    options = ("--max-clients", "1", "--quota", str(WINDOW + 2), "--io-depth", str(DEPTH))
    gb, seconds = {"raw": 0.0, "daemon": 0.0}, {"raw": 0.0, "daemon": 0.0}
    with Daemon(directories, "--cache-gb", f"{(3 * WINDOW + 2) * slot_bytes / 1e9:.9f}", *options) as daemon:
        link = Link.open(daemon.socket, "bench")
        cpu_s, read_bytes = daemon.cpu_s(), daemon.read_bytes()
        for turn, block in enumerate(blocks):
            way = ("raw", "daemon", "daemon", "raw")[(turn + seed) % 4]
            if way == "raw":
                took_s = raw_read(container, block, direct)
            else:
                began_s = time.perf_counter()
                lease_all(link.ring, block)
                took_s = time.perf_counter() - began_s
            seconds[way] += took_s
            gb[way] += sum(e.stored_bytes for key in block for e in container.expert_extents(*key)) / 1e9
        cpu_s, read_bytes = daemon.cpu_s() - cpu_s, daemon.read_bytes() - read_bytes
        assert read_bytes == round(gb["daemon"] * 1e9), (read_bytes, gb)
        link.close()
    rates = {way: gb[way] / seconds[way] for way in gb}
    return {
        "cold_ratio": rates["daemon"] / rates["raw"],
        "raw_gb_per_s": rates["raw"],
        "daemon_gb_per_s": rates["daemon"],
        "daemon_cpu_s_per_gb": cpu_s / gb["daemon"],
    }


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
