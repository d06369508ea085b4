"""How fast the kernels are at K3's shapes, against what memory delivers and what the cores can multiply.

    python bench/kernels.py [--threads N] [--rounds 5] [--only PART]

Weights are cold: each call takes another copy, and the copies together are larger than any cache. Copies are made
by NumPy, which asks the kernel for huge pages for arrays of this size; the engine's dense weights have them too.

Ceilings, measured in every round with as many threads: memory is the faster of reading one large buffer with the
widest loads and comparing two with memcmp; the peak is the variant's integer product on registers alone, its
instruction for products of int8 in a loop. A round measures the ceilings and every kernel once; the table shows
medians, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.kernels import _kernels

HIDDEN, LATENT, INNER = 7168, 3584, 3072
ROWS = 4096
COLD_BYTES = 512 << 20
PEAK_ROUNDS = 50_000


@dataclass(frozen=True)
class Job:
    """One call of a kernel: bytes of weights that it reads, int8 products that it makes (0: not its business)."""

    call: Callable[[], object]
    weight_bytes: int
    products: int = 0


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=kernels.usable_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measure only kernels whose name contains this")
    arguments = parser.parse_args()
    kernels.set_threads(arguments.threads)
    rng = np.random.default_rng(0)
    memory = memory_reader(arguments.threads)
    every = dict(product_jobs(rng)) | dict(expert_jobs(rng)) | dict(quantize_jobs(rng))
    jobs = {name: job for name, job in every.items() if arguments.only in name}
    rounds = [measured(memory, jobs) for _ in range(arguments.rounds)]
    print(f"{kernels.cpu_variant()}, {arguments.threads} threads")
    print(
        f"memory {median(rounds, 'memory'):.1f} GB/s, empty call {median(rounds, 'call') * 1e6:.1f} us,", end=" "
    )
    print(f"peak {median(rounds, 'peak'):.0f} G int8 products/s")
    print(f"{'kernel':<36}{'GB/s':>8}{'of memory':>11}{'G/s':>8}{'of peak':>9}")
    for name, job in jobs.items():
        seconds = [figures[name] for figures in rounds]
        gbs = statistics.median(job.weight_bytes / s / 1e9 for s in seconds)
        share = statistics.median(job.weight_bytes / figures[name] / 1e9 / figures["memory"] for figures in rounds)
        line = f"{name:<36}{gbs:>8.2f}{share:>11.2f}"
        if job.products:
            rate = statistics.median(job.products / s / 1e9 for s in seconds)
            peak = statistics.median(job.products / figures[name] / 1e9 / figures["peak"] for figures in rounds)
            line += f"{rate:>8.0f}{peak:>9.2f}"
        print(line)
    stamp = datetime.now(timezone.utc).date().isoformat()
    head = {"date": stamp, "variant": kernels.cpu_variant(), "threads": arguments.threads}
    sizes = {name: [job.weight_bytes, job.products] for name, job in jobs.items()}
    print(json.dumps(head | {"units": "memory GB/s, peak G/s, else s", "sizes": sizes, "rounds": rounds}))


def measured(memory: Callable[[], float], jobs: dict[str, Job]) -> dict[str, float]:
    """One round: ceilings in G per second, the rest in seconds."""
    figures = {"memory": memory(), "peak": peak(), "call": empty_call()}
    return figures | {name: seconds(job.call) for name, job in jobs.items()}


def median(rounds: list[dict[str, float]], name: str) -> float:
    """Over the rounds."""
    return statistics.median(figures[name] for figures in rounds)


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def peak() -> float:
    """G int8 products per second."""
    start = time.perf_counter()
    products = _kernels.probe_dots(PEAK_ROUNDS)
    return products / (time.perf_counter() - start) / 1e9


def empty_call() -> float:
    """Seconds that it takes to set all threads to work on next to nothing, one call right after the other."""
    nothing = np.zeros(64, np.uint8)
    return seconds(lambda: [_kernels.probe_read(nothing) for _ in range(200)]) / 200


def memory_reader(threads: int) -> Callable[[], float]:
    """GB/s at which `threads` threads read a buffer or compare two, whichever is faster."""
    both = np.full(COLD_BYTES, 7, np.uint8)
    left, right = np.array_split(both, 2)
    parts = list(zip(np.array_split(left, threads), np.array_split(right, threads), strict=True))
    pool = ThreadPoolExecutor(threads)

    def read() -> float:
        compared = seconds(lambda: list(pool.map(lambda pair: kernels.first_difference(*pair), parts)))
        return both.nbytes / min(compared, seconds(lambda: _kernels.probe_read(both))) / 1e9

    return read


def copies(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Endless copies of an array, enough of them that none is still in a cache."""
    return cycle([array, *(array.copy() for _ in range(COLD_BYTES // array.nbytes))])


def product_jobs(rng: np.random.Generator) -> Iterator[tuple[str, Job]]:
    """One token (and 8, and 32) through a matrix of each encoding."""
    x = rng.standard_normal((32, HIDDEN), dtype=np.float32)
    values = rng.standard_normal((ROWS, HIDDEN), dtype=np.float32)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    weights: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.float32] | None]] = {
        "bf16": (bf16, None),
        "int8": kernels.quantize_int8(bf16),
        "int4": kernels.quantize_int4(bf16),
    }
    for encoding, (data, scales) in weights.items():
        cold = copies(data)
        for exact in (True,) if encoding == "bf16" else (True, False):
            for count in (1, 8, 32):
                kind = "float32" if exact else "int8"

                def call(
                    data: Iterator[npt.NDArray[Any]] = cold,
                    scales: npt.NDArray[np.float32] | None = scales,
                    encoding: str = encoding,
                    exact: bool = exact,
                    count: int = count,
                ) -> object:
                    return kernels.matmul_encoded(x[:count], next(data), scales, encoding, exact)

                products = 0 if exact else count * ROWS * HIDDEN
                yield f"{encoding}, {kind} activations, S={count}", Job(call, data.nbytes, products)


def expert_jobs(rng: np.random.Generator) -> Iterator[tuple[str, Job]]:
    """One token (and 8, and 32) through an MXFP4 expert."""
    matrices, offset = [], 0
    for rows, columns in ((INNER, LATENT), (LATENT, INNER), (INNER, LATENT)):
        packed, scale = rows * columns // 2, rows * columns // 32
        matrices.append(kernels.ExpertMatrix(offset, offset + packed, rows, columns))
        offset += packed + scale
    payload = rng.integers(0, 256, offset, dtype=np.uint8)
    for matrix in matrices:
        payload[matrix.scale_offset : matrix.scale_offset + matrix.rows * matrix.columns // 32] = 119
    cold = copies(payload)
    z = rng.standard_normal((32, LATENT), dtype=np.float32)
    for exact in (True, False):
        for count in (1, 8, 32):

            def call(exact: bool = exact, count: int = count) -> object:
                return kernels.expert_forward(z[:count], next(cold), *matrices, exact=exact)

            products = 0 if exact else count * 3 * INNER * LATENT
            kind = "float32" if exact else "int8"
            yield f"mxfp4 expert, {kind} activations, S={count}", Job(call, payload.nbytes, products)


def quantize_jobs(rng: np.random.Generator) -> Iterator[tuple[str, Job]]:
    """bfloat16 rows to int8 and int4, in bytes of source; one thread by design, the repacker streams rows."""
    bf16 = (rng.standard_normal((ROWS, HIDDEN), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    cold = copies(bf16)
    int8, scales8 = kernels.quantize_int8(bf16)
    int4, scales4 = kernels.quantize_int4(bf16)
    yield (
        "quantize bf16 to int8 (source)",
        Job(lambda: kernels.quantize_int8_into(next(cold), int8, scales8), bf16.nbytes),
    )
    yield (
        "quantize bf16 to int4 (source)",
        Job(lambda: kernels.quantize_int4_into(next(cold), int4, scales4), bf16.nbytes),
    )


if __name__ == "__main__":
    main()
