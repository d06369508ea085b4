"""The time of k3-run from exec to its first token, against a drive that only reads the same bytes.

    python bench/cold_start.py --container DIR [--rounds 5] [--ids 5] [--expert-gb 0.6] [--json FILE]

The container should be a slice in real dimensions (bench/repack.py makes one). In every round, in turn:

* raw: the dense file read front to back with plain O_DIRECT reads into a few buffers that are used again;
* plain: the same reads, each byte to a place of its own in fresh huge pages, in a new process, and nothing else:
  what a simple program reaches that keeps what it reads;
* run: `k3-run --ngen 1` from exec to the first byte on stdout, which follows the first logits at once.

The page cache is told to forget all files first. The figures are time / limit, the limit being 1.15 x (dense
bytes / raw rate) + 0.5 s, and time / (dense bytes and experts / raw rate), since the first token needs both. A
virtual machine whose host takes free memory back pays for fresh memory far more than a machine that owns it; so
there are two kinds of rounds: `owned` touches and frees as much memory just before each timing, `reclaimed` waits
until the host has it. Medians are printed, all rounds are in the JSON line. The last line for people says how
quick each command's --help is.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

RECLAIM_S = 8.0
"""Pause after which a host that takes free memory back has most of it."""

ALLOWED_RATIO, ALLOWED_S = 1.15, 0.5
ALLOWED_RSS_BYTES = 300_000_000
BLOCK_BYTES = 8 << 20
HUGE_BYTES = 2 << 20
LANES = 6
WORKING_BYTES = 1_000_000_000  # the process besides dense weights and expert cache, generously

COMMANDS = ("k3-run", "k3-store", "k3-repack", "k3-verify")


def main() -> None:
    """Run the benchmark and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--container", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ids", default="5")
    parser.add_argument("--expert-gb", type=float, default=0.6)
    parser.add_argument("--kinds", default="owned,reclaimed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plain is not None:
        print(read(arguments.plain, keep=True))
        return
    if arguments.container is None:
        parser.error("--container is missing")
    kinds = arguments.kinds.split(",")
    found = {
        kind: measure(
            arguments.container, kind, rounds=arguments.rounds, ids=arguments.ids, expert_gb=arguments.expert_gb
        )
        for kind in kinds
    }
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "kinds": found,
        "help_s": {name: round(help_s(name), 3) for name in COMMANDS},
    }
    for kind in kinds:
        print_kind(kind, found[kind])
    print("--help", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report["help_s"].items()))
    line = json.dumps(report)
    if arguments.json is not None:
        arguments.json.write_text(line + "\n")
    print(line)


def measure(
    container: Path, kind: str = "owned", *, rounds: int = 5, ids: str = "5", expert_gb: float = 0.6
) -> dict[str, Any]:
    """Medians over `rounds`, and the rounds themselves; `kind` is "owned" or "reclaimed"."""
    dense = container / "dense.safetensors"
    dense_bytes = dense.stat().st_size
    run_k3(container, ids, expert_gb)  # bytecode and shared libraries are cached from here on
    taken = []
    for _ in range(rounds):
        forget(container)
        raw_s = read(dense, keep=False)
        prepare(kind, dense_bytes)
        plain_s = float(subprocess.check_output([sys.executable, __file__, "--plain", str(dense)], text=True))
        prepare(kind, dense_bytes + int(expert_gb * 1e9) + WORKING_BYTES)
        forget(container)
        run = run_k3(container, ids, expert_gb)
        limit_s = ALLOWED_RATIO * raw_s + ALLOWED_S
        limit_bytes = dense_bytes + run["budget_bytes"] + ALLOWED_RSS_BYTES
        taken.append(
            {
                "raw_gb_per_s": dense_bytes / raw_s / 1e9,
                "plain_gb_per_s": dense_bytes / plain_s / 1e9,
                "first_token_s": run["first_token_s"],
                "first_token_over_limit": run["first_token_s"] / limit_s,
                "first_token_over_plain": run["first_token_s"] / (ALLOWED_RATIO * plain_s + ALLOWED_S),
                "all_bytes_over_raw": run["first_token_s"] / (raw_s * (1 + run["read_bytes"] / dense_bytes)),
                "load_s": run["load_s"],
                "expert_read_bytes": run["read_bytes"],
                "peak_rss_bytes": run["peak_rss_bytes"],
                "peak_rss_over_limit": run["peak_rss_bytes"] / limit_bytes,
            }
        )
    medians = {key: statistics.median(item[key] for item in taken) for key in taken[0]}
    return {"dense_bytes": dense_bytes, "rounds": taken, "median": medians}


