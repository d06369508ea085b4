"""Tokens per second with every expert in memory, against the rate at which memory is read.

    python bench/decode.py --container HOME [--rounds 5] [--tokens 8] [--past 1024] [--threads N]

Bytes of a token, by `engine/report/bytes_per_pass.py`: all dense weights that are multiplied with their scales,
one row of the embeddings, the experts of the token in every layer as they lie on disk, KDA states read and
written, the latent cache read. The time is a whole step's: attention, experts, mixes, head, Python and all. Guests
of one host share its memory, whose rate jumps: it is measured before and after each step, and a step's ratio is to
the mean of both. A round is `--tokens` steps and shows their medians.                                      goal:
ratio >= 0.75
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from loaded import Loaded, loaded

from k3 import kernels
from k3.engine.report.machine_rates import MemoryMeter

GOAL = 0.75


def decode_round(engine: Loaded, meter: MemoryMeter, tokens: int, past: int, seed: int) -> dict[str, float]:
    """Medians over the steps of a round. SystemExit when an expert was not in memory."""
    session, rate = engine.session(past, tokens), meter.bytes_per_s()
    steps: list[dict[str, float]] = []
    for token in engine.ids(tokens, seed):
        before, rate_before, position = engine.experts.stats(), rate, session.position
        began_s = time.perf_counter()
        session.step(token)
        seconds = time.perf_counter() - began_s
        rate, after = meter.bytes_per_s(), engine.experts.stats()
        if after.misses != before.misses:
            raise SystemExit("experts were read from the drive: this is not cached decoding")
        touched_bytes = engine.traffic.pass_bytes(1, position, after.hits - before.hits)
        memory = (rate_before + rate) / 2
        steps.append(
            {
                "memory_gb_per_s": memory / 1e9,
                "tokens_per_s": 1 / seconds,
                "gb_per_token": touched_bytes / 1e9,
                "gb_per_s": touched_bytes / seconds / 1e9,
                "ratio": touched_bytes / seconds / memory,
            }
        )
    return {key: statistics.median(step[key] for step in steps) for key in steps[0]}


def measure(home: Path, rounds: int, tokens: int, past: int, threads: int | None) -> list[dict[str, float]]:
    """All rounds, after a step that is not counted."""
    with (
        loaded(home, threads=threads, tokens=past + tokens) as engine,
        MemoryMeter(kernels.get_threads()) as meter,
    ):
        engine.warm()
        decode_round(engine, meter, 1, past, 0)
        return [decode_round(engine, meter, tokens, past, number + 1) for number in range(rounds)]


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--container", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--past", type=int, default=1024, help="tokens in the context before")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    rounds = measure(arguments.container, arguments.rounds, arguments.tokens, arguments.past, arguments.threads)
    print(f"{'round':>6}{'memory GB/s':>13}{'tokens/s':>10}{'GB/token':>10}{'GB/s':>8}{'ratio':>8}")
    for number, figures in enumerate(rounds):
        print(f"{number:>6}{_line(figures)}")
    medians = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
    print(f"median{_line(medians)}   goal {GOAL}")
    print(json.dumps({"decode": {"rounds": rounds, "medians": medians, "past": arguments.past}}))


def _line(figures: dict[str, float]) -> str:
    return (
        f"{figures['memory_gb_per_s']:>13.1f}{figures['tokens_per_s']:>10.2f}{figures['gb_per_token']:>10.3f}"
        f"{figures['gb_per_s']:>8.2f}{figures['ratio']:>8.3f}"
    )


if __name__ == "__main__":
    main()
