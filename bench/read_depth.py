"""Cold reads of K3-sized experts through the data plane, by the number of reads in progress at once.

    python bench/read_depth.py FOLDER [--experts 40] [--rounds 5] [--depths 1,2,4,8,16]

Writes one file of experts (17,547,264 bytes each) into FOLDER, which must be on the drive in question, and reads
all of them in random order: reads of 4 MiB, O_DIRECT, digests off. The data plane and a plain loop of os.preadv
threads at the same depth take turns within a round; the table has the median over the rounds of GB/s and of CPU
seconds (this whole process, reading threads included) per GB. Both read into huge pages. Refuses to report
numbers when the file cannot be read with O_DIRECT, or when the arena is not in huge pages for the most part.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import struct
import threading
import time
from pathlib import Path

import numpy as np

from k3.base.direct_io import ReadFile
from k3.base.page_buffers import huge_buffer, populate
from k3.store.protocol.native import NativeRing, NativeServer, ServerSettings, slot_bytes_for
from k3.store.protocol.ring_layout import Op

EXPERT_BYTES = 17_547_264
READ_BYTES = 4 << 20
WINDOW = 6  # experts asked for at once


def main() -> None:
    """Print a row and a JSON line for each depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depths", default="1,2,4,8,16")
    options = parser.parse_args()
    path = options.folder / "read_depth.experts"
    depths = [int(depth) for depth in options.depths.split(",")]
    try:
        write(path, options.experts)
        with ReadFile(path) as probe:
            if not probe.direct:
                raise SystemExit(f"{path} cannot be read with O_DIRECT: there is nothing to measure")
            probe.drop_cache()
        report(path, options.experts, options.rounds, depths)
    finally:
        path.unlink(missing_ok=True)


def write(path: Path, experts: int) -> None:
    """Write a file of experts."""
    block = os.urandom(EXPERT_BYTES)
    with open(path, "wb") as file:
        for _ in range(experts):
            file.write(block)
        os.fsync(file.fileno())


def report(path: Path, experts: int, rounds: int, depths: list[int]) -> None:
    """Measure every depth in turn."""
    print(f"GB/s and CPU s/GB, median of {rounds}")
    print(f"{'depth':>5}  {'plain loop':>17}  {'data plane':>17}")
    for depth in depths:
        rates: dict[str, list[float]] = {"plain": [], "plane": []}
        cpus: dict[str, list[float]] = {name: [] for name in rates}
        for number in range(rounds):
            order = np.random.default_rng(number).permutation(experts).tolist()
            for name in np.random.default_rng(1000 + number).permutation(list(rates)).tolist():
                meter = Meter()
                if name == "plain":
                    plain(path, order, depth, meter)
                else:
                    served(path, order, depth, meter)
                gb = experts * EXPERT_BYTES / 1e9
                rates[name].append(gb / meter.took_s)
                cpus[name].append(meter.cpu_s / gb)
        cells = [f"{statistics.median(rates[n]):8.2f} {statistics.median(cpus[n]):8.3f}" for n in rates]
        print(f"{depth:5}  " + "  ".join(cells), flush=True)
        print(json.dumps({"depth": depth, "gb_per_s": rates, "cpu_s_per_gb": cpus}), flush=True)


class Meter:
    """Time and CPU time of this process inside a with block."""

    def __enter__(self) -> None:
        self._began, self._began_cpu = time.perf_counter(), self._cpu()

    def __exit__(self, *_: object) -> None:
        self.took_s, self.cpu_s = time.perf_counter() - self._began, self._cpu() - self._began_cpu

    @staticmethod
    def _cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime


def served(path: Path, order: list[int], depth: int, meter: Meter) -> None:
    """Lease all experts once."""
    settings = ServerSettings(
        slot_bytes=slot_bytes_for(EXPERT_BYTES), slots=WINDOW + 2, max_clients=1, quota=WINDOW + 2,
        io_depth=depth, verify="never", policy="lru",
    )  # fmt: skip
    record = struct.Struct("<IIQQQ16s")
    with NativeServer(settings) as server:
        server.add_file(0, path, direct=True)
        records = b"".join(
            record.pack(0, 0, n * EXPERT_BYTES, EXPERT_BYTES, EXPERT_BYTES, b"") for n in range(len(order))
        )
        server.set_layer(0, EXPERT_BYTES, [1] * len(order), records)
        server.start()
        assert server.arena_huge_bytes > 0.9 * server.arena_bytes, "no huge pages to be had just now"
        grant = server.add_client("bench")
        ring = NativeRing(
            grant.ring_fd, server.arena_fd, server.arena_bytes, grant.request_doorbell, grant.completion_doorbell
        )
        with meter:
            drive(ring, order)
        ring.close()
        grant.close()


def drive(ring: NativeRing, order: list[int]) -> None:
    """Lease experts in this order, WINDOW at a time, and give each back as it comes."""
    ring.submit(0, Op.LEASE, 0, order[:WINDOW])
    asked, done = min(WINDOW, len(order)), 0
    while done < len(order):
        ring.wait()
        for completion in ring.poll():
            assert completion.status == 0
            ring.release([completion.slot], [completion.generation])
            done += 1
            if asked < len(order):
                ring.submit(0, Op.LEASE, 0, [order[asked]])
                asked += 1


def plain(path: Path, order: list[int], depth: int, meter: Meter) -> None:
    """Read all experts once with `depth` threads that do nothing else."""
    chunks = [
        (expert * EXPERT_BYTES + at, min(READ_BYTES, EXPERT_BYTES - at))
        for expert in order
        for at in range(0, EXPERT_BYTES, READ_BYTES)
    ]
    todo = iter(chunks)
    lock = threading.Lock()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def work() -> None:
        buffer = huge_buffer(READ_BYTES)
        populate(buffer)
        begin.wait()
        while True:
            with lock:
                chunk = next(todo, None)
            if chunk is None:
                return
            assert os.preadv(descriptor, [buffer[: chunk[1]].data], chunk[0]) == chunk[1]

    begin = threading.Barrier(depth + 1)
    threads = [threading.Thread(target=work) for _ in range(depth)]
    for thread in threads:
        thread.start()
    begin.wait()
    with meter:
        for thread in threads:
            thread.join()
    os.close(descriptor)


if __name__ == "__main__":
    main()
