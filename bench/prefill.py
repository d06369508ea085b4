"""The gain of taking a prompt in chunks: each expert is read, and multiplied with all its tokens, once.

    python bench/prefill.py --container HOME [--rounds 3] [--tokens 32] [--only streaming,cached]

The same prompt goes in token by token and as one chunk, `streaming` with no expert cache, so that every expert
comes from the drive, and `cached` with all experts in memory. Reported are the speed-up and the bytes read per
token; that both ways end with the same logits, bit for bit, is checked, and the script fails where they do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from loaded import Loaded, loaded

from k3.engine.run.session import Session

WAYS = {"streaming": 0, "cached": None}


def timed(engine: Loaded, ids: list[int], chunk: int) -> tuple[float, int, bytes]:
    """Seconds, bytes read and the last logits of a prompt taken `chunk` tokens at a time."""
    session = Session(engine.model, len(ids), chunk)
    read_before = engine.experts.stats().read_bytes
    began_s = time.perf_counter()
    logits = session.prefill(ids)
    seconds = time.perf_counter() - began_s
    return seconds, engine.experts.stats().read_bytes - read_before, logits.tobytes()


def prefill_round(engine: Loaded, tokens: int, seed: int) -> dict[str, float]:
    """Both ways, once. SystemExit when they do not give the same bits."""
    ids = engine.ids(tokens, seed)
    one_s, one_bytes, one = timed(engine, ids, 1)
    chunk_s, chunk_bytes, chunk = timed(engine, ids, tokens)
    if one != chunk:
        raise SystemExit("the chunk's logits are not those of its tokens one by one: this must not happen")
    return {
        "one_tokens_per_s": tokens / one_s,
        "chunk_tokens_per_s": tokens / chunk_s,
        "speed_up": one_s / chunk_s,
        "one_gb_per_token": one_bytes / tokens / 1e9,
        "chunk_gb_per_token": chunk_bytes / tokens / 1e9,
    }


def measure(home: Path, way: str, rounds: int, tokens: int) -> list[dict[str, float]]:
    """All rounds of one way, on a model of its own."""
    with loaded(home, cache_bytes=WAYS[way], tokens=tokens) as engine:
        if WAYS[way] is None:
            engine.warm()
        timed(engine, engine.ids(2, 0), 2)
        return [prefill_round(engine, tokens, number + 1) for number in range(rounds)]


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--container", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--only", default=",".join(WAYS))
    arguments = parser.parse_args()
    print(
        f"{'':<10}{'round':>6}{'tokens/s, one by one':>22}{'as a chunk':>12}{'speed-up':>10}"
        f"{'GB read/token':>15}{'as a chunk':>12}"
    )
    medians: dict[str, dict[str, float]] = {}
    for way in arguments.only.split(","):
        rounds = measure(arguments.container, way, arguments.rounds, arguments.tokens)
        for number, figures in enumerate(rounds):
            print(_line(way, str(number), figures))
        medians[way] = {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
        print(_line(way, "median", medians[way]))
    print(json.dumps({"prefill": {"tokens": arguments.tokens, "medians": medians, "same_bits": True}}))


def _line(way: str, number: str, figures: dict[str, float]) -> str:
    return (
        f"{way:<10}{number:>6}{figures['one_tokens_per_s']:>22.2f}{figures['chunk_tokens_per_s']:>12.2f}"
        f"{figures['speed_up']:>10.2f}{figures['one_gb_per_token']:>15.3f}{figures['chunk_gb_per_token']:>12.3f}"
    )


if __name__ == "__main__":
    main()
