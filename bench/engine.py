"""The engine against what memory and drive allow, in one run: goal, measured, met.

    python bench/engine.py --work DIR [--rounds 5] [--only kernels,decode,prefill,...]
    python bench/engine.py --container HOME

Makes a slice of K3 in real dimensions in DIR, once (hidden 7168; KDA over dense, KDA over MoE twice, MLA over MoE;
64 experts of which a token takes 16; 6 GB as a container), or takes a container. Then runs, each in a process of
its own, the scripts that measure one thing and that can be run alone:

  kernels     bench/kernels.py     products at K3's shapes with weights cold in memory, of the memory's rate
  decode      bench/decode.py      a token with all experts in memory: bytes per second, of the memory's rate
  streaming   bench/streaming.py   a token with no expert in memory, of the greater of drive time and cached time
  prefill     bench/prefill.py     a prompt as a chunk against token by token: speed-up and bytes read
  cold        bench/cold_start.py  from exec to the first token, of 1.15 x the time of plain reads + 0.5 s
  breakdown   bench/breakdown.py   where the time of a step goes; with --docs, the picture and the page's table too

Every ratio is taken within a round, so that a machine that is shared does not decide it; medians are shown, and
everything as one JSON line. `--tiny` proves on a model of kilobytes that all of it still runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from breakdown import cpu_name
from breakdown import table as breakdown_table
from loaded import make_container

BENCH = Path(__file__).parent
DOCS = BENCH.parent / "docs"

KERNEL_GOALS = {
    "int8, int8 activations, S=1": 0.85,
    "bf16, float32 activations, S=1": 0.85,
    "int4, int8 activations, S=1": 0.7,
    "mxfp4 expert, int8 activations, S=1": 0.7,
}
PEAK_REPORTED = ("S=8", "S=32")


@dataclass(frozen=True)
class Figure:
    """One line of the table. `goal` None: reported only."""

    part: str
    what: str
    measured: float
    goal: float | None = None
    at_most: bool = False  # the goal is an upper bound

    @property
    def met(self) -> bool | None:
        """None where there is no goal."""
        if self.goal is None:
            return None
        return self.measured <= self.goal if self.at_most else self.measured >= self.goal


@dataclass(frozen=True)
class Options:
    """The settings that the parts of the benchmark are given."""

    container: Path
    rounds: int
    tiny: bool
    breakdown: Path


def main() -> None:
    """Run the parts and print the table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="a directory on the drive to measure; the slice is kept there")
    parser.add_argument("--container", type=Path, help="a container to measure instead")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(PARTS), help="some of: " + ", ".join(PARTS))
    parser.add_argument(
        "--docs", action="store_true", help="write the figures and the picture of docs/performance.md"
    )
    parser.add_argument("--tiny", action="store_true", help="a model of kilobytes: what is printed means nothing")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    if (arguments.work is None) == (arguments.container is None):
        parser.error("give --work or --container")
    container = arguments.container
    if container is None:
        arguments.work.mkdir(parents=True, exist_ok=True)
        container = make_container(arguments.work, tiny=arguments.tiny)
    with tempfile.TemporaryDirectory() as folder:
        breakdown = Path(folder) / "breakdown.json"
        options = Options(container, arguments.rounds, arguments.tiny, breakdown)
        figures = [figure for part in parts for figure in PARTS[part](options)]
        if arguments.docs:
            write_page(figures, breakdown)
    print(table(figures))
    stamp = datetime.now(timezone.utc).date().isoformat()
    head = {"date": stamp, "load": os.getloadavg()[0], "rounds": arguments.rounds, "tiny": arguments.tiny}
    print(json.dumps(head | {"figures": [asdict(figure) | {"met": figure.met} for figure in figures]}))


def write_page(figures: list[Figure], breakdown: Path) -> None:
    """Put the figures, and the breakdown if it was measured, into docs/performance.md; draw its picture."""
    page = DOCS / "performance.md"
    text = between(page.read_text(), "figures", f"{_machine()}\n\n{table(figures)}")
    if breakdown.exists():
        result = json.loads(breakdown.read_text())
        head = (
            f"{result['cpu']}, {result['threads']} threads, {result['variant']}, {result['date']}; memory "
            f"{result['memory_rate'] / 1e9:.1f} GB/s, {result['past']} tokens before; without the clocks a step "
            f"takes {result['step_ns'] / 1e6:.1f} ms."
        )
        text = between(text, "breakdown", f"{head}\n\n{breakdown_table(result)}")
        _run("roofline.py", str(breakdown), str(DOCS / "roofline.png"))
    page.write_text(text)


def between(text: str, name: str, block: str) -> str:
    """Return a text with what stands between the marks of `name` replaced. SystemExit without the marks."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    before, mark, rest = text.partition(begin)
    _, other, after = rest.partition(end)
    if not mark or not other:
        raise SystemExit(f"the page has no place for {name}")
    return f"{before}{begin}{block}\n{end}{after}"


def _machine() -> str:
    """One line: processor, cores, memory, load and date."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stamp = datetime.now(timezone.utc).date().isoformat()
    return (
        f"{cpu_name()}, {os.cpu_count()} cores, {memory_bytes / (1 << 30):.0f} GiB, load "
        f"{os.getloadavg()[0]:.1f}, {stamp}; `python bench/engine.py`."
    )


def table(figures: list[Figure]) -> str:
    """For people, as Markdown."""
    lines = ["| part | what | measured | goal | met |", "|---|---|---:|---:|---|"]
    for figure in figures:
        goal = "" if figure.goal is None else f"{'<=' if figure.at_most else '>='} {figure.goal:g}"
        met = {None: "", True: "yes", False: "no"}[figure.met]
        lines.append(f"| {figure.part} | {figure.what} | {figure.measured:.3g} | {goal} | {met} |")
    return "\n".join(lines)


