"""The findings of checks: each a kind, a place and a sentence. Immutable values; no I/O.

A finding is not an error: checks keep going and collect. What a command ends with is decided by `verdict`.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from k3.base.errors import ExitCode, K3Error


class Kind(enum.Enum):
    """The kind of a finding. There is one for each thing that a user would do differently."""

    MISSING = "missing"  # a file or record that must be there is not: restore or repack it
    TRUNCATED = "truncated"  # a file is shorter than recorded
    TOO_LONG = "too-long"  # a file is longer than recorded: something was appended
    DAMAGED = "damaged"  # bytes differ from their digest
    INCONSISTENT = "inconsistent"  # digests are right, but two records contradict each other
    DIFFERENT = "different-from-source"  # the container is not what this source gives
    INCOMPLETE = "incomplete"  # a repack has not finished, or a root is not there: mount it, or go on
    UNREADABLE = "unreadable"  # the operating system refused a read
    UNSTABLE = "unstable"  # a second read gave the right bytes: the drive, the link or the memory is failing
    EXTRA = "extra"  # a file that is no part of the container


EXIT_CODES: dict[Kind, ExitCode] = {
    Kind.MISSING: ExitCode.DAMAGED,
    Kind.TRUNCATED: ExitCode.DAMAGED,
    Kind.TOO_LONG: ExitCode.DAMAGED,
    Kind.DAMAGED: ExitCode.DAMAGED,
    Kind.INCONSISTENT: ExitCode.DAMAGED,
    Kind.DIFFERENT: ExitCode.DAMAGED,
    Kind.INCOMPLETE: ExitCode.INCOMPLETE,
    Kind.UNREADABLE: ExitCode.DRIVE,
    Kind.UNSTABLE: ExitCode.DRIVE,
    Kind.EXTRA: ExitCode.OK,
}
"""The exit code of a command for which this is the worst kind that it found."""

_WORST_FIRST = (ExitCode.DAMAGED, ExitCode.INCOMPLETE, ExitCode.DRIVE, ExitCode.OK)


class Severity(enum.Enum):
    """The weight of a finding: whether it makes the container unfit for use."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and where.

    `nbytes` is the length of the run at `offset` that is concerned, where that is known. `root` is a number.
    """

    kind: Kind
    problem: str
    path: str | None = None
    offset: int | None = None
    nbytes: int | None = None
    root: int | None = None
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None
    advice: str | None = None

    @property
    def severity(self) -> Severity:
        """A warning for what does no harm, an error for everything else."""
        return Severity.WARNING if EXIT_CODES[self.kind] is ExitCode.OK else Severity.ERROR

    def __str__(self) -> str:
        error = K3Error(
            self.problem,
            path=self.path,
            tensor=self.tensor,
            layer=self.layer,
            expert=self.expert,
            offset=self.offset,
            advice=self.advice,
        )
        return f"{self.kind.value}: {error}"

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as a JSON object; what is unknown is left out."""
        fields: dict[str, Any] = {
            "kind": self.kind.value,
            "severity": self.severity.value,
            "problem": self.problem,
            "path": self.path,
            "offset": self.offset,
            "nbytes": self.nbytes,
            "root": self.root,
            "layer": self.layer,
            "expert": self.expert,
            "tensor": self.tensor,
            "advice": self.advice,
        }
        return {key: value for key, value in fields.items() if value is not None}


def finding_of(error: K3Error, kind: Kind, **place: Any) -> Finding:
    """Return an operating error as a finding; `place` adds to or overrides what the error knows."""
    known: dict[str, Any] = {
        "path": error.path,
        "offset": error.offset,
        "layer": error.layer,
        "expert": error.expert,
        "tensor": error.tensor,
        "advice": error.advice,
    }
    known.update((name, value) for name, value in place.items() if value is not None)
    if known["path"] is not None:
        known["path"] = os.fspath(known["path"])
    return Finding(kind, error.problem, **known)


def exit_code(findings: Iterable[Finding], *, fail_on_extra: bool = False) -> ExitCode:
    """Return the exit code of the worst finding: damage before a missing root before a failing drive."""
    codes = {EXIT_CODES[finding.kind] for finding in findings}
    if fail_on_extra and any(finding.kind is Kind.EXTRA for finding in findings):
        codes.add(ExitCode.DAMAGED)
    return next((code for code in _WORST_FIRST if code in codes), ExitCode.OK)
