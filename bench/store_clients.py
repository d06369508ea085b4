"""Clients of a daemon: how long a cached lease takes, what many of them read, how soon a second engine speaks."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from serving import Daemon

from k3.container.reader import Container
from k3.store.client.daemon_source import DaemonSource
from k3.store.client.socket_link import Link
from k3.store.protocol.native import slot_bytes_for
from k3.store.protocol.ring_layout import Op, Source

PROMPT = "1,2,3"


def latency_round(daemon: Daemon, layer: int, count: int, rounds: int) -> dict[str, float]:
    """Microseconds from asking for a cached set until all of it is there, views of the bytes included."""
    experts = list(range(count))
    link = Link.open(daemon.socket, "bench ring")
    source = DaemonSource(daemon.socket, name="bench source")
    ring = link.ring

    def by_ring() -> float:
        began_s = time.perf_counter()
        ring.submit(1, Op.LEASE, layer, experts)
        granted = ring.poll()
        while len(granted) < count:
            ring.wait()
            granted += ring.poll()
        views = [link.arena[c.offset : c.offset + c.payload_bytes] for c in granted]
        took_s = time.perf_counter() - began_s
        assert len(views) == count
        assert all(c.status == 0 and c.source == Source.ARENA for c in granted)
        ring.release([c.slot for c in granted], [c.generation for c in granted])
        return took_s

    def by_source() -> float:
        began_s = time.perf_counter()
        leases = list(source.lease(layer, experts))
        views = [lease.payload for lease in leases]
        took_s = time.perf_counter() - began_s
        assert len(views) == count
        for lease in leases:
            lease.release()
        return took_s

    for lease in source.lease(layer, experts):  # from here on all of it is in RAM
        lease.release()
    found: dict[str, float] = {}
    for name, step in (("ring", by_ring), ("source", by_source)):
        for _ in range(min(rounds, 200)):
            step()
        p50, p99 = np.percentile([1e6 * step() for _ in range(rounds)], [50, 99])
        found |= {f"{name}_p50_us": float(p50), f"{name}_p99_us": float(p99)}
    found |= {f"wake_{name}_us": value for name, value in zip(("p50", "p99"), wake_up_us(rounds), strict=True)}
    source.close()
    link.close()
    return found


def wake_up_us(rounds: int) -> tuple[float, float]:
    """p50 and p99 of a byte to another, sleeping process and back: what the machine allows at this moment."""
    echo = "import os\nwhile os.write(1, os.read(0, 1)): pass"
    with subprocess.Popen(
        [sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        times_us = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            child.stdin.write(b"x")
            child.stdout.read(1)
            times_us.append(1e6 * (time.perf_counter() - began_s))
        child.kill()
    p50, p99 = np.percentile(times_us, [50, 99])
    return float(p50), float(p99)


def sharing(
    container: Container,
    directories: Sequence[Path],
    clients: Sequence[int],
    tokens: int,
    picked: int,
    lags: Sequence[float] = (),
) -> dict[str, float]:
    """Bytes that 1, 2, ... clients read from the drives for the same trace, as a share of one client's.

    The cache holds half of the experts. All clients start together; then, for each of `lags`, two of them, the
    second when the first has had that part of the time that one alone takes.
    """
    layers = container.expert_layers()
    experts = sum(container.expert_count(layer) for layer in layers)
    picked = min(picked, *(container.expert_count(layer) for layer in layers))
    most = max(clients)
    slots = max(most * picked + 4, experts // 2)
    slot_bytes = slot_bytes_for(container.expert_layout(layers[0]).payload_bytes)
    cache_gb = slots * slot_bytes / 1e9
    answers: set[str] = set()

    def replays(count: int, delay_s: float = 0.0) -> tuple[int, float]:
        """Bytes read, and seconds until the last client was done."""
        options = ("--cache-gb", f"{cache_gb:.9f}", "--max-clients", str(most), "--quota", str(picked))
        with Daemon(directories, *options) as daemon:
            job = {"socket": str(daemon.socket), "tokens": tokens, "picked": picked}
            job |= {"layers": {layer: container.expert_count(layer) for layer in layers}}
            command = [sys.executable, __file__, json.dumps(job)]
            processes = [
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                for _ in range(count)
            ]
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            began_s = time.perf_counter()
            for number, process in enumerate(processes):
                assert process.stdin is not None
                time.sleep(max(0.0, began_s + number * delay_s - time.perf_counter()))
                process.stdin.write("go\n")
                process.stdin.flush()
            answers.update(process.communicate()[0] for process in processes)
            took_s = time.perf_counter() - began_s
            assert all(process.returncode == 0 for process in processes)
            return daemon.read_bytes(), took_s

    alone_bytes, alone_s = replays(1)
    found = {"one_client_read_gb": alone_bytes / 1e9, "one_client_s": alone_s}
    for count in clients:
        if count > 1:
            found[f"read_share_{count}_clients"] = replays(count)[0] / alone_bytes
    for lag in lags:
        found[f"read_share_lag_{lag:g}"] = replays(2, lag * alone_s)[0] / alone_bytes
    assert len(answers) == 1, f"clients saw different bytes: {answers}"
    return found


def replay(job: dict[str, object]) -> None:
    """One client: the trace is a popular few and a long tail, the same in every process."""
    socket, tokens, picked, layers = (job[key] for key in ("socket", "tokens", "picked", "layers"))
    assert isinstance(socket, str)
    assert isinstance(tokens, int)
    assert isinstance(picked, int)
    assert isinstance(layers, dict)
    source = DaemonSource(Path(socket), name="bench replay")
    print("ready", flush=True)
    sys.stdin.readline()
    random = np.random.default_rng(0)
    digest = hashlib.sha256()
    for _ in range(tokens):
        for layer, experts in layers.items():
            weights = 1 / np.arange(1, experts + 1) ** 0.8
            chosen = random.choice(experts, picked, replace=False, p=weights / weights.sum()).tolist()
            seen = {}
            for lease in source.lease(int(layer), chosen):
                with lease:
                    seen[lease.expert] = lease.payload[::4099].tobytes()
            for expert in sorted(seen):
                digest.update(seen[expert])
    source.close()
    print(digest.hexdigest())


def start_round(directories: Sequence[Path], home: Path, daemon: Daemon) -> dict[str, float]:
    """Seconds from the start of k3-run to its first token: on a daemon that serves already, and from the files."""
    dirs = ",".join(map(str, directories))
    tokens: set[int] = set()

    def run(*options: str) -> float:
        command = [sys.executable, "-c", "from k3.engine.cli import main; main()"]
        command += ["--ids", PROMPT, "--ngen", "1", "--json", *options]
        began_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if message["type"] == "token":
                took_s = time.perf_counter() - began_s
                tokens.add(message["id"])
                break
        else:
            raise SystemExit(f"k3-run {' '.join(options)} said no token: {process.communicate()[1]}")
        process.communicate()
        return took_s

    through, files = ("--store", str(daemon.socket)), ("--container", str(home), "--dirs", dirs)
    steps: dict[str, Callable[[], float]] = {
        "start_store_s": lambda: run(*through), "start_files_s": lambda: run(*files),
    }  # fmt: skip
    found = {name: step() for name, step in steps.items()}
    assert len(tokens) == 1, f"two ways, two answers: {tokens}"
    return found | {"start_ratio": found["start_store_s"] / found["start_files_s"]}


if __name__ == "__main__":
    replay(json.loads(sys.argv[1]))
