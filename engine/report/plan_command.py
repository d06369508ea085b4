"""The body of `k3-run --plan`: the memory of a run, whether it fits, the cost of a token. Main thread only.

Reads headers, the configuration and, unless the rates are given, some experts to time them; loads nothing and
writes nothing. The run itself makes the same plan (`memory_plan.plan_memory`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from k3 import kernels
from k3.base.cli_support import emit_json, format_size
from k3.base.memory_limit import Limit, gb, memory_limits
from k3.base.presence import is_there
from k3.engine.definition.settings import RunSettings
from k3.engine.definition.state_size import state_bytes
from k3.engine.launch.given_prompt import checked_capacity
from k3.engine.launch.launched import opened_model
from k3.engine.launch.memory_plan import MemoryPlan, plan_memory
from k3.engine.launch.model_files import OpenedModel
from k3.engine.report.machine_rates import MemoryMeter, drive_rate
from k3.engine.report.token_cost import Forecast, forecast_pass
from k3.engine.run.run_request import read_request

ASSUMED_TOKENS = 1000
"""Tokens of the context if neither a prompt nor --max-tokens is given."""

DAEMON_READ_BYTES_MIN = 1_000_000_000
"""Fewer bytes than this say little about the rate of a daemon's drives."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second and the origin of the number; None when it is not known."""

    bytes_per_s: float | None
    origin: str


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Rates that are given and need not be measured."""

    drive_bytes_per_s: float | None = None
    memory_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan: all numbers that are printed."""

    opened: OpenedModel
    daemon: Mapping[str, Any] | None  # status of the daemon that serves the model
    memory: MemoryPlan
    limits: list[Limit]
    assumed: bool  # True when the context has `ASSUMED_TOKENS`
    chunk: int
    token: Forecast
    prompt: Forecast
    drive: Rate
    read_memory: Rate


def print_plan(settings: RunSettings, options: PlanOptions) -> None:
    """Print the plan of a run. UnsupportedError, after printing, when the run does not fit."""
    with opened_model(settings.model) as opened:
        planned = make_plan(opened, settings, options)
        if settings.as_json:
            emit_json("plan", **plan_dict(planned))
        else:
            for line in plan_lines(planned):
                sys.stdout.write(line + "\n")
            sys.stdout.flush()
        planned.memory.check()


def make_plan(opened: OpenedModel, settings: RunSettings, options: PlanOptions) -> Planned:
    """Return the plan of a run: its memory, the limits, the machine's rates, the cost of a token."""
    if settings.model.threads is not None:
        kernels.set_threads(settings.model.threads)
    capacity, assumed = _capacity(opened, settings)
    limits = memory_limits()
    limit = min([Limit(math.inf, "nothing"), *limits], key=lambda one: one.free_bytes)
    memory = plan_memory(
        opened, settings.model, limit,
        capacity=capacity, chunk=settings.chunk, every_logit=settings.logits is not None,
    )  # fmt: skip
    chunk = min(settings.chunk, capacity)
    daemon = opened.daemon_status()
    hit_share = _hit_share(memory, daemon)
    tokens = {
        count: forecast_pass(
            opened.source,
            opened.config,
            opened.names,
            hit_share=hit_share,
            tokens=count,
            position=capacity - count,
        )
        for count in {1, chunk}
    }
    return Planned(
        opened=opened,
        daemon=daemon,
        memory=memory,
        limits=limits,
        assumed=assumed,
        chunk=chunk,
        token=tokens[1],
        prompt=tokens[chunk],
        drive=_drive(opened, options, daemon),
        read_memory=_memory(options),
    )


def _capacity(opened: OpenedModel, settings: RunSettings) -> tuple[int, bool]:
    """Return the tokens of the context, and whether they are assumed."""
    path = settings.state
    if settings.ids is None and settings.text is None and (path is None or not is_there(path)):
        if settings.max_tokens is not None:
            prompt_tokens = max(0, settings.max_tokens - settings.generate)
            return checked_capacity(prompt_tokens, settings, opened.config.max_positions), False
        return min(ASSUMED_TOKENS, opened.config.max_positions), True
    with read_request(opened, settings, writable=False) as request:
        return request.capacity, False


def _hit_share(memory: MemoryPlan, daemon: Mapping[str, Any] | None) -> float:
    """Return the share of requested experts that the cache holds, if all experts are used alike."""
    if not memory.experts:
        return 0.0
    if daemon is not None:
        return float(min(daemon["cache"]["slots"], memory.experts) / memory.experts)
    return memory.cached_experts / memory.experts


