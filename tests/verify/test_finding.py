"""Holds up: a finding says its place, and the worst kind decides how a command ends."""

from __future__ import annotations

import json

import pytest

from k3.base.errors import DriveError, ExitCode
from k3.verify.finding import EXIT_CODES, Finding, Kind, Severity, exit_code, finding_of


def test_every_kind_has_an_exit_code() -> None:
    assert set(EXIT_CODES) == set(Kind)


def test_it_reads_like_an_error() -> None:
    finding = Finding(Kind.DAMAGED, "bytes differ", "/a/b", 4096, 10, 1, 3, 17, None, "Restore it")
    assert str(finding) == "damaged: bytes differ (file /a/b, layer 3, expert 17, offset 4096). Restore it"


def test_json_leaves_out_what_is_unknown() -> None:
    fields = Finding(Kind.MISSING, "file is missing", "/a", root=0).as_dict()
    assert json.loads(json.dumps(fields)) == {
        "kind": "missing", "severity": "error", "problem": "file is missing", "path": "/a", "root": 0,
    }  # fmt: skip


def test_an_error_becomes_a_finding_with_its_place() -> None:
    error = DriveError("cannot read", path="/a", offset=7, advice="Look")
    finding = finding_of(error, Kind.UNREADABLE, layer=2, expert=None, root=1)
    assert finding == Finding(Kind.UNREADABLE, "cannot read", "/a", 7, root=1, layer=2, advice="Look")


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ([], ExitCode.OK),
        ([Kind.EXTRA], ExitCode.OK),
        ([Kind.EXTRA, Kind.UNSTABLE], ExitCode.DRIVE),
        ([Kind.UNREADABLE, Kind.INCOMPLETE], ExitCode.INCOMPLETE),
        ([Kind.INCOMPLETE, Kind.TRUNCATED, Kind.UNREADABLE], ExitCode.DAMAGED),
        ([Kind.DIFFERENT], ExitCode.DAMAGED),
    ],
)
def test_the_worst_kind_decides(kinds: list[Kind], code: ExitCode) -> None:
    findings = [Finding(kind, "x") for kind in kinds]
    assert exit_code(findings) is code
    assert exit_code(reversed(findings)) is code


def test_extra_files_fail_only_when_asked() -> None:
    findings = [Finding(Kind.EXTRA, "x")]
    assert findings[0].severity is Severity.WARNING
    assert exit_code(findings, fail_on_extra=True) is ExitCode.DAMAGED
