"""How fast the kernels are at K3's shapes, against what memory delivers.

    python bench/kernels.py [--threads N] [--rounds 5]

Weights are cold: each call takes another copy, and the copies together are larger than any cache. The ceiling is
the rate at which memcmp reads two large buffers with as many threads. A round measures the ceiling and every
kernel once; the table shows medians, and the ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt

from k3 import kernels

HIDDEN, LATENT, INNER = 7168, 3584, 3072
ROWS = 4096
COLD_BYTES = 512 << 20


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=kernels.usable_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    kernels.set_threads(arguments.threads)
    rng = np.random.default_rng(0)
    memory = memory_reader(arguments.threads)
    jobs = dict(product_jobs(rng)) | dict(expert_jobs(rng)) | dict(quantize_jobs(rng))
    rounds: list[dict[str, float]] = []
    for _ in range(arguments.rounds):
        figures = {"memory": memory()}
        figures |= {name: nbytes / seconds(call) / 1e9 for name, (nbytes, call) in jobs.items()}
        rounds.append(figures)
    print(f"{'kernel':<34}{'GB/s':>8}{'of memory':>11}   ({kernels.cpu_variant()}, {arguments.threads} threads)")
    for name in rounds[0]:
        rate = statistics.median(figures[name] for figures in rounds)
        ratio = statistics.median(figures[name] / figures["memory"] for figures in rounds)
        print(f"{name:<34}{rate:>8.2f}{ratio:>11.2f}")
    stamp = datetime.now(timezone.utc).date().isoformat()
    print(
        json.dumps(
            {"date": stamp, "variant": kernels.cpu_variant(), "threads": arguments.threads, "rounds": rounds}
        )
    )


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def memory_reader(threads: int) -> Callable[[], float]:
    """GB/s at which `threads` readers compare two buffers."""
    left = np.full(COLD_BYTES // 2, 7, np.uint8)
    right = left.copy()
    parts = list(zip(np.array_split(left, threads), np.array_split(right, threads), strict=True))
    pool = ThreadPoolExecutor(threads)

    def read() -> float:
        taken = seconds(lambda: list(pool.map(lambda pair: kernels.first_difference(*pair), parts)))
        return 2 * left.nbytes / taken / 1e9

    return read


def copies(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    """Endless copies of an array, enough of them that none is still in a cache."""
    return cycle([array, *(array.copy() for _ in range(COLD_BYTES // array.nbytes))])


def product_jobs(rng: np.random.Generator) -> Iterator[tuple[str, tuple[int, Callable[[], object]]]]:
    """One token (and 32) through a matrix of each encoding."""
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
            for count in (1, 32):
                kind = "float32" if exact else "int8"

                def call(
                    data: Iterator[npt.NDArray[Any]] = cold,
                    scales: npt.NDArray[np.float32] | None = scales,
                    encoding: str = encoding,
                    exact: bool = exact,
                    count: int = count,
                ) -> object:
                    return kernels.matmul_encoded(x[:count], next(data), scales, encoding, exact)

                yield f"{encoding}, {kind} activations, S={count}", (data.nbytes, call)


def expert_jobs(rng: np.random.Generator) -> Iterator[tuple[str, tuple[int, Callable[[], object]]]]:
    """One token (and 32) through an MXFP4 expert."""
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
        for count in (1, 32):

            def call(exact: bool = exact, count: int = count) -> object:
                return kernels.expert_forward(z[:count], next(cold), *matrices, exact=exact)

            yield f"mxfp4 expert, {'float32' if exact else 'int8'} activations, S={count}", (payload.nbytes, call)


def quantize_jobs(rng: np.random.Generator) -> Iterator[tuple[str, tuple[int, Callable[[], object]]]]:
    """bfloat16 rows to int8 and int4, in bytes of source; one thread by design, the repacker streams rows."""
    bf16 = (rng.standard_normal((ROWS, HIDDEN), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    cold = copies(bf16)
    int8, scales8 = kernels.quantize_int8(bf16)
    int4, scales4 = kernels.quantize_int4(bf16)
    yield (
        "quantize bf16 to int8 (source)",
        (bf16.nbytes, lambda: kernels.quantize_int8_into(next(cold), int8, scales8)),
    )
    yield (
        "quantize bf16 to int4 (source)",
        (bf16.nbytes, lambda: kernels.quantize_int4_into(next(cold), int4, scales4)),
    )


if __name__ == "__main__":
    main()
