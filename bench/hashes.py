"""SHA-256 of several messages side by side, on one core, against hashlib's of one message after the other.

    python bench/hashes.py [--rounds 9] [--bytes 4194304]

Every variant that this CPU can run is measured, with its SHA instructions and without. hashlib is the peer, in the
same round: OpenSSL, which uses the instructions where there are any. Medians of the ratio are printed, and the
rounds as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from k3 import kernels
from k3.kernels import Sha256, _kernels, sha256_update

_LANES = {"avx2": 8, "avxvnni": 8, "avx512": 16, "avx512vnni": 16}


def main() -> None:
    """Run the benchmark and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bytes", type=int, default=4 << 20, help="of one message")
    arguments = parser.parse_args()
    ways = [(variant, False) for variant in kernels.cpu_variants()]
    if _kernels.has_sha_instructions():
        ways.append((kernels.cpu_variant(), True))
    block = np.frombuffer(np.random.default_rng(0).bytes(arguments.bytes), np.uint8)
    rounds: dict[str, list[dict[str, float]]] = {}
    print(f"{'variant':<24}{'messages':>9}{'GB/s':>8}{'hashlib':>9}{'ratio':>7}")
    for variant, instructions in ways:
        kernels.set_variant(variant)
        _kernels.want_sha_instructions(instructions)
        for count in sorted({1, 2 if instructions else _LANES.get(variant, 4)}):
            name = f"{variant}{', SHA' if instructions else ''}, {count}"
            rounds[name] = [one_round(block, count) for _ in range(arguments.rounds)]
            own, peer = (statistics.median(each[key] for each in rounds[name]) for key in ("own", "hashlib"))
            ratio = statistics.median(each["own"] / each["hashlib"] for each in rounds[name])
            print(f"{name.rsplit(',', 1)[0]:<24}{count:>9}{own:>8.2f}{peer:>9.2f}{ratio:>7.2f}")
    print(json.dumps({"units": "GB/s", "bytes": arguments.bytes, "rounds": rounds}))


def one_round(block: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], count: int) -> dict[str, float]:
    """Return GB/s of `count` messages in one call, and of hashlib with the same bytes."""
    messages = [Sha256() for _ in range(count)]
    own = seconds(lambda: sha256_update(messages, [block] * count))
    peer = seconds(lambda: [hashlib.sha256(block.data).digest() for _ in range(count)])
    return {"own": count * len(block) / own / 1e9, "hashlib": count * len(block) / peer / 1e9}


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
