"""The time until k3-run has the drive busy: from exec until its first read of dense weights has returned.

    python bench/first_read.py --container DIR [--against OTHER/.venv/bin/python] [--rounds 15] [--prompt TEXT]
                               [--json FILE]

The kernel reports the read (inotify), so the program is not changed for it and any release can be measured. In
every round, in turn, with files that hold no weights in the page cache:

* bare: an interpreter that does nothing but read the first 8 MiB of the dense file past the page cache;
* here: `k3-run --ngen 1` of this environment, on token ids or on a text;
* there: the same of another environment, with --against.

A busy machine makes a start wait for a processor, so the time that the main thread ran is measured as well.

A run continues to its first token, which is timed too. Medians and quartiles are printed, and ratios to `bare` and
between the two, each taken within a round. Everything is in the JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from breakdown import cpu_name
from cold_start import environment, forget

IN_ACCESS = 1
HANG_S = 120.0

BARE = """
import mmap, os, sys
area = mmap.mmap(-1, 8 << 20)
os.preadv(os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT), [area], 0)
print(1)
"""


def main() -> None:
    """Run the benchmark and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--container", type=Path, required=True)
    parser.add_argument("--against", type=Path, help="python of the environment to compare with")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prompt", help="a text instead of token ids")
    parser.add_argument("--expert-gb", type=float, default=0.6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    commands = {"bare": [sys.executable, "-c", BARE, str(arguments.container / "dense.safetensors")]}
    pythons = {"here": Path(sys.executable)}
    if arguments.against is not None:
        pythons["there"] = arguments.against.absolute()
    for name, python in pythons.items():
        commands[name] = [
            str(python.parent / "k3-run"), "--container", str(arguments.container), "--ngen", "1", "--ignore-eos",
            "--expert-gb", str(arguments.expert_gb), *([arguments.prompt] if arguments.prompt else ["--ids", "5"]),
        ]  # fmt: skip
    rounds = measure(commands, arguments.container, arguments.rounds)
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{cpu_name()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "load": round(os.getloadavg()[0], 2),
        "prompt": "text" if arguments.prompt else "ids",
        "rounds": rounds,
        "summary": summary(rounds),
    }
    for line, values in report["summary"].items():  # type: ignore[attr-defined]
        print(f"{line:<34} {values['median']:8.3f}   quartiles {values['low']:.3f} to {values['high']:.3f}")
    text = json.dumps(report)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    print(text)


def measure(commands: dict[str, list[str]], container: Path, rounds: int) -> list[dict[str, float]]:
    """Return the seconds of each round, by name and kind of time; the first start of each is left out."""
    taken: list[dict[str, float]] = []
    for number in range(rounds + 1):
        found: dict[str, float] = {}
        names = list(commands)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            forget(container)
            for key, seconds in start(commands[name], container / "dense.safetensors").items():
                found[f"{name}_{key}"] = seconds
        if number:
            taken.append(found)
    return taken


def start(command: Sequence[str], file: Path) -> dict[str, float]:
    """Run a command to its end; return seconds to its first read of `file`, and to its first output.

    `cpu_s` is the time that its main thread ran before the read.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    events = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if events < 0 or libc.inotify_add_watch(events, os.fsencode(file), IN_ACCESS) < 0:
        raise SystemExit(f"inotify: {os.strerror(ctypes.get_errno())}")
    try:
        began_s = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            if not select.select([events], [], [], HANG_S)[0]:
                process.kill()
                raise SystemExit(f"{command[0]} read nothing: {process.stderr.read().decode()}")
            read_s = time.perf_counter() - began_s
            cpu_s = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9
            if not os.read(process.stdout.fileno(), 1):
                raise SystemExit(f"{command[0]} printed nothing: {process.stderr.read().decode()}")
            token_s = time.perf_counter() - began_s
            process.communicate()
    finally:
        os.close(events)
    return {"read_s": read_s, "cpu_s": cpu_s, "token_s": token_s}


def summary(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return median and quartiles of every time, and of ratios within rounds."""
    names = [key.removesuffix("_read_s") for key in rounds[0] if key.endswith("_read_s")]
    lines: dict[str, list[float]] = {}
    for name in names:
        lines[f"{name}: first read, s"] = [one[f"{name}_read_s"] for one in rounds]
        lines[f"{name}: of these on a processor, s"] = [one[f"{name}_cpu_s"] for one in rounds]
        if name != "bare":
            lines[f"{name}: first read / bare"] = [one[f"{name}_read_s"] / one["bare_read_s"] for one in rounds]
            lines[f"{name}: first token, s"] = [one[f"{name}_token_s"] for one in rounds]
    if "there" in names:
        for kind, name in (("read", "first read"), ("cpu", "processor time of it"), ("token", "first token")):
            lines[f"{name}, here / there"] = [one[f"here_{kind}_s"] / one[f"there_{kind}_s"] for one in rounds]
    return {line: quartiles(values) for line, values in lines.items()}


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Return median and quartiles, rounded to a millisecond or a thousandth."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    )
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


if __name__ == "__main__":
    main()
