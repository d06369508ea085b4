"""Round trip of leases that are in RAM already: a set of 16 asked for and granted, from another process.

    python bench/lease_latency.py [--rounds 20000] [--set 16] [--pause-us 0]

Prints p50, p90, p99 and the maximum in microseconds: the whole round trip as the client sees it (submit, wait,
take all completions; releases are not waited for), and the same with a view made of every payload. Ceiling: two
wake-ups of a sleeping process, which is printed beside it (an eventfd ping-pong between two processes).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from k3.store.protocol.native import NativeRing, NativeServer, ServerSettings, slot_bytes_for
from k3.store.protocol.ring_layout import Op

PAYLOAD_BYTES = 64 << 10  # what is in a slot does not matter to a hit


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--set", type=int, default=16, dest="count")
    parser.add_argument("--pause-us", type=float, default=0, help="time between rounds: the daemon falls asleep")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(json.loads(options.client))
        return
    with tempfile.TemporaryDirectory() as folder:
        serve(Path(folder), options)


def serve(folder: Path, options: argparse.Namespace) -> None:
    """Serve experts of a file to client processes, and print what they measured."""
    path = folder / "experts"
    payload = os.urandom(PAYLOAD_BYTES)
    path.write_bytes(payload)
    record = np.zeros(1, dtype="<u4,<u4,<u8,<u8,<u8,S16")
    record[0] = (0, 0, 0, PAYLOAD_BYTES, PAYLOAD_BYTES, b"")
    packed = record.tobytes()[:32] + xxhash.xxh3_128_digest(payload)
    settings = ServerSettings(
        slot_bytes=slot_bytes_for(PAYLOAD_BYTES), slots=4 * options.count, max_clients=1, quota=2 * options.count,
    )  # fmt: skip
    with NativeServer(settings) as server:
        server.add_file(0, path, direct=False)
        server.set_layer(0, PAYLOAD_BYTES, [1] * options.count, packed * options.count)
        server.start()
        grant = server.add_client("latency")
        fds = (grant.ring_fd, server.arena_fd, grant.request_doorbell, grant.completion_doorbell)
        job = {
            "fds": fds, "arena_bytes": server.arena_bytes, "rounds": options.rounds, "count": options.count,
            "pause_s": options.pause_us / 1e6,
        }  # fmt: skip
        command = [sys.executable, __file__, "--client", json.dumps(job)]
        subprocess.run(command, pass_fds=fds, check=True)
        grant.close()
    print("eventfd ping-pong of two processes:", shown(ping_pong(5000)))


def client(job: dict[str, Any]) -> None:
    """Lease sets of experts, over and over, and print the times in microseconds."""
    ring_fd, arena_fd, request, completion = job["fds"]
    ring = NativeRing(ring_fd, arena_fd, job["arena_bytes"], request, completion)
    rounds, count, pause_s = job["rounds"], job["count"], job["pause_s"]
    for views in (False, True):
        times_us = []
        for _ in range(rounds + 100):
            if pause_s:
                time.sleep(pause_s)
            times_us.append(1e6 * round_trip(ring, count, views))
        print(f"{count} leases{', with views' if views else '':12}", shown(times_us[100:]))


def round_trip(ring: NativeRing, count: int, views: bool) -> float:
    """Return the seconds from asking for a set of `count` experts to holding all of them."""
    experts = list(range(count))
    began = time.perf_counter()
    ring.submit(1, Op.LEASE, 0, experts)
    granted = ring.poll()
    while len(granted) < count:
        ring.wait()
        granted += ring.poll()
    if views:
        payloads = [ring.payload(c.offset, c.payload_bytes) for c in granted]
        assert len(payloads) == count
    took = time.perf_counter() - began
    assert all(c.status == 0 for c in granted)
    ring.release([c.slot for c in granted], [c.generation for c in granted])
    return took


def ping_pong(rounds: int) -> list[float]:
    """Microseconds from one process to another and back, both sleeping, by eventfds."""
    there, back = os.eventfd(0), os.eventfd(0)
    child = os.fork()
    if child == 0:
        for _ in range(rounds):
            os.eventfd_read(there)
            os.eventfd_write(back, 1)
        os._exit(0)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        os.eventfd_write(there, 1)
        os.eventfd_read(back)
        times.append(1e6 * (time.perf_counter() - began))
    os.waitpid(child, 0)
    return times


def shown(times_us: list[float]) -> str:
    """Return percentiles of times, as text."""
    p50, p90, p99 = np.percentile(times_us, [50, 90, 99])
    return f"p50 {p50:.1f}  p90 {p90:.1f}  p99 {p99:.1f}  max {max(times_us):.0f} us"


if __name__ == "__main__":
    main()
