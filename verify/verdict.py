"""From ledgers and findings to a verdict. Pure.

A finding says what is wrong; a ledger says what was looked at and found right. Only both together give exit code
0: no finding of an error, and every unit that had to be compared was (docs/proof.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3.base.errors import ExitCode, K3Error
from k3.base.ledger import Ledger
from k3.base.safe_text import counted
from k3.verify.finding import Finding, Kind, Severity, exit_code, finding_of


@dataclass(frozen=True, slots=True)
class VerifyUnit:
    """The unit that a ledger of this room counts: `nbytes` of a file, from `offset` on.

    Without an offset the unit stands for its file: a small one as a whole, or a data file's header and size.
    """

    path: str
    root: int
    nbytes: int
    offset: int | None = None
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None


def verdict(
    findings: Iterable[Finding], ledgers: Mapping[str, Ledger[Any] | None], *, fail_on_extra: bool = False
) -> ExitCode:
    """Return the exit code of a verification. `ledgers` has one for every grade asked for, None if it has none.

    0 needs at least one ledger, all of them complete, and no finding of an error; what was not compared and has no
    finding that is worse counts as a read that failed.
    """
    code = exit_code(findings, fail_on_extra=fail_on_extra)
    if code is not ExitCode.OK:
        return code
    proven = bool(ledgers) and all(ledger is not None and ledger.complete for ledger in ledgers.values())
    return ExitCode.OK if proven else ExitCode.DRIVE


def unexplained(
    units: Iterable[VerifyUnit],
    findings: Sequence[Finding],
    *,
    lost_roots: Collection[int] = (),
    reasons: Mapping[str, tuple[Kind, K3Error]] | None = None,
    otherwise: K3Error | None = None,
) -> list[Finding]:
    """Return a finding for each file of which something was not compared and no finding says why.

    `reasons` has, by path, what was met when a file could not be read, `otherwise` what may have stopped any of
    them. `lost_roots` are those that are not there, which their own findings say.
    """
    explained: dict[str, list[Finding]] = {}
    told_roots = set()
    for finding in findings:
        if finding.severity is Severity.ERROR:
            explained.setdefault(finding.path or "", []).append(finding)
            if finding.root in lost_roots:
                told_roots.add(finding.root)
    left: dict[str, list[VerifyUnit]] = {}
    for unit in units:
        covered = any(_covers(finding, unit) for finding in explained.get(unit.path, ()))
        if not covered and unit.root not in told_roots:
            left.setdefault(unit.path, []).append(unit)
    return [_uncompared(path, group, (reasons or {}).get(path), otherwise) for path, group in left.items()]


def _covers(finding: Finding, unit: VerifyUnit) -> bool:
    """Return whether a finding of the same file is about this unit, too."""
    if finding.offset is None or unit.offset is None:
        return True
    end = finding.offset + max(1, finding.nbytes or 1)
    return finding.offset < unit.offset + unit.nbytes and unit.offset < end


def _uncompared(
    path: str, units: list[VerifyUnit], reason: tuple[Kind, K3Error] | None, otherwise: K3Error | None
) -> Finding:
    first, last = units[0], units[-1]
    if first.offset is None:
        what = "the file was not compared"
    else:
        nbytes = sum(unit.nbytes for unit in units)
        was = "was" if len(units) == 1 else "were"
        what = f"{counted(len(units), 'extent')} of {nbytes:,} bytes {was} not compared"
        if len(units) > 1:
            what += f", from {_name(first)} to {_name(last)}"
    kind, error = reason or (Kind.UNREADABLE, otherwise or K3Error("no reason is known", path=path))
    return finding_of(
        K3Error(f"{error.problem}; {what}", path=path, advice=error.advice), kind, root=first.root,
        offset=first.offset, nbytes=None if first.offset is None else sum(unit.nbytes for unit in units),
        layer=first.layer, expert=first.expert, tensor=first.tensor,
    )  # fmt: skip


def _name(unit: VerifyUnit) -> str:
    if unit.expert is not None:
        return f"layer {unit.layer} expert {unit.expert}"
    return f"tensor {unit.tensor}" if unit.tensor is not None else f"offset {unit.offset}"