def _drive(opened: OpenedModel, options: PlanOptions, daemon: Mapping[str, Any] | None) -> Rate:
    """Return the drives' rate: as given, else measured, else what the daemon's drives reached."""
    if options.drive_bytes_per_s is not None:
        return Rate(options.drive_bytes_per_s, "as given")
    layers = [layer for layer in opened.config.layers if layer in opened.config.moe_layers]
    if daemon is not None:
        drives = daemon["drives"]
        if sum(drive["read_bytes"] for drive in drives) < DAEMON_READ_BYTES_MIN:
            return Rate(None, "the daemon has read too little to measure; give --drive-gb-per-s")
        rate = sum(drive["busy_gb_per_s"] for drive in drives) * 1e9
        return Rate(rate, "what the daemon's drives reached while they read")
    measured = drive_rate(opened.source, layers)
    if measured is None:
        return Rate(None, "there are no experts to read")
    if not measured.direct:
        return Rate(measured.bytes_per_s, "measured through the page cache: O_DIRECT does not work here")
    if measured.huge_pages.refused:
        return Rate(measured.bytes_per_s, f"measured; {measured.huge_pages.line()}")
    return Rate(measured.bytes_per_s, "measured, reads of whole experts past the page cache")


def _memory(options: PlanOptions) -> Rate:
    """Return the memory's rate, as given or measured."""
    if options.memory_bytes_per_s is not None:
        return Rate(options.memory_bytes_per_s, "as given")
    threads = kernels.get_threads()
    with MemoryMeter(threads) as meter:
        return Rate(meter.bytes_per_s(), f"measured, {threads} threads reading")


def plan_lines(planned: Planned) -> Iterator[str]:
    """Yield the plan as lines of text."""
    opened, memory, need = planned.opened, planned.memory, planned.memory.need
    config, source = opened.config, opened.source
    moe_layers = sum(layer in config.moe_layers for layer in config.layers)
    yield f"model  {source.identity.weights}"
    yield (
        f"       {len(config.layers)} layers; {moe_layers} with {config.moe.experts} experts "
        f"({format_size(memory.experts * memory.expert_bytes)} in all), of which a token uses {config.moe.top_k}"
    )
    yield ""
    yield from _rows("memory", _memory_rows(planned))
    if planned.daemon is not None:
        shared_bytes = sum(source.dense(name).stored_bytes for name in opened.names)
        yield f"  (The daemon holds the dense weights, {gb(shared_bytes)}, and the expert cache.)"
    yield ""
    yield from _rows("left", [(one.set_by, gb(one.free_bytes)) for one in planned.limits])
    yield (
        f"  The run {'fits' if memory.fits else 'does not fit'}: "
        f"{gb(need.total_bytes)} of {gb(memory.limit.free_bytes)}, set by {memory.limit.set_by}"
    )
    yield ""
    context_bytes = state_bytes(config, 1000) - state_bytes(config, 0)
    yield f"A context takes {gb(state_bytes(config, 0))}, and {gb(context_bytes)} for every 1,000 tokens."
    yield ""
    for rate, name in ((planned.drive, "drives"), (planned.read_memory, "memory")):
        shown = "unknown" if rate.bytes_per_s is None else f"{rate.bytes_per_s / 1e9:.3f} GB/s"
        yield f"{name:<7} {shown} ({rate.origin})"
    yield ""
    yield from _table(planned)
    yield (
        f"  at least: the slower of drives and memory, with {planned.token.hit_share:.1%} of the experts in the "
        "cache, all used alike; arithmetic is not counted"
    )


def _memory_rows(planned: Planned) -> list[tuple[str, str]]:
    """Return the terms of the run's memory as names and numbers."""
    memory, need = planned.memory, planned.memory.need
    guess = " (assumed: give a prompt or --max-tokens)" if planned.assumed else ""
    ahead = f", {memory.prefetch} of them by look-ahead" if memory.prefetch else ""
    rows = [(name, gb(size)) for name, size in memory.parts.items() if size]
    rows.append(("dense weights", gb(need.dense_bytes)))
    if need.load_bytes:
        rows.append(("tensors being loaded, until then", gb(need.load_bytes)))
    rows += [
        (f"context of {memory.capacity:,} tokens{guess}", gb(need.state_bytes)),
        (f"activations, {planned.chunk} tokens a pass", gb(need.activation_bytes)),
        (f"experts being read or multiplied{ahead}", gb(need.working_bytes)),
        (f"expert cache, {memory.cached_experts:,} of {memory.experts:,}", gb(need.cache_bytes)),
        ("at once, at most", gb(need.total_bytes)),
    ]
    return rows


