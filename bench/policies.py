"""Which cache policy, and from which cache size on: the table behind the default.

    python bench/policies.py --work DIR [--slice SNAPSHOT] [--quick]

Replays routing of several kinds (bench/routing.py, and runs of made-up models through k3-run, whose random weights
route nearly uniformly) against every policy, for caches from a fifth to twelve times of what one token touches.
The rule "one policy below so many tokens' worth of room, another above" is chosen by the training seeds, then
measured on seeds that had no part in the choice; one policy for all sizes wins if it is as good within 0.5 %.
The measure is bytes read, as a multiple of what the best possible choice (Belady) reads: a geometric mean over
traces and sizes. pin-lru takes its pins from another text of the same kind; it needs such a trace, so it is shown
but cannot be the default. Prints tables and a JSON line.
Traces of k3-run stay in the work directory and are used again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from routing import K3_SHAPE, Text, passes, sticky, topics, uniform, zipf

from k3.store._store import policy_names
from k3.store.routing.simulate import BELADY, simulate
from k3.store.routing.trace_requests import Requests
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot

ROOMS = (0.2, 0.35, 0.6, 0.9, 1.1, 1.3, 1.6, 2.0, 2.5, 3.5, 5.0, 8.0, 12.0)
"""Cache sizes, in what one token touches: 25.8 GB in the real model."""

TRAIN_SEEDS, HOLDOUT_SEEDS = (1, 2), (101, 102)
ELIGIBLE = tuple(name for name in policy_names() if name != "pin-lru")
PIN_SHARE = 0.5
MARGIN = 1.005
"""The gain over one policy from which two with a switch between them are worth it."""

TEXTS = (
    "The ship left the harbour before sunrise, and nobody on the quay could say where it was bound.",
    "def area(points): return abs(sum(x1*y2 - x2*y1 for (x1, y1), (x2, y2) in zip(points, points[1:]))) / 2",
    "Es war einmal ein König, der hatte drei Söhne, und keiner von ihnen wollte das Reich haben.",
    "Integrate x^2 e^x from 0 to 1. First use integration by parts; then check the result by a series.",
)


@dataclass(frozen=True)
class Outcome:
    """One policy, or Belady, on one trace with one amount of room."""

    family: str
    seed: int
    room: float
    policy: str
    hit_rate: float
    misses: int


Make = Callable[[int], Requests]


def made_up(quick: bool) -> dict[str, Make]:
    """Families of known structure: for each a function from seed to trace."""
    mixed = Text(prompt=64, generate=16 if quick else 64)
    return {
        "uniform": partial(_drawn, uniform, mixed),
        "zipf 0.8": partial(_drawn, zipf, mixed),
        "sticky 0.6": partial(_drawn, partial(sticky, memory=0.6), mixed),
        "sticky 0.9": partial(_drawn, sticky, mixed),
        "topics 0.9": partial(_drawn, partial(topics, exponent=0.9), mixed),
        "topics 1.2, sticky 0.6": partial(_drawn, partial(topics, exponent=1.2, memory=0.6), mixed),
        "topics 0.9, chunks of 16": partial(
            _drawn, partial(topics, exponent=0.9), Text(prompt=64 if quick else 256, generate=0, chunk=16)
        ),
        "topics 0.9, two engines": partial(_two_engines, partial(topics, exponent=0.9), mixed),
    }


def _drawn(family: Callable[..., Iterator[np.ndarray[Any, Any]]], text: Text, seed: int) -> Requests:
    return Requests.from_passes(K3_SHAPE, passes(family(K3_SHAPE, seed), text))


def _two_engines(family: Callable[..., Iterator[np.ndarray[Any, Any]]], text: Text, seed: int) -> Requests:
    """Two texts at once against one cache: sets of the two in a random order, each in its own."""
    both = [_drawn(family, text, seed), _drawn(family, text, seed + 1000)]
    turns = np.random.default_rng(seed).permutation(np.repeat([0, 1], [len(part) for part in both]))
    order = np.argsort(np.argsort(turns, kind="stable"), kind="stable")  # place of each turn's set, texts in a row
    sets = [ids for part in both for ids in np.split(part.experts, part.starts[1:-1])]
    layers = np.concatenate([part.layers for part in both])
    chosen = [sets[place] for place in order]
    starts = np.cumsum([0, *map(len, chosen)])
    passes_and_tokens = (sum(part.passes for part in both), sum(part.tokens for part in both))
    return Requests(K3_SHAPE, *passes_and_tokens, layers[order], starts, np.concatenate(chosen))


def run_engine(snapshot: Path, work: Path, seed: int, generate: int) -> Requests:
    """Return a trace of a real run of this snapshot over a text of this seed."""
    path = work / f"{snapshot.name}-{generate}-{seed}.k3route"
    if not path.exists():
        command = [sys.executable, "-c", "from k3.engine.cli import main; main()", "--snapshot", str(snapshot)]
        command += ["--prompt", TEXTS[seed % len(TEXTS)], "--seed", str(seed), "--temperature", "1"]
        command += ["--ngen", str(generate), "--ignore-eos", "--route-trace", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Requests.from_trace(path)


def engine_families(work: Path, slice_snapshot: Path | None, quick: bool) -> dict[str, Make]:
    """Return runs of made-up models: a small one of many layers, and a slice in real widths if one is given."""
    small = work / "small"
    if not (small / "config.json").exists():
        write_snapshot(SyntheticModel(layers=13, experts=128, experts_per_token=8, vision=False), small)
    families: dict[str, Make] = {"k3-run, 12 x 128": partial(_run, small, work, 24 if quick else 160)}
    if slice_snapshot is not None:
        families["k3-run, slice"] = partial(_run, slice_snapshot, work, 96)
    return families


def _run(snapshot: Path, work: Path, generate: int, seed: int) -> Requests:
    return run_engine(snapshot, work, seed, generate)


def replay_family(name: str, make: Make) -> list[Outcome]:
    """Every policy on every seed of one family."""
    outcomes = []
    favourites = make(TRAIN_SEEDS[0] + 7).most_wanted(1 << 20)  # of a text that is in no table
    for seed in (*TRAIN_SEEDS, *HOLDOUT_SEEDS):
        requests = make(seed)
        token_slots = requests.header.top_k * len(requests.header.layers)
        for room in ROOMS:
            slots = max(1, round(room * token_slots))
            if slots >= sum(requests.header.counts.values()):
                continue
            for policy in (*policy_names(), BELADY):
                pins = favourites[: int(PIN_SHARE * slots)] if policy == "pin-lru" else ()
                result = simulate(requests, policy, slots, pins)
                outcomes.append(Outcome(name, seed, room, policy, result.hit_rate, result.misses))
    return outcomes


@dataclass(frozen=True)
class Rule:
    """`low` below `switch` tokens' worth of room, `high` from there on."""

    low: str
    high: str
    switch: float

    def policy(self, room: float) -> str:
        """Return the policy for this much room."""
        return self.low if room < self.switch else self.high