def run_k3(container: Path, ids: str, expert_gb: float) -> dict[str, Any]:
    """One run in a new process: seconds to the first byte on stdout, and what it says of itself."""
    command = [*program("k3-run"), "--container", str(container), "--ids", ids, "--ngen", "1", "--ignore-eos"]
    command += ["--expert-gb", str(expert_gb)]
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not os.read(process.stdout.fileno(), 1):
            raise SystemExit(f"k3-run printed no token: {process.stderr.read().decode()}")
        first_token_s = time.perf_counter() - began_s
        process.stdout.read()
        said = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    words = said.replace(",", "").split()
    return {
        "first_token_s": first_token_s,
        "load_s": float(words[words.index("load") + 1]),
        "read_bytes": round(float(words[words.index("read") + 1]) * 1e9),
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "budget_bytes": int(expert_gb * 1e9),
    }


def help_s(name: str, rounds: int = 5) -> float:
    """Median seconds of a command's --help."""
    taken = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        subprocess.run([*program(name), "--help"], stdout=subprocess.DEVNULL, check=True, env=environment())
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def program(name: str) -> list[str]:
    """Return the command of this interpreter's environment."""
    return [str(Path(sys.executable).parent / name)]


def environment() -> dict[str, str]:
    """Have an installed program's bytecode cached, whatever the caller's environment says about writing it."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def forget(container: Path) -> None:
    """Ask the kernel to drop every file of the container from the page cache."""
    for path in sorted(container.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def prepare(kind: str, nbytes: int) -> None:
    """Make free memory the machine's own, or the host's, as far as that can be done."""
    if kind == "reclaimed":
        time.sleep(RECLAIM_S)
        return
    subprocess.run([sys.executable, "-c", _TOUCH, str(nbytes)], check=True)


_TOUCH = """
import mmap, sys
area = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area.madvise(mmap.MADV_HUGEPAGE)
for start in range(0, len(area), 4096):
    area[start] = 1
"""


def read(path: Path, *, keep: bool) -> float:
    """Seconds to read a file with direct reads of 8 MiB, six in flight, into huge pages.

    With `keep`, each byte goes to a place of its own in fresh memory; otherwise each lane reads into one buffer
    that it has touched before. (Buffers of small pages would slow the drive down: every page is a segment.)
    """
    nbytes = path.stat().st_size
    places = -(-nbytes // BLOCK_BYTES) if keep else LANES
    area = mmap.mmap(-1, places * BLOCK_BYTES + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(area)
    if not keep:
        view[:] = bytes(len(view))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def lane(number: int) -> None:
        for block in range(number, -(-nbytes // BLOCK_BYTES), LANES):
            start = (block if keep else number) * BLOCK_BYTES
            os.preadv(descriptor, [view[start : start + BLOCK_BYTES]], block * BLOCK_BYTES)

    lanes = [threading.Thread(target=lane, args=(number,)) for number in range(LANES)]
    began_s = time.perf_counter()
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    taken_s = time.perf_counter() - began_s
    os.close(descriptor)
    return taken_s


def print_kind(kind: str, found: dict[str, Any]) -> None:
    """One kind's medians for people."""
    m = found["median"]
    print(
        f"{kind} memory, {len(found['rounds'])} rounds, medians\n"
        f"  raw {m['raw_gb_per_s']:.2f} GB/s, into fresh memory {m['plain_gb_per_s']:.2f} GB/s, "
        f"dense {found['dense_bytes'] / 1e9:.2f} GB\n"
        f"  first token {m['first_token_s']:.2f} s: {m['first_token_over_limit']:.2f} of the limit, "
        f"{m['first_token_over_plain']:.2f} of the limit at the fresh-memory rate, "
        f"{m['all_bytes_over_raw']:.2f} of a raw read of dense bytes and experts\n"
        f"  peak RSS {m['peak_rss_bytes'] / 1e9:.3f} GB: {m['peak_rss_over_limit']:.2f} of the limit"
    )


if __name__ == "__main__":
    main()
