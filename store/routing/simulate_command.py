"""`k3-store simulate`: parse, call, print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3.base import cli_support
from k3.base.cli_support import echo
from k3.base.errors import ExitCode

if TYPE_CHECKING:
    from k3.store.routing.simulate import Result
    from k3.store.routing.trace_requests import Key, Requests

DEFAULT_CACHE_GB = "8,16,32,64,128"
PIN_SHARE = 0.5
"""Part of the room that pinned experts take in a replay of pin-lru."""

_CODES = (ExitCode.OK, ExitCode.DAMAGED, ExitCode.USAGE, ExitCode.DRIVE, ExitCode.UNSUPPORTED)


class _Sizes(click.ParamType["tuple[float, ...]"]):
    """Cache sizes in GB: 8,16,32."""

    name = "gb,gb,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            sizes = tuple(float(item) for item in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of sizes in GB such as 8,16,32", param, ctx)
        if not all(0 < size < 1e6 for size in sizes):
            self.fail(f"{value!r}: each size must be above 0 and below a million GB", param, ctx)
        return sizes


class _Policies(click.ParamType["tuple[str, ...]"]):
    """Names of policies: lru,s3-fifo."""

    name = "name,name,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        from k3.store._store import policy_names

        if isinstance(value, tuple):
            return value
        names = tuple(str(value).split(","))
        for name in names:
            if name not in policy_names():
                self.fail(f"{name!r} is not a policy; there are {', '.join(policy_names())}", param, ctx)
        if len(set(names)) != len(names):
            self.fail(f"{value!r} names a policy twice", param, ctx)
        return names


@click.command(
    "simulate",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
    epilog=cli_support.exit_code_help(_CODES),
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, readable=False),
    required=True,
    help="Written by k3-run --route-trace.",
)
@click.option("--cache-gb", type=_Sizes(), default=DEFAULT_CACHE_GB, help="Cache sizes to try.")
@click.option(
    "--policies",
    type=_Policies(),
    help="Policies to try.  [default: all; pin-lru only with --pins-from]",
)
@click.option(
    "--pins-from",
    type=click.Path(path_type=Path, readable=False),
    help="For pin-lru: another trace of the same model; half of the room is pinned to what it used most.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line on stdout.")
def simulate_command(
    trace: Path,
    cache_gb: tuple[float, ...],
    policies: tuple[str, ...] | None,
    pins_from: Path | None,
    as_json: bool,
) -> None:
    """Replay a routing trace against cache policies and print their hit rates.

    "belady" is the best possible with knowledge of the future, "compulsory" a cache without bounds.
    """

    def body() -> None:
        from k3.store._store import policy_names
        from k3.store.routing.trace_requests import Requests

        if policies is None:
            names = tuple(name for name in policy_names() if name != "pin-lru" or pins_from is not None)
        elif "pin-lru" in policies and pins_from is None:
            raise click.UsageError("pin-lru pins what another trace used most: give --pins-from.")
        else:
            names = policies
        requests = Requests.from_trace(trace)
        favourites = [] if pins_from is None else _favourites(requests, pins_from)
        _replay(requests, cache_gb, names, favourites, as_json=as_json)

    cli_support.run(body, as_json=as_json)


def _favourites(requests: Requests, pins_from: Path) -> list[Key]:
    """All experts that the other trace used, most used first. UsageError when it is of other layers."""
    from k3.store.routing.trace_requests import Requests

    other = Requests.from_trace(pins_from)
    if other.header.counts != requests.header.counts:
        raise click.UsageError(f"--pins-from {pins_from} is a trace of a model with other layers or experts.")
    return other.most_wanted(len(other.experts))


def _replay(
    requests: Requests,
    cache_gb: Sequence[float],
    policies: Sequence[str],
    favourites: Sequence[Key],
    *,
    as_json: bool,
) -> None:
    """Replay and print, size by size."""
    from k3.store.routing.simulate import BELADY, compulsory, simulate

    table = _JsonTable() if as_json else _TextTable([*policies, BELADY])
    table.begin(requests, compulsory(requests))
    for size_gb in cache_gb:
        slots = int(size_gb * 1e9) // requests.header.slot_bytes
        if slots == 0:
            raise click.UsageError(
                f"--cache-gb {size_gb:g} has no room for one expert of {requests.header.slot_bytes} bytes."
            )
        results = []
        for name in (*policies, BELADY):
            pins = favourites[: int(slots * PIN_SHARE)] if name == "pin-lru" else ()
            results.append(simulate(requests, name, slots, pins))
        table.row(size_gb, results)


class _TextTable:
    """Hit rates in percent, a line for each size."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._widths = [max(7, len(name)) for name in columns]
        self._columns = columns

    def begin(self, requests: Requests, most: Result) -> None:
        """Print what was traced, and the head of the table."""
        header = requests.header
        pass_bytes = header.top_k * sum(entry.payload_bytes for entry in header.layers)
        echo(f"model       {header.model}")
        echo(f"trace       {requests.passes} passes, {requests.tokens} tokens, {len(header.layers)} layers")
        echo(f"experts     {most.hits + most.misses} wanted in {len(requests)} sets")
        echo(f"one token   {header.top_k * len(header.layers)} experts, {pass_bytes / 1e9:.3f} GB")
        echo(
            f"compulsory  {most.misses} misses, {most.bytes_read / 1e9:.3f} GB "
            f"(without bounds {100 * most.hit_rate:.1f} % would hit)"
        )
        names = "  ".join(f"{name:>{width}}" for name, width in zip(self._columns, self._widths, strict=True))
        echo(f"\nHits in percent of the wanted experts\ncache GB    slots  {names}")

    def row(self, size_gb: float, results: Sequence[Result]) -> None:
        """One size."""
        rates = "  ".join(
            f"{100 * result.hit_rate:{width}.1f}" for result, width in zip(results, self._widths, strict=True)
        )
        echo(f"{size_gb:>8g} {results[0].cache_slots:>8}  {rates}")


class _JsonTable:
    """The same as JSON lines."""

    def begin(self, requests: Requests, most: Result) -> None:
        """Print what was traced."""
        cli_support.emit_json(
            "trace", model=requests.header.model, passes=requests.passes, tokens=requests.tokens,
            layers=len(requests.header.layers), top_k=requests.header.top_k, sets=len(requests),
            slot_bytes=requests.header.slot_bytes, wanted=most.hits + most.misses,
            compulsory_misses=most.misses, compulsory_bytes=most.bytes_read,
        )  # fmt: skip

    def row(self, size_gb: float, results: Sequence[Result]) -> None:
        """One size."""
        for result in results:
            cli_support.emit_json("result", cache_gb=size_gb, **result.as_dict())