def excess(outcomes: list[Outcome], rule: Rule) -> float:
    """Bytes read as a multiple of the best possible: geometric mean over traces and sizes."""
    best = {(o.family, o.seed, o.room): o.misses for o in outcomes if o.policy == BELADY}
    logs = [np.log(o.misses / best[o.family, o.seed, o.room]) for o in outcomes if o.policy == rule.policy(o.room)]
    return float(np.exp(np.mean(logs)))


def choose(outcomes: list[Outcome]) -> list[tuple[float, Rule]]:
    """All rules, best first."""
    rules = {
        Rule(low, high, switch) if low != high else Rule(low, high, 0.0)
        for low in ELIGIBLE
        for high in ELIGIBLE
        for switch in ROOMS[1:]
    }
    return sorted(((excess(outcomes, rule), rule) for rule in rules), key=lambda item: (item[0], str(item[1])))


def report(outcomes: list[Outcome]) -> dict[str, object]:
    """Print the tables; what was chosen, and how it did."""
    train = [o for o in outcomes if o.seed in TRAIN_SEEDS]
    holdout = [o for o in outcomes if o.seed in HOLDOUT_SEEDS]
    print("Hits in percent, hold-out seeds. Room in what one token touches.\n")
    for family in dict.fromkeys(o.family for o in outcomes):
        rooms = sorted({o.room for o in outcomes if o.family == family})
        print(f"{family:<26}" + "".join(f"{room:>7g}" for room in rooms))
        for policy in (*policy_names(), BELADY):
            rates = [
                np.mean([o.hit_rate for o in holdout if (o.family, o.room, o.policy) == (family, room, policy)])
                for room in rooms
            ]
            print(f"  {policy:<24}" + "".join(f"{100 * rate:>7.1f}" for rate in rates))
    ranked = choose(train)
    print("\nBytes read over the best possible, all traces and sizes (1 is Belady)   training  hold-out")
    singles = [rule for _, rule in ranked if rule.low == rule.high]
    for rule in (*[rule for _, rule in ranked[:5]], *singles):
        words = rule.low if rule.low == rule.high else f"{rule.low} below {rule.switch:g}, then {rule.high}"
        print(f"  {words:<70}{excess(train, rule):8.3f}{excess(holdout, rule):10.3f}")
    chosen = singles[0] if excess(train, singles[0]) <= MARGIN * ranked[0][0] else ranked[0][1]
    best_afterwards = choose(holdout)[0]
    return {
        "chosen": vars(chosen), "training": excess(train, chosen), "holdout": excess(holdout, chosen),
        "best_on_holdout": {**vars(best_afterwards[1]), "excess": best_afterwards[0]},
    }  # fmt: skip


def main() -> None:
    """Replay, choose, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a directory for small snapshots and traces")
    parser.add_argument(
        "--slice", type=Path, help="a snapshot in real widths (k3.verify.synthetic --preset slice)"
    )
    parser.add_argument("--quick", action="store_true", help="short traces, to see that it runs")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    families = {
        **made_up(arguments.quick),
        **engine_families(arguments.work, arguments.slice, arguments.quick),
    }
    with ProcessPoolExecutor() as pool:
        parts = pool.map(replay_family, families.keys(), families.values())
        outcomes = [outcome for part in parts for outcome in part]
    print(json.dumps(report(outcomes)))


if __name__ == "__main__":
    main()