def kernels(options: Options) -> Iterator[Figure]:
    """Single products; each round has a call's seconds and, beside it, the ceilings in G per second."""
    result = _run("kernels.py", "--rounds", str(options.rounds))
    for name, size in result["sizes"].items():
        rounds = [one[name] for one in result["rounds"]]
        if name.endswith("S=1"):
            shares = [size["bytes"] / one["seconds"] / 1e9 / one["memory"] for one in rounds]
            yield Figure("kernels", f"{name}: of memory", statistics.median(shares), KERNEL_GOALS.get(name))
            rate = statistics.median(one["memory"] for one in rounds)
            yield Figure("kernels", f"{name}: memory beside it, GB/s", rate)
        if name.endswith(PEAK_REPORTED) and size["products"]:
            shares = [size["products"] / one["seconds"] / 1e9 / one["peak"] for one in rounds]
            yield Figure("kernels", f"{name}: of the int8 peak", statistics.median(shares))


def decode(options: Options) -> Iterator[Figure]:
    """Measure decoding with every expert cached."""
    past = ["--past", "16"] if options.tiny else []
    medians = _run("decode.py", *_common(options), *past)["decode"]["medians"]
    yield Figure("decode", "experts in memory: of the memory's rate", medians["ratio"], 0.75)
    yield Figure("decode", "memory beside it, GB/s", medians["memory_gb_per_s"])
    yield Figure("decode", "experts in memory: tokens per second", medians["tokens_per_s"])
    yield Figure("decode", "GB touched per token", medians["gb_per_token"])


def streaming(options: Options) -> Iterator[Figure]:
    """Measure decoding from the drive, against max(bytes / raw rate, cached decode time)."""
    medians = _run("streaming.py", *_common(options))["medians"]
    for mode, name in (("off", "no look-ahead"), ("on", "look-ahead"), ("oracle", "look-ahead that knows")):
        alone, shared = medians[f"{mode}_of_limit"], medians[f"{mode}_of_shared_limit"]
        yield Figure(
            "streaming", f"{name}: seconds per token, of the limit", alone, 1.1 if mode == "on" else None, True
        )
        yield Figure("streaming", f"{name}: of the limit, drive and memory shared", shared)
    yield Figure("streaming", "plain reads beside a step, of plain reads alone", medians["slowed_of_drive"])
    yield Figure("streaming", "leases without a model, of plain reads", medians["source_of_drive"])
    yield Figure("streaming", "plain reads, GB/s", medians["drive_rate"] / 1e9)


def prefill(options: Options) -> Iterator[Figure]:
    """Measure a pass over a chunk against passes over its tokens."""
    rounds = str(max(1, options.rounds // 2))
    medians = _run("prefill.py", "--container", str(options.container), "--rounds", rounds)["prefill"]["medians"]
    for way, figures in medians.items():
        yield Figure("prefill", f"{way}: chunk of 32 against one by one, times as fast", figures["speed_up"])
    streaming = medians["streaming"]
    yield Figure("prefill", "streaming: GB read per token, one by one", streaming["one_gb_per_token"])
    yield Figure("prefill", "streaming: GB read per token, as a chunk", streaming["chunk_gb_per_token"])


def cold(options: Options) -> Iterator[Figure]:
    """Start to first token, on memory that the machine owns and on memory that its host has taken back."""
    found = _run("cold_start.py", *_common(options))
    for kind, one in found["kinds"].items():
        medians = one["median"]
        goal = 1.0 if kind == "owned" else None
        yield Figure(
            "cold", f"{kind} memory: first token, of the limit", medians["first_token_over_limit"], goal, True
        )
        yield Figure("cold", f"{kind} memory: peak RSS, of the limit", medians["peak_rss_over_limit"], 1.0, True)
    for command, seconds in found["help_s"].items():
        goal = 0.3 if command == "k3-run" else None
        yield Figure("cold", f"{command} --help, seconds", seconds, goal, True)


def breakdown(options: Options) -> Iterator[Figure]:
    """Print the table of a step's time by what it is for."""
    past = ["--past", "16", "--steps", "2"] if options.tiny else []
    result = _run("breakdown.py", "--container", str(options.container), "--out", str(options.breakdown), *past)
    python = result["breakdown"]["work"]["Python"]["ns"] / result["breakdown"]["clocked_ns"]
    yield Figure("breakdown", "of a step, not in any kernel", python)


PARTS: dict[str, Callable[[Options], Iterator[Figure]]] = {
    "kernels": kernels,
    "decode": decode,
    "streaming": streaming,
    "prefill": prefill,
    "cold": cold,
    "breakdown": breakdown,
}


def _common(options: Options) -> list[str]:
    return ["--container", str(options.container), "--rounds", str(options.rounds)]


def _run(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script of this directory; its words go to stderr, its last line is JSON (or nothing of use)."""
    process = subprocess.run([sys.executable, str(BENCH / script), *arguments], stdout=subprocess.PIPE, text=True)
    sys.stderr.write(f"\n{script} {' '.join(arguments)}\n")
    lines = process.stdout.splitlines()
    sys.stderr.write("\n".join(line for line in lines if not line.startswith("{")) + "\n")
    if process.returncode:
        raise SystemExit(f"{script} failed with {process.returncode}")
    result: dict[str, Any] = json.loads(lines[-1]) if lines[-1].startswith("{") else {}
    return result


if __name__ == "__main__":
    main()
