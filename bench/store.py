"""The costs and savings of k3-store, against what the machine does without it.

    python bench/store.py --work DIR [--rounds 5] [--experts 48]
    python bench/store.py --container HOME[,ROOT...] [--work DIR]

Makes a slice of K3 in real dimensions in DIR (or takes a container), then measures, all through a daemon in a
process of its own, with digests checked:

  cold reads    half of the experts from a daemon that was just started, the others by a plain loop in C, in turns:
                O_DIRECT, the same sizes, files and depth, warm buffers in huge pages    goal: ratio >= 0.95
  CPU           of the daemon for each GB read that way, and of the plain loop
  pages         the plain loop with buffers in pages of 4 KiB, against the one with huge pages
  latency       a set of 16 cached experts: through the ring, and through DaemonSource; beside a byte to another
                process and back                                       goal: p50 <= 30 us, p99 <= 200 us
  sharing       bytes read from the drives by 2, 4, 8 clients on one trace, of one client's  goal: within 5 %
                the same by 2, when the second is late by a part of one client's time: no goal, since the cache
                holds half of the experts
  shares        two simulated drives of 7:3 with shares 7:3: how far apart they finish      goal: within 5 %
  start         k3-run on the daemon until its first token, against k3-run on the files         goal: < 1 s

Drives and machines are noisy, so only ratios within a round mean something; the medians over the rounds are
printed, and everything as one JSON line with the load of the machine. `--tiny` proves that all of it still runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from serving import Daemon
from store_clients import latency_round, sharing, start_round
from store_reads import cold_rounds, is_direct, page_rounds, shares_round

from k3.container.reader import Container
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot

COLD_ROUNDS = 4
"""Rounds of cold reads through one daemon; then another is started."""

MEASUREMENTS = ("cold", "pages", "latency", "sharing", "shares", "start")


def main() -> None:
    """Run the benchmark and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="a directory on the drive to measure")
    parser.add_argument("--container", help="a container's home and other roots, separated by commas")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="some of: " + ", ".join(MEASUREMENTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=48)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=40, help="length of the trace of the sharing measurement")
    parser.add_argument("--tiny", action="store_true", help="a model of kilobytes, one round: does it still run?")
    parser.add_argument("--keep", action="store_true", help="leave the slice for the next run")
    arguments = parser.parse_args()
    if arguments.work is None and arguments.container is None:
        parser.error("where? Give --work or --container")
    wanted = arguments.only.split(",")
    if not set(wanted) <= set(MEASUREMENTS):
        parser.error(f"--only takes {', '.join(MEASUREMENTS)}")
    if arguments.container is not None:
        directories = [Path(name) for name in arguments.container.split(",")]
        measure(directories, wanted, arguments)
        return
    home = arguments.work / "container"
    try:
        make_slice(arguments.work / "slice", home, arguments)
        measure([home], wanted, arguments)
    finally:
        if not arguments.keep:
            shutil.rmtree(home, ignore_errors=True)
            shutil.rmtree(arguments.work / "slice", ignore_errors=True)


def make_slice(source: Path, home: Path, arguments: argparse.Namespace) -> None:
    """Return a container of our own making, unless it is there already."""
    if home.exists():
        return
    print(f"making a slice in {home}", file=sys.stderr)
    if arguments.tiny:
        model = SyntheticModel.tiny()
    else:
        model = SyntheticModel.real_slice(arguments.layers, arguments.experts, arguments.vocab)
    if not source.exists():
        write_snapshot(model, source)
    command = [sys.executable, "-m", "k3.repack.cli", str(source), str(home), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(directories: list[Path], wanted: list[str], arguments: argparse.Namespace) -> None:
    """All rounds of everything that is wanted, then the report."""
    tiny = arguments.tiny
    rounds = 1 if tiny else arguments.rounds
    load_before = os.getloadavg()
    found: dict[str, list[float]] = {}

    def note(figures: dict[str, float]) -> None:
        print(json.dumps({key: round(value, 4) for key, value in figures.items()}), file=sys.stderr)
        for key, value in figures.items():
            found.setdefault(key, []).append(value)

    container = Container.open(directories[0], directories)
    with contextlib.closing(container), tempfile.TemporaryDirectory() as scratch:
        direct = is_direct(container)
        if not direct and not tiny:
            raise SystemExit("O_DIRECT does not work here: this would measure the page cache")
        layer = container.expert_layers()[0]
        count = min(16, container.expert_count(layer))
        if "cold" in wanted:
            for seed in range(0, rounds, COLD_ROUNDS):
                for figures in cold_rounds(container, directories, min(COLD_ROUNDS, rounds - seed), seed, direct):
                    note(figures)
        if "pages" in wanted:
            for figures in page_rounds(container, rounds, 0, direct):
                note(figures)
        if "shares" in wanted:
            for _ in range(rounds):
                small = (12, 1 << 20, (140_000_000, 60_000_000))
                note(shares_round(Path(scratch), *small if tiny else (60, 17_547_264, (350_000_000, 150_000_000))))
        if "sharing" in wanted:
            clients, lags = ((2,), (0.5,)) if tiny else ((2, 4, 8), (0.05, 0.2, 0.5, 1.0))
            picked = 2 if tiny else 8
            note(sharing(container, directories, clients, 3 if tiny else arguments.tokens, picked, lags))
        if {"latency", "start"} & set(wanted):
            with Daemon(directories, "--max-clients", "4") as daemon:
                for _ in range(rounds if "latency" in wanted else 0):
                    note(latency_round(daemon, layer, count, 50 if tiny else 3000))
                if "start" in wanted:
                    start_round(directories, directories[0], daemon)  # the first engine; it warms the cache
                    for _ in range(rounds):
                        note(start_round(directories, directories[0], daemon))
    report(found, load_before, direct, arguments)


def report(
    found: dict[str, list[float]],
    load_before: tuple[float, float, float],
    direct: bool,
    arguments: argparse.Namespace,
) -> None:
    """Medians as a table, then everything as one JSON line."""
    medians = {key: round(statistics.median(values), 4) for key, values in found.items()}
    for key, value in medians.items():
        print(f"{key:>24}  {value:g}")
    line = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "load": [round(load_before[0], 2), round(os.getloadavg()[0], 2)],
        "direct": direct,
        "tiny": arguments.tiny,
        "medians": medians,
        "rounds": {key: [round(value, 4) for value in values] for key, values in found.items()},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
