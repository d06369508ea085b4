"""k3-repack: parse, call, print. Environment variables are read here and nowhere below."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from k3.base.cli_support import (
    Command,
    Progress,
    echo,
    emit_json,
    exit_code_help,
    format_size,
    run,
    version_option,
)  # fmt: skip
from k3.base.errors import ExitCode
from k3.base.option_types import SizeType, Whole, directories_option, short
from k3.base.presence import is_there
from k3.base.safe_text import counted
from k3.checkpoint.odd_experts import odd_experts_note
from k3.container.layout import VERSION
from k3.model.kinds import MANIFEST_NAME
from k3.model.tensor_recipe import MATRIX_ENCODINGS, Recipe
from k3.repack import interrupts
from k3.repack.comparison import Cause, Comparison
from k3.repack.jobs import WANTED_MAX
from k3.repack.plan import Plan
from k3.repack.preflight import DriveNeed, check_file_sizes, check_space, drive_needs, estimate
from k3.repack.probe import source_jobs
from k3.repack.repack_request import RepackRequest
from k3.repack.root_marks import check_marks
from k3.repack.run import (
    RepackResult,
    Watcher,
    model_notes,
    open_source,
    plan_for,
    read_small_files,
    repack,
    root_directories,
    verify_full,
)

_CODES = (
    ExitCode.OK, ExitCode.DAMAGED, ExitCode.USAGE, ExitCode.SOURCE, ExitCode.INCOMPLETE, ExitCode.NOT_A_CONTAINER,
    ExitCode.DRIVE, ExitCode.SPACE, ExitCode.RESUME, ExitCode.INTERRUPTED,
)  # fmt: skip
_BITS = click.Choice([str(bits) for bits in MATRIX_ENCODINGS])
_INTERRUPTED = "nothing is lost; run the same command again to continue"


class _Shares(click.ParamType[tuple[int, ...]]):
    name = "7,3,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            shares = tuple(int(text) for text in str(value).split(","))
        except ValueError:
            self.fail(f"{short(value)} is not a list of whole numbers", param, ctx)
        if not all(1 <= share <= 1_000_000 for share in shares):
            self.fail(f"{short(value)}: each share must be between 1 and 1,000,000", param, ctx)
        return shares


class _Layers(click.ParamType[tuple[int, ...]]):
    name = "0-3,5"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        layers: set[int] = set()
        for text in str(value).split(","):
            first, dash, last = text.partition("-")
            bounds = [first, last if dash else first]
            if not all(bound.isascii() and bound.isdecimal() and len(bound) < 7 for bound in bounds):
                self.fail(f"{short(text)} is not a layer number or a range such as 0-3", param, ctx)
            start, stop = int(first), int(last if dash else first)
            if stop < start or stop - start > 100_000:
                self.fail(f"{text!r} is not an ascending range", param, ctx)
            layers.update(range(start, stop + 1))
        return tuple(sorted(layers))


class _Display(Watcher):
    """Shows phases as progress bars, or as JSON lines."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._progress: Progress | None = None
        self._told: set[str] = set()

    def phase(self, what: str, total_bytes: int) -> None:
        self.close()
        self._progress = Progress(what, total_bytes, as_json=self._as_json)

    def item(self, name: str) -> None:
        if self._progress is not None:
            self._progress.item(name)

    def advance(self, nbytes: int) -> None:
        if self._progress is not None:
            self._progress.advance(nbytes)

    def note(self, text: str) -> None:
        if text in self._told:
            return
        self._told.add(text)
        if self._as_json:
            emit_json("note", text=text)
        else:
            echo(f"note: {text}", err=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None


@click.command(cls=Command, epilog=exit_code_help(_CODES))
@click.argument("snapshot", type=click.Path(path_type=Path))
@click.argument("container", type=click.Path(path_type=Path))
@directories_option("--source-dirs", help="Further directories of a split snapshot.")
@directories_option("--dirs", help="Drives for the expert pieces.", show_envvar=True, envvar="K3_DIRS")
@click.option("--shares", type=_Shares(), help="Each drive's part of every expert. Default: measured.")
@click.option(
    "--bits",
    type=_BITS,
    default="8",
    show_envvar=True,
    envvar="K3_BITS",
    show_default=True,
    help="Bits of all other matrices.",
)
@click.option(
    "--mla-bits",
    type=_BITS,
    default="8",
    show_envvar=True,
    envvar="K3_MLA_BITS",
    show_default=True,
    help="Bits of MLA matrices.",
)
@click.option(
    "--head-bits",
    type=_BITS,
    default="8",
    show_envvar=True,
    envvar="K3_HEAD_BITS",
    show_default=True,
    help="Bits of lm_head.",
)
@click.option("--in-place", is_flag=True, help="Write the dense blob only; experts stay in the snapshot.")
@click.option("--layers", type=_Layers(), help="Only these decoder layers.")
@click.option("--plan", "plan_only", is_flag=True, help="Print what would be done, and write nothing.")
@click.option("--verify-full", "verify", is_flag=True, help="Prove every byte afterwards, read from the drives.")
@click.option(
    "--bwlimit", type=SizeType(least=1), metavar="SIZE", help="Most bytes per second read from the source."
)
@click.option(
    "--jobs",
    type=Whole(least=1, most=WANTED_MAX),
    metavar="N",
    help="Shards streamed at once. Default: as many as the processors hash; one from a spinning drive.",
)
@click.option(
    "--direct/--no-direct",
    default=True,
    show_envvar=True,
    envvar="K3_DIRECT",
    help="Go past the page cache (default).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line on stdout.")
@version_option(VERSION)
def main(
    snapshot: Path,
    container: Path,
    source_dirs: tuple[Path, ...],
    dirs: tuple[Path, ...],
    shares: tuple[int, ...] | None,
    bits: str,
    mla_bits: str,
    head_bits: str,
    in_place: bool,
    layers: tuple[int, ...] | None,
    plan_only: bool,
    verify: bool,
    bwlimit: int | None,
    jobs: int | None,
    direct: bool,
    as_json: bool,
) -> None:
    """Repack the Hugging Face SNAPSHOT into the directory CONTAINER, reading each shard once.

    Experts keep their bytes and get page-aligned places, cut over --dirs in proportion to the drives' speed;
    dense matrices are quantized. The same command continues an unfinished run.
    """
    if shares is not None and len(shares) != len(dirs or (container,)):
        raise click.UsageError(f"--shares has {len(shares)} numbers for {len(dirs or (container,))} directories")
    if in_place and (dirs or shares):
        raise click.UsageError(
            "--in-place leaves the experts where they are: --dirs (or K3_DIRS) and --shares do not apply"
        )
    request = RepackRequest(
        sources=(snapshot, *source_dirs), home=container, drives=dirs, shares=shares,
        recipe=Recipe(int(bits), int(mla_bits), int(head_bits)), in_place=in_place, layers=layers,
        direct=direct, bytes_per_s=bwlimit, verify_full=verify, jobs=jobs,
    )  # fmt: skip
    interrupts.install()
    body: Callable[[], int | None]
    if plan_only:
        body, interrupted = lambda: _print_plan(request, as_json), "nothing was written"
    else:
        body, interrupted = lambda: _repack(request, as_json), _INTERRUPTED
    run(body, as_json=as_json, on_interrupt=interrupted)


def _repack(request: RepackRequest, as_json: bool) -> int:
    display = _Display(as_json)
    try:
        start = time.monotonic()
        result = repack(request, display)
        display.close()
        _print_result(request, result, time.monotonic() - start, as_json)
        if result.huge_pages.refused:
            display.note(result.huge_pages.line())
        if not request.verify_full:
            return ExitCode.OK
        start = time.monotonic()
        comparison = verify_full(request, display)
        display.close()
        if comparison.huge_pages.refused and not result.huge_pages.refused:
            display.note(comparison.huge_pages.line())
        if note := odd_experts_note(comparison.odd):
            display.note(note)
        return _print_verdict(comparison, time.monotonic() - start, as_json)
    finally:
        display.close()


def _print_result(request: RepackRequest, result: RepackResult, seconds: float, as_json: bool) -> None:
    manifest = result.manifest
    fields: dict[str, Any] = {
        "container": manifest.container,
        "already_complete": result.already_complete,
        "read_bytes": result.read_bytes,
        "written_bytes": result.written_bytes,
        "rechecked_bytes": 0 if result.recheck is None else result.recheck.checked_bytes,
        "remade_units": 0
        if result.recheck is None
        else len(result.recheck.bad_experts + result.recheck.bad_tensors),
        "seconds": round(seconds, 3),
        "gb_per_s": round(result.read_bytes / seconds / 1e9, 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "skipped": list(manifest.skipped),
        "unknown": list(manifest.unknown),
    }
    if as_json:
        emit_json("repacked" if request.verify_full else "summary", **fields)
        return
    if result.already_complete:
        echo(f"{request.home} is complete already: container {manifest.container}. Nothing was written.")
        return
    echo(
        f"repacked {format_size(result.read_bytes)} in {seconds:.1f} s "
        f"({format_size(result.read_bytes / seconds)}/s), wrote {format_size(result.written_bytes)}, "
        f"peak memory {format_size(fields['peak_rss_bytes'])}"
    )
    echo(f"container {manifest.container} in {request.home}")
    for what, names in (("skipped (vision)", manifest.skipped), ("passed through unknown", manifest.unknown)):
        if names:
            echo(f"{what}: {len(names)} tensors: {_some(names)}")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", … (all in manifest.json)" if len(names) > 3 else "")


def _print_verdict(comparison: Comparison, seconds: float, as_json: bool) -> int:
    container, shards = comparison.ledger, comparison.shards
    read_bytes = shards.proven_bytes + container.proven_bytes
    rate = read_bytes / seconds / 1e9
    way = "past the page cache (O_DIRECT)"
    if comparison.through_page_cache:
        way = f"page cache dropped first, O_DIRECT not taken in {', '.join(comparison.through_page_cache)}"
    if as_json:
        emit_json(
            "summary",
            verdict=comparison.verdict,
            exit_code=int(comparison.exit_code),
            **container.counts(),
            source_bytes=shards.proven_bytes,
            source_required_bytes=shards.required_bytes,
            read_bytes=read_bytes,
            seconds=round(seconds, 3),
            gb_per_s=round(rate, 3),
            experts=comparison.experts,
            tensors=comparison.tensors,
            differences=comparison.difference_count,
            first_differences=[
                {"cause": d.cause.value, "problem": d.problem, **d.place()} for d in comparison.differences
            ],
            through_page_cache=list(comparison.through_page_cache),
            huge_pages=asdict(comparison.huge_pages),
        )
    else:
        for difference in comparison.differences:
            echo(f"{difference.cause.value}: {difference}", err=True)
        echo(
            f"verified: {_verdict(comparison)}: compared {container.proven_bytes:,} of "
            f"{container.required_bytes:,} bytes of {counted(comparison.experts, 'expert')} and "
            f"{counted(comparison.tensors, 'tensor')} with the source, hashed {shards.proven_bytes:,} of its "
            f"{shards.required_bytes:,} bytes, {format_size(read_bytes / seconds)}/s read, {way}"
        )
    return int(comparison.exit_code)


def _verdict(comparison: Comparison) -> str:
    """Return the verdict in capitals, with what stands against it."""
    if comparison.equal:
        return "EQUAL"
    different = comparison.counts.get(Cause.DIFFERENT, 0)
    uncompared = comparison.difference_count - different
    parts = [counted(different, "difference")] if different or not uncompared else []
    if uncompared:
        parts.append(f"{counted(uncompared, 'place')} not compared")
    return f"{'NOT EQUAL' if different else 'NOT PROVEN'}, {', '.join(parts)}"


def _print_plan(request: RepackRequest, as_json: bool) -> int:
    snapshot = open_source(request)
    small_files = read_small_files(request, snapshot)
    if not is_there(request.home / MANIFEST_NAME):
        check_marks(request)
    notes = [*snapshot.warnings, *model_notes(request, snapshot), *small_files.left_behind]
    drives = len(request.drives or (request.home,))
    assumed = request.shares is None and drives > 1 and not request.in_place
    shares = request.root_shares(request.shares or (1,) * drives)
    plan = plan_for(request, snapshot, shares)
    directories = root_directories(request, plan)
    jobs = source_jobs(request.jobs, snapshot)
    needs = drive_needs(plan, directories, small_files.total_bytes, jobs)
    expected = estimate(plan, needs, jobs)
    if as_json:
        emit_json(
            "summary",
            read_bytes=plan.read_bytes,
            files=[
                {"path": str(directories[f.root] / f.path), "bytes": f.size_bytes}
                for f in plan.files
                if f.kind != "source"
            ],
            drives=[{**asdict(need), "missing_bytes": need.missing_bytes} for need in needs],
            shares=[root.share for root in plan.roots if root.kind != "source"], shares_assumed=assumed,
            skipped=list(snapshot.vision),
            unknown=list(snapshot.unknown), jobs=jobs.shards, seconds=expected.seconds, limit=expected.limit,
            warnings=notes,
        )  # fmt: skip
    else:
        _print_plan_text(plan, directories, needs, assumed)
        if expected.seconds is None:
            echo("time: under a minute (too few bytes to measure a rate)")
        else:
            echo(
                f"time: about {_duration(expected.seconds)} at {expected.read_gb_per_s:.2f} GB/s measured on the "
                f"source's drive, writes taken to be as fast, SHA-256 at {expected.hash_gb_per_s:.2f} GB/s "
                f"({counted(jobs.shards, 'shard')} at once); the limit is {expected.limit}"
            )
        for warning in notes:
            echo(f"note: {warning}")
    check_file_sizes(plan, directories)
    check_space(needs)
    return ExitCode.OK


def _print_plan_text(plan: Plan, directories: dict[int, Path], needs: list[DriveNeed], assumed: bool) -> None:
    echo(f"{'bytes':>19}  destination")
    for file in plan.files:
        if file.kind != "source":
            echo(f"{file.size_bytes:>19,}  {directories[file.root] / file.path}")
    echo(f"read:  {plan.read_bytes:,} bytes in {len(plan.snapshot.shards)} shards, each once")
    echo(f"write: {sum(plan.write_bytes().values()):,} bytes")
    for need in needs:
        fits = "fits" if not need.missing_bytes else f"{need.missing_bytes:,} bytes short"
        free = "room unknown" if need.free_bytes is None else f"{need.free_bytes:,} free: {fits}"
        echo(
            f"drive of {', '.join(need.directories)}: {need.write_bytes:,} bytes to hold "
            f"({need.present_bytes:,} there already), {need.extra_bytes:,} for catalog, journal and scratch, "
            f"{free}"
        )
    if assumed:
        echo("shares: measured when the run begins; equal ones are assumed here")
    for what, names in (
        ("skipped (vision)", plan.snapshot.vision),
        ("unknown, passed through", plan.snapshot.unknown),
    ):
        if names:
            echo(f"{what}: {len(names)} tensors: {_some(names)}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    sys.exit(main())
