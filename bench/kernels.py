"""The rates of the kernels at K3's shapes, against what memory delivers and what the cores can multiply.

    python bench/kernels.py [--threads N] [--rounds 5] [--only PART]

Weights are cold: each call takes another copy, and the copies together are larger than any cache. Copies are made
by NumPy, which asks the kernel for huge pages for arrays of this size; the engine's dense weights have them too.
As in a step of the engine, one call follows the other: the time is that of half the copies.

Ceilings, measured around those calls with as many threads: memory is the faster of reading with the widest loads
and comparing with memcmp, over the other half of the copies, since not all memory of a virtual machine is equally
fast and the host has other guests; the peak is the variant's integer product in a loop on registers. A round
measures every kernel and its ceilings once, the halves in turns; the table shows medians, and ratios are taken
within a round.
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
from typing import Any

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.kernels import _kernels

HIDDEN, LATENT, INNER = 7168, 3584, 3072
ROWS = 4096
COLD_BYTES = 512 << 20
PEAK_ROUNDS = 10_000


@dataclass(frozen=True)
class Job:
    """A call of a kernel with one of the copies of its weights; `products` of int8 that it makes, 0 if none."""

    call: Callable[[npt.NDArray[Any]], object]
    weights: list[npt.NDArray[Any]]
    products: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of one copy."""
        return self.weights[0].nbytes


def main() -> None:
    """Print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=kernels.usable_cpus())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measure only kernels whose name contains this")
    arguments = parser.parse_args()
    kernels.set_threads(arguments.threads)
    rng = np.random.default_rng(0)
    pool = ThreadPoolExecutor(arguments.threads)
    every = dict(product_jobs(rng)) | dict(expert_jobs(rng)) | dict(quantize_jobs(rng))
    jobs = {name: job for name, job in every.items() if arguments.only in name}
    rounds = [{name: measured(job, turn, pool) for name, job in jobs.items()} for turn in range(arguments.rounds)]
    calls = [empty_call() for _ in range(arguments.rounds)]
    print(f"{kernels.cpu_variant()}, {arguments.threads} threads, {statistics.median(calls) * 1e6:.1f} us a call")
    print(f"{'kernel':<38}{'GB/s':>8}{'memory':>8}{'share':>7}{'G/s':>8}{'peak':>8}{'share':>7}")
    for name, job in jobs.items():
        every_round = [figures[name] for figures in rounds]
        line = f"{name:<38}" + columns(job.weight_bytes, every_round, "memory")
        print(line + (columns(job.products, every_round, "peak") if job.products else ""))
    stamp = datetime.now(timezone.utc).date().isoformat()
    head = {"date": stamp, "variant": kernels.cpu_variant(), "threads": arguments.threads}
    sizes = {name: {"bytes": job.weight_bytes, "products": job.products} for name, job in jobs.items()}
    print(json.dumps(head | {"units": "seconds; memory, peak: G per s", "sizes": sizes, "rounds": rounds}))


def columns(amount: int, rounds: list[dict[str, float]], ceiling: str) -> str:
    """Rate, ceiling (both G per second) and share: medians over the rounds."""
    rate = statistics.median(amount / figures["seconds"] / 1e9 for figures in rounds)
    limit = statistics.median(figures[ceiling] for figures in rounds)
    share = statistics.median(amount / figures["seconds"] / 1e9 / figures[ceiling] for figures in rounds)
    return f"{rate:>8.2f}{limit:>8.1f}{share:>7.2f}"


def measured(job: Job, turn: int, pool: ThreadPoolExecutor) -> dict[str, float]:
    """Return a call's seconds, in a row of calls, and what memory and cores deliver just before and after."""
    half = len(job.weights) // 2
    halves = job.weights[:half], job.weights[half : 2 * half]
    own, others = halves[turn % 2], [copy.reshape(-1).view(np.uint8) for copy in halves[(turn + 1) % 2]]
    reading = read(others)
    taken = seconds(lambda: [job.call(copy) for copy in own])
    return {"seconds": taken / half, "memory": max(reading, compared(others, pool)), "peak": peak()}


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read(copies: list[npt.NDArray[np.uint8]]) -> float:
    """GB/s of plain reading, one array after the other."""
    taken = seconds(lambda: [_kernels.probe_read(data) for data in copies])
    return sum(data.nbytes for data in copies) / taken / 1e9


def compared(copies: list[npt.NDArray[np.uint8]], pool: ThreadPoolExecutor) -> float:
    """GB/s of memcmp of neighbours."""
    threads = kernels.get_threads()

    def compare(left: npt.NDArray[np.uint8], right: npt.NDArray[np.uint8]) -> None:
        pairs = zip(np.array_split(left, threads), np.array_split(right, threads), strict=True)
        list(pool.map(lambda pair: kernels.first_difference(*pair), pairs))

    pairs = list(zip(copies[::2], copies[1::2], strict=False))

    def compare_all() -> None:
        for left, right in pairs:
            compare(left, right)

    taken = seconds(compare_all)
    return sum(2 * left.nbytes for left, _ in pairs) / taken / 1e9


def peak() -> float:
    """G int8 products per second."""
    start = time.perf_counter()
    products = _kernels.probe_dots(PEAK_ROUNDS)
    return products / (time.perf_counter() - start) / 1e9


def empty_call() -> float:
    """Seconds that it takes to set all threads to work on next to nothing, one call right after the other."""
    nothing = np.zeros(64, np.uint8)
    return seconds(lambda: [_kernels.probe_read(nothing) for _ in range(200)]) / 200


def copies(array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Return copies of an array, enough of them that none is still in a cache when its turn comes again."""
    return [array, *(array.copy() for _ in range(COLD_BYTES // array.nbytes))]


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
                    data: npt.NDArray[Any],
                    scales: npt.NDArray[np.float32] | None = scales,
                    encoding: str = encoding,
                    exact: bool = exact,
                    count: int = count,
                ) -> object:
                    return kernels.matmul_encoded(x[:count], data, scales, encoding, exact)

                products = 0 if exact else count * ROWS * HIDDEN
                yield f"{encoding}, {kind} activations, S={count}", Job(call, cold, products)


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

            def call(payload: npt.NDArray[Any], exact: bool = exact, count: int = count) -> object:
                return kernels.expert_forward(z[:count], payload, *matrices, exact=exact)

            products = 0 if exact else count * 3 * INNER * LATENT
            kind = "float32" if exact else "int8"
            yield f"mxfp4 expert, {kind} activations, S={count}", Job(call, cold, products)


def quantize_jobs(rng: np.random.Generator) -> Iterator[tuple[str, Job]]:
    """bfloat16 rows to int8 and int4, in bytes of source; one thread by design, the repacker streams rows."""
    bf16 = (rng.standard_normal((ROWS, HIDDEN), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    cold = copies(bf16)
    int8, scales8 = kernels.quantize_int8(bf16)
    int4, scales4 = kernels.quantize_int4(bf16)
    yield "quantize bf16 to int8 (source)", Job(lambda w: kernels.quantize_int8_into(w, int8, scales8), cold)
    yield "quantize bf16 to int4 (source)", Job(lambda w: kernels.quantize_int4_into(w, int4, scales4), cold)


if __name__ == "__main__":
    main()
