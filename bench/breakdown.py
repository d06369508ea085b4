"""The time of a decode step by what it is for: every call of a kernel is timed from outside.

    python bench/breakdown.py --container HOME [--past 4096] [--steps 16] [--threads N] [--out FILE.json]

The functions of `k3.kernels` that the engine calls are wrapped for the length of the measurement, so that nothing
of it is in the engine. What the kernels do not account for is Python: routing, leases, sums, and what stands
around the kernels' own functions; the clocks' bookkeeping is timed too and counts for nothing. All experts are in
memory. For each kind of work the table shows its calls, bytes and time in a step, what it reached in GB/s and of
the memory's rate, and the products it made; `--out` has the same for bench/roofline.py.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from loaded import Loaded, loaded

from k3 import kernels
from k3.engine.report.machine_rates import MemoryMeter

BY_TENSOR = (
    (r"self_attn\.(f_a|f_b|b)_proj", "KDA: decay and beta projections"),
    (r"self_attn\.(q_a|q_b|kv_a)_?proj|kv_a_proj_with_mqa", "MLA: q, kv projections"),
    (r"self_attn\.[qkvgo]_proj", "attention: q, k, v, g, o projections"),
    (r"block_sparse_moe\.gate\.", "router"),
    (r"routed_expert_(down|up)_proj", "experts: latent down, up"),
    (r"shared_experts", "shared experts"),
    (r"mlp\.(gate|up|down)_proj", "dense MLP"),
    (r"lm_head", "head"),
)

BY_FUNCTION = {
    "kda_heads": "KDA: states, convolutions, gates",
    "kda_step": "KDA: states, convolutions, gates",
    "short_conv": "KDA: states, convolutions, gates",
    "kda_gate": "KDA: states, convolutions, gates",
    "l2_normalize": "KDA: states, convolutions, gates",
    "absorb_query": "MLA: latent attention",
    "latent_attention": "MLA: latent attention",
    "expand_value": "MLA: latent attention",
    "expert_forward": "experts",
    "residual_mix": "residual mixes",
}

REST = "norms, gates, top-k"
PYTHON = "Python"


@dataclass
class Work:
    """The time of one kind of work, over all steps."""

    calls: int = 0
    ns: int = 0
    weight_bytes: int = 0
    products: int = 0


class Clock:
    """A clock that adds up the calls of wrapped functions; a call inside another one counts for itself only.

    `own_ns` is what the adding up took.
    """

    def __init__(self) -> None:
        self.work: dict[str, Work] = {}
        self.own_ns = 0
        self._inner_ns = 0

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a clock around it."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            outside_ns, self._inner_ns = self._inner_ns, 0
            began_ns = time.perf_counter_ns()
            try:
                return function(*arguments, **named)
            finally:
                ended_ns = time.perf_counter_ns()
                taken_ns = ended_ns - began_ns
                work = self.work.setdefault(label(name, arguments), Work())
                nbytes, products = touched(name, arguments)
                work.calls += 1
                work.ns += taken_ns - self._inner_ns
                work.weight_bytes += nbytes
                work.products += products
                own_ns = time.perf_counter_ns() - ended_ns
                self.own_ns += own_ns
                self._inner_ns = outside_ns + taken_ns + own_ns

        return timed


def label(name: str, arguments: tuple[Any, ...]) -> str:
    """Return what a call of a kernel is for: by the weight it multiplies, else by the function."""
    if name == "matmul":
        return tensor_label(next(filter(is_weight, arguments)).name)
    return BY_FUNCTION.get(name, REST)


@functools.cache
def tensor_label(name: str) -> str:
    """Return what a product with a weight is for."""
    return next((kind for pattern, kind in BY_TENSOR if re.search(pattern, name)), REST)


def touched(name: str, arguments: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes that a call must read from memory (and write, for a state), and multiplications that it makes."""
    if name == "expert_forward":
        z, payload, *matrices = arguments
        return payload.nbytes, len(z) * sum(matrix.rows * matrix.columns for matrix in matrices)
    if name == "kda_heads":
        q, windows, memory = arguments[0], arguments[6], arguments[7]
        return 2 * (memory.nbytes + windows.nbytes), 4 * len(q) * memory.size
    if name == "latent_attention":
        q, _, latent, rope = arguments[:4]
        return latent.nbytes + rope.nbytes, q.shape[0] * q.shape[1] * (2 * latent.size + rope.size)
    for tensor in filter(is_weight, arguments):
        nbytes = tensor.data.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)
        products = len(arguments[0]) * int(np.prod(tensor.shape))
        # absorb_query and expand_value take a part each of the rows of one matrix
        return (nbytes, products) if name == "matmul" else (nbytes // 2, products // 2)
    return 0, 0


def is_weight(value: Any) -> bool:
    """Return whether an argument is a dense weight as stored."""
    return hasattr(value, "scales") and hasattr(value, "encoding")


@contextlib.contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """Wrap every function of k3.kernels that computes, and unwrap it at the end."""
    originals = {
        name: value
        for name in kernels.__all__
        if callable(value := getattr(kernels, name)) and not isinstance(value, type)
        and not name.startswith(("get_", "set_", "cpu_", "usable_", "quantize_"))
    }  # fmt: skip
    try:
        for name, function in originals.items():
            setattr(kernels, name, clock.wrap(name, function))
        yield
    finally:
        for name, function in originals.items():
            setattr(kernels, name, function)


def measure(engine: Loaded, meter: MemoryMeter, past: int, steps: int) -> dict[str, Any]:
    """Make steps with and without the clocks, in turns. Times are in ns per step, rates in bytes per second."""
    session, ids = engine.session(past, 2 * steps + 2), engine.ids(2 * steps + 2, 1)
    session.step(ids[0])
    clock = Clock()
    rates: list[float] = []
    bare_ns: list[int] = []
    clocked_ns: list[int] = []
    misses_before = engine.experts.stats().misses
    for number, token in enumerate(ids[1 : 2 * steps + 1]):
        rates.append(meter.bytes_per_s())
        with clocked(clock) if number % 2 else contextlib.nullcontext():
            began_ns = time.perf_counter_ns()
            session.step(token)
            (clocked_ns if number % 2 else bare_ns).append(time.perf_counter_ns() - began_ns)
    if engine.experts.stats().misses != misses_before:
        raise SystemExit("experts were read from the drive: this is no cached step")
    work = {
        name: {key: value / steps for key, value in asdict(one).items()}
        for name, one in sorted(clock.work.items(), key=lambda item: -item[1].ns)
    }
    total_ns = statistics.fmean(clocked_ns) - clock.own_ns / steps
    work[PYTHON] = {
        "calls": 0, "ns": total_ns - sum(one["ns"] for one in work.values()), "weight_bytes": 0, "products": 0,
    }  # fmt: skip
    experts = len(engine.moe_layers) * engine.model.config.moe.top_k
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cpu": cpu_name(),
        "variant": kernels.cpu_variant(),
        "threads": kernels.get_threads(),
        "past": past,
        "step_ns": statistics.median(bare_ns),
        "clocked_ns": total_ns,
        "touched_bytes": engine.traffic.pass_bytes(1, past, experts),
        "memory_rate": statistics.median(rates),
        "product_rate": product_rate(),
        "work": work,
    }


