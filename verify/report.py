"""What a verification says at its end: findings and what was looked at, as text or as JSON lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from k3.container.console import format_size
from k3.container.errors import ExitCode
from k3.container.huge_pages import HugePages
from k3.verify.finding import Finding, Severity, exit_code

FINDINGS_MAX = 1000
"""Findings that are printed one by one; further ones are only counted."""


@dataclass
class Report:
    """The whole result. `structure`, `data` and `source` say what each grade looked at; None: not asked for."""

    path: str
    container: str | None = None  # UUID; None when the manifest is damaged
    fail_on_extra: bool = False
    findings: list[Finding] = field(default_factory=list)
    uncounted: int = 0  # findings that are not even in the list
    structure: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] | None = None
    source: dict[str, Any] | None = None
    not_compared: str | None = None  # why --source could not be done
    through_page_cache: set[str] = field(default_factory=set)
    huge_pages: HugePages = field(default_factory=HugePages)  # what the buffers got
    _shown: int = 0

    @property
    def exit_code(self) -> ExitCode:
        """What the command ends with."""
        return exit_code(self.findings, fail_on_extra=self.fail_on_extra)

    def summary(self) -> dict[str, Any]:
        """The last JSON line: verdict, counts by kind, what was checked."""
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
        }

    def new_findings(self) -> list[Finding]:
        """Findings that were not asked for yet, as far as there is room for them."""
        new = self.findings[self._shown : FINDINGS_MAX]
        self._shown += len(new)
        return new

    def lines(self) -> Iterable[str]:
        """The report's end for people, after the findings."""
        if (more := len(self.findings) - self._shown + self.uncounted) > 0:
            yield f"... and {more} more"
        if self.structure:
            yield (
                f"structure: {self.structure['files']} files, {self.structure['extents']} extents, "
                f"{format_size(self.structure['read_bytes'])} read"
            )
        if self.data is not None:
            yield _data_line(self.data)
        if self.source is not None:
            yield (
                f"source: {self.source['experts']} experts and {self.source['tensors']} dense tensors compared, "
                f"{format_size(self.source['compared_bytes'])} against {format_size(self.source['source_bytes'])}"
            )
        if self.not_compared is not None:
            yield f"source: not compared, since the container cannot be opened: {self.not_compared}"
        for directory in sorted(self.through_page_cache):
            yield f"note: {directory} cannot be read with O_DIRECT; its bytes came through the page cache"
        if self.huge_pages.refused:
            yield f"note: {self.huge_pages.line()}"
        yield self._verdict()

    def _verdict(self) -> str:
        errors = sum(finding.severity is Severity.ERROR for finding in self.findings) + self.uncounted
        warnings = sum(finding.severity is Severity.WARNING for finding in self.findings)
        noted = f", {warnings} warnings" if warnings else ""
        if self.exit_code is not ExitCode.OK:
            return f"NOT SOUND: {errors} findings{noted}"
        if self.source is not None:
            return f"sound: every byte is the source's{noted}"
        if self.data is None:
            return f"sound as far as looked at: structure only{noted}; --read-data reads the bytes back"
        if self.data["extents"] < self.structure["extents"]:
            return f"sound as far as looked at: a sample{noted}"
        return f"sound: every byte matches its digest{noted}"


def _data_line(data: dict[str, Any]) -> str:
    rate = f" at {data['gb_per_s']:.2f} GB/s" if data["gb_per_s"] else ""
    skipped = f", {data['skipped']} extents are not there to be read" if data["skipped"] else ""
    return (
        f"data: {data['extents']} extents, {format_size(data['read_bytes'])} read{rate} "
        f"({data['selection']}, seed {data['seed']}){skipped}"
    )
