"""The report of a verification: findings and what was looked at, as text or as JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from k3.base.errors import ExitCode
from k3.base.huge_pages import HugePages
from k3.base.ledger import Ledger
from k3.base.safe_text import counted
from k3.checkpoint.odd_experts import odd_experts_note
from k3.model.keys import ExpertKey
from k3.verify.finding import Finding, Severity
from k3.verify.verdict import verdict

FINDINGS_MAX = 1000
"""Findings that are printed one by one; further ones are only counted."""


@dataclass
class Report:
    """The whole result. `structure`, `data` and `source` say what each grade looked at; None: not asked for.

    `ledgers` has an entry for each grade that was asked for, from the moment it was; None as long as the grade has
    not come to its end. Nothing is sound before all of them are complete.
    """

    path: str
    container: str | None = None  # UUID; None when the manifest is damaged
    fail_on_extra: bool = False
    findings: list[Finding] = field(default_factory=list)
    uncounted: int = 0  # findings that are not even in the list
    ledgers: dict[str, Ledger[Any] | None] = field(default_factory=dict)
    structure: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    not_compared: str | None = None  # why --source could not be done
    through_page_cache: set[str] = field(default_factory=set)
    huge_pages: HugePages = field(default_factory=HugePages)  # what the buffers got
    odd: dict[ExpertKey, tuple[str, ...]] = field(default_factory=dict)  # experts that are sound and yet no use
    _shown: int = 0

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command."""
        return verdict(self.findings, self.ledgers, fail_on_extra=self.fail_on_extra)

    def summary(self) -> dict[str, Any]:
        """Return the last JSON line: verdict, counts by kind, what was checked."""
        counts = Counter(finding.kind.value for finding in self.findings)
        return {
            "container": self.container,
            "path": self.path,
            "sound": self.exit_code is ExitCode.OK,
            "exit_code": int(self.exit_code),
            "findings": len(self.findings) + self.uncounted,
            "by_kind": dict(sorted(counts.items())),
            "structure": self.structure,
            "data": self.data,
            "source": self.source,
            "not_compared": self.not_compared,
            "through_page_cache": sorted(self.through_page_cache),
            "huge_pages": asdict(self.huge_pages),
            "odd_experts": len(self.odd),
            "first_odd_experts": [
                {"layer": key.layer, "expert": key.expert, "problems": list(self.odd[key])}
                for key in sorted(self.odd)[:FINDINGS_MAX]
            ],
        }

    def new_findings(self) -> list[Finding]:
        """Return the findings that were not asked for yet, as far as there is room for them."""
        new = self.findings[self._shown : FINDINGS_MAX]
        self._shown += len(new)
        return new

    def lines(self) -> Iterable[str]:
        """Return the end of the report for people, which follows the findings."""
        if (more := len(self.findings) - self._shown + self.uncounted) > 0:
            yield f"... and {more} more"
        if self.structure:
            yield (
                f"structure: {counted(self.structure['files'], 'file')}, "
                f"{counted(self.structure['extents'], 'extent')}; {_compared(self.structure)} of headers and "
                "small files"
            )
        if self.data is not None:
            yield _data_line(self.data)
        if self.source is not None:
            yield (
                f"source: {counted(self.source['experts'], 'expert')} and "
                f"{counted(self.source['tensors'], 'dense tensor')}; {_compared(self.source)} of the container, "
                f"hashed {self.source['source_bytes']:,} of {self.source['source_required_bytes']:,} of the source"
            )
        if self.not_compared is not None:
            yield f"source: not compared, since the container cannot be opened: {self.not_compared}"
        for directory in sorted(self.through_page_cache):
            yield f"note: {directory} cannot be read with O_DIRECT; its bytes came through the page cache"
        if self.huge_pages.refused:
            yield f"note: {self.huge_pages.line()}"
        if note := odd_experts_note(self.odd):
            yield f"note: {note}"
        yield self._verdict()

    def _verdict(self) -> str:
        errors = sum(finding.severity is Severity.ERROR for finding in self.findings) + self.uncounted
        warnings = sum(finding.severity is Severity.WARNING for finding in self.findings)
        noted = f", {counted(warnings, 'warning')}" if warnings else ""
        if self.exit_code is not ExitCode.OK:
            return f"NOT SOUND: {counted(errors, 'finding')}{noted}"
        if self.source is not None:
            return f"sound: every byte is the source's{noted}"
        if self.data is None:
            return f"structure OK{noted}; data not read (use --read-data)"
        read, there = self.data["compared_units"], self.structure["extents"]
        if read < there:
            return f"sound in the sample: {read:,} of {counted(there, 'extent')}{noted}; the rest was not read"
        return f"sound: every byte matches its digest{noted}"


def _compared(totals: dict[str, Any]) -> str:
    return f"compared {totals['compared_bytes']:,} of {totals['required_bytes']:,} bytes"


def _data_line(data: dict[str, Any]) -> str:
    rate = f" at {data['gb_per_s']:.2f} GB/s" if data["gb_per_s"] else ""
    skipped = f", {counted(data['skipped'], 'extent')} could not be read" if data["skipped"] else ""
    return (
        f"data: {_compared(data)}, {data['compared_units']:,} of {counted(data['required_units'], 'extent')}"
        f"{rate} ({data['selection']}, seed {data['seed']}){skipped}"
    )