def product_rate() -> float | None:
    """Integer products per second that the cores can make at all, where the kernels can tell."""
    from k3.kernels import _kernels

    probe: Callable[[int], int] | None = getattr(_kernels, "probe_dots", None)
    if probe is None:
        return None
    rates = []
    for _ in range(5):
        began_s = time.perf_counter()
        products = probe(1_000_000)
        rates.append(products / (time.perf_counter() - began_s))
    return statistics.median(rates)


def table(result: dict[str, Any]) -> str:
    """Return the table for people, as Markdown."""
    step_ns, rate = result["clocked_ns"], result["memory_rate"]
    lines = [
        "| work | calls | MB | ms | of the step | GB/s | of memory | G products/s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in result["work"].items():
        speed, products = one["weight_bytes"] / one["ns"], one["products"] / one["ns"]
        cells = [
            name, f"{one['calls']:.0f}", f"{one['weight_bytes'] / 1e6:.1f}", f"{one['ns'] / 1e6:.2f}",
            f"{one['ns'] / step_ns:.1%}", f"{speed:.1f}" if speed else "",
            f"{speed * 1e9 / rate:.2f}" if speed else "", f"{products:.1f}" if products else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    total = result["touched_bytes"]
    lines.append(
        f"| **the step** | | {total / 1e6:.1f} | {step_ns / 1e6:.2f} | 100.0% | {total / step_ns:.1f} | "
        f"{total / step_ns * 1e9 / rate:.2f} | |"
    )
    return "\n".join(lines)


def main() -> None:
    """Print the table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--container", type=Path, required=True)
    parser.add_argument("--past", type=int, default=4096, help="tokens in the context before")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    tokens = arguments.past + 2 * arguments.steps + 2
    with (
        loaded(arguments.container, threads=arguments.threads, tokens=tokens) as engine,
        MemoryMeter(kernels.get_threads()) as meter,
    ):
        engine.warm()
        result = measure(engine, meter, arguments.past, arguments.steps)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{result['variant']}, {result['threads']} threads, {result['past']} tokens before; memory "
        f"{result['memory_rate'] / 1e9:.1f} GB/s; a step without the clocks {result['step_ns'] / 1e6:.1f} ms"
    )
    print(table(result))
    print(json.dumps({"breakdown": result}))


def cpu_name() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
