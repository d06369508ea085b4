"""k3-verify: parse, call, print. Environment variables are read here and nowhere below."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Any

import click

from k3.base.cli_support import Command, Progress, echo, emit_json, exit_code_help, run, version_option
from k3.base.errors import ContainerError, ExitCode
from k3.base.option_types import Whole, directories_option
from k3.container.layout import VERSION
from k3.verify.against_source import check_against_source, open_source
from k3.verify.digest_check import check_bytes
from k3.verify.finding import Severity
from k3.verify.report import Report
from k3.verify.sample import Selection, parse_selection
from k3.verify.structure import Structure, check_structure

_CODES = (
    ExitCode.OK, ExitCode.DAMAGED, ExitCode.USAGE, ExitCode.SOURCE, ExitCode.INCOMPLETE, ExitCode.NOT_A_CONTAINER,
    ExitCode.DRIVE, ExitCode.UNSUPPORTED, ExitCode.INTERRUPTED,
)  # fmt: skip


class _Selection(click.ParamType[Selection]):
    name = "n/t|p%|SIZE|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Selection:
        if isinstance(value, Selection):
            return value
        try:
            return parse_selection(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(cls=Command, epilog=exit_code_help(_CODES))
@click.argument("container", type=click.Path(path_type=Path))
@directories_option("--dirs", help="Where to look for roots that moved.", show_envvar=True, envvar="K3_DIRS")
@click.option("--read-data", "selection", type=_Selection(), help="Read extents back: 1/5, 2.5%, 50G or all.")
@directories_option("--source", help="Compare every byte with this snapshot.")
@click.option("--seed", type=Whole(), help="Choice of the sample. Default: 0 for parts, else a new one.")
@click.option("--scratch", type=click.Path(path_type=Path), help="Directory for scattered experts of --source.")
@click.option("--fail-on-extra", is_flag=True, help="Files that are no part of the container count as damage.")
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
    container: Path,
    dirs: tuple[Path, ...],
    selection: Selection | None,
    source: tuple[Path, ...],
    seed: int | None,
    scratch: Path | None,
    fail_on_extra: bool,
    direct: bool,
    as_json: bool,
) -> None:
    """Check that CONTAINER is whole and undamaged.

    Without options, its structure: every file is there, has its size, and every byte of it belongs to something
    with a digest. This takes seconds. --read-data reads bytes back from the drives and compares digests: a
    part (1/5 to 5/5 cover everything), a share, a size, or all. --source reads the original snapshot again and
    compares everything with it. Exit code 0 says that all of what was asked for was compared and is right.
    """

    def body() -> int:
        structure = check_structure(container, (*dirs, *source))
        report = Report(str(container), fail_on_extra=fail_on_extra, findings=structure.findings)
        asked = {"structure": True, "data": selection is not None, "source": source, "shards": source}
        report.ledgers = {grade: None for grade, wanted in asked.items() if wanted}
        if structure.manifest is not None:
            ledger = report.ledgers["structure"] = structure.tally.ledger()
            report.container = structure.manifest.container
            report.structure = {
                "files": ledger.proven_units,
                "extents": len(structure.targets),
                "read_bytes": ledger.proven_bytes,
                **ledger.counts(),
            }
            _show_findings(report, as_json)
            if selection is not None:
                _read_data(structure, selection, seed, direct, as_json, report)
                _show_findings(report, as_json)
            if source:
                _compare(structure, dirs, source, scratch, direct, as_json, report)
        _show_findings(report, as_json)
        _show_end(report, as_json)
        return int(report.exit_code)

    run(body, as_json=as_json, on_interrupt="nothing was decided; parts such as 1/5 can be checked one by one")


def _read_data(
    structure: Structure, selection: Selection, seed: int | None, direct: bool, as_json: bool, report: Report
) -> None:
    if seed is None:
        seed = 0 if selection.part is not None else secrets.randbelow(1 << 31)
    targets = selection.choose(structure.targets, seed)
    progress = Progress("reading", sum(target.stored_bytes for target in targets), as_json=as_json)
    try:
        check = check_bytes(structure, targets, direct=direct, on_bytes=progress.advance)
    finally:
        progress.close()
    if structure.catalogued:  # else nobody knows what there is to read
        report.ledgers["data"] = check.ledger
    report.findings += check.findings
    report.through_page_cache |= check.through_page_cache
    report.huge_pages += check.huge_pages
    report.odd.update(check.odd)
    nbytes = check.ledger.proven_bytes
    report.data = {
        "selection": str(selection),
        "seed": seed,
        "extents": check.ledger.proven_units,
        "read_bytes": nbytes,
        "skipped": check.skipped,
        "elapsed_s": round(check.elapsed_s, 3),
        "gb_per_s": round(nbytes / check.elapsed_s / 1e9, 3) if check.elapsed_s > 0 else None,
        **check.ledger.counts(),
    }


def _compare(
    structure: Structure,
    dirs: tuple[Path, ...],
    source: tuple[Path, ...],
    scratch: Path | None,
    direct: bool,
    as_json: bool,
    report: Report,
) -> None:
    assert structure.manifest is not None
    snapshot = open_source(structure.manifest, source)
    progress = Progress("comparing", sum(shard.size_bytes for shard in snapshot.shards), as_json=as_json)
    try:
        with tempfile.TemporaryDirectory(prefix="k3-verify-", dir=scratch) as directory:
            check = check_against_source(
                structure.home,
                dirs,
                snapshot,
                structure.manifest,
                scratch=Path(directory),
                direct=direct,
                on_shard=progress.item,
                on_bytes=progress.advance,
            )
    except ContainerError as error:
        if not any(finding.severity is Severity.ERROR for finding in report.findings):
            raise
        report.not_compared = str(error)
        return
    finally:
        progress.close()
    report.findings += check.findings
    report.uncounted += check.differences - len(check.findings)
    report.through_page_cache |= check.through_page_cache
    report.huge_pages += check.huge_pages
    report.odd.update(check.odd)
    report.ledgers["source"], report.ledgers["shards"] = check.ledger, check.shards
    report.source = {
        "experts": check.experts,
        "tensors": check.tensors,
        "source_bytes": check.shards.proven_bytes,
        "source_required_bytes": check.shards.required_bytes,
        "differences": check.differences,
        **check.ledger.counts(),
    }


def _show_findings(report: Report, as_json: bool) -> None:
    """At once after each grade: what comes later may fail, or take days."""
    for finding in report.new_findings():
        if as_json:
            emit_json("finding", **finding.as_dict())
        else:
            echo(str(finding))


def _show_end(report: Report, as_json: bool) -> None:
    if as_json:
        emit_json("summary", **report.summary())
        return
    for line in report.lines():
        echo(line)


if __name__ == "__main__":
    main()