def _rows(title: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    """Yield a title, then names on the left and numbers right-aligned."""
    yield title
    width = max((len(name) for name, _ in rows), default=0)
    number = max((len(text) for _, text in rows), default=0)
    for name, text in rows:
        yield f"  {name:<{width}}  {text:>{number}}"


def _table(planned: Planned) -> Iterator[str]:
    """Yield the table of the cost per token."""
    drive, memory = planned.drive.bytes_per_s, planned.read_memory.bytes_per_s
    yield f"{'per token':<34}{'from drives':>12}{'from memory':>12}{'drives':>10}{'memory':>10}{'at least':>10}"
    for name, one in (
        ("generating", planned.token),
        (f"prompt, {planned.prompt.tokens} tokens a pass", planned.prompt),
    ):
        drive_s, memory_s, least_s = _seconds(one, drive, memory)
        cells = [f"{one.drive_bytes / one.tokens / 1e9:.3f} GB", f"{one.memory_bytes / one.tokens / 1e9:.3f} GB"]
        times = [f"{'?' if s is None else f'{s:.3f} s':>10}" for s in (drive_s, memory_s, least_s)]
        yield f"  {name:<32}" + "".join(f"{cell:>12}" for cell in cells) + "".join(times)


def _seconds(
    one: Forecast, drive: float | None, memory: float | None
) -> tuple[float | None, float | None, float | None]:
    """Return seconds per token by drives and by memory, and the larger; None for those that are not known."""
    drive_s = 0.0 if one.drive_bytes == 0 else None if drive is None else one.drive_s(drive)
    memory_s = None if memory is None else one.memory_s(memory)
    least_s = None if drive_s is None or memory_s is None else max(drive_s, memory_s)
    return drive_s, memory_s, least_s


def plan_dict(planned: Planned) -> dict[str, Any]:
    """Return the plan for programs: bytes, bytes per second, seconds."""
    memory, need, config = planned.memory, planned.memory.need, planned.opened.config
    return {
        "model": planned.opened.source.identity.weights,
        "layers": len(config.layers),
        "fits": memory.fits,
        "memory": {
            "dense_parts": dict(memory.parts),
            "dense_bytes": need.dense_bytes,
            "load_bytes": need.load_bytes,
            "context_tokens": memory.capacity,
            "context_assumed": planned.assumed,
            "context_bytes": need.state_bytes,
            "context_fixed_bytes": state_bytes(config, 0),
            "context_bytes_per_1000_tokens": state_bytes(config, 1000) - state_bytes(config, 0),
            "activation_bytes": need.activation_bytes,
            "working_bytes": need.working_bytes,
            "prefetch": memory.prefetch,
            "cache_bytes": need.cache_bytes,
            "cached_experts": memory.cached_experts,
            "experts": memory.experts,
            "expert_bytes": memory.expert_bytes,
            "total_bytes": need.total_bytes,
        },
        "limits": [{"set_by": one.set_by, "free_bytes": int(one.free_bytes)} for one in planned.limits],
        "limit": memory.limit.set_by,
        "drive": {"bytes_per_s": planned.drive.bytes_per_s, "origin": planned.drive.origin},
        "memory_rate": {"bytes_per_s": planned.read_memory.bytes_per_s, "origin": planned.read_memory.origin},
        "hit_share": planned.token.hit_share,
        "generate": _pass_dict(planned.token, planned),
        "prompt": _pass_dict(planned.prompt, planned),
    }


def _pass_dict(one: Forecast, planned: Planned) -> dict[str, Any]:
    """Return the cost of one kind of pass for programs."""
    drive_s, memory_s, least_s = _seconds(one, planned.drive.bytes_per_s, planned.read_memory.bytes_per_s)
    return {
        "tokens_per_pass": one.tokens,
        "experts_per_pass": round(one.experts, 3),
        "drive_bytes_per_token": round(one.drive_bytes / one.tokens),
        "memory_bytes_per_token": round(one.memory_bytes / one.tokens),
        "drive_s_per_token": drive_s,
        "memory_s_per_token": memory_s,
        "least_s_per_token": least_s,
    }
