"""Holds up: nothing is sound before everything that had to be compared was, and what was not says why."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import DriveError, ExitCode
from k3.base.ledger import Ledger
from k3.verify.finding import EXIT_CODES, Finding, Kind, Severity, exit_code
from k3.verify.report import Report
from k3.verify.verdict import VerifyUnit, unexplained, verdict

SIZES = st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=6)
KINDS = st.lists(st.sampled_from(list(Kind)), max_size=3)
LEDGERS = st.dictionaries(st.sampled_from(["structure", "data", "source"]), st.one_of(st.none(), SIZES))
UNITS = st.builds(
    VerifyUnit,
    st.sampled_from("abc"),
    st.integers(0, 2),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(0, 30)),
)
FINDINGS = st.builds(
    Finding, st.sampled_from(list(Kind)), st.just("x"), st.sampled_from("abc"),
    st.one_of(st.none(), st.integers(0, 30)), st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.integers(0, 2)),
)  # fmt: skip


@given(LEDGERS, KINDS, st.data())
def test_sound_needs_all_of_it(
    sizes: dict[str, dict[int, int] | None], kinds: list[Kind], data: st.DataObject
) -> None:
    ledgers: dict[str, Ledger[int] | None] = {}
    whole = bool(sizes)
    for grade, required in sizes.items():
        if required is None:
            ledgers[grade], whole = None, False
            continue
        proven = data.draw(st.sets(st.sampled_from(sorted(required)))) if required else set()
        ledgers[grade] = Ledger(required, {unit: required[unit] for unit in proven})
        whole = whole and proven == set(required)
    findings = [Finding(kind, "x") for kind in kinds]
    code = verdict(findings, ledgers)
    wrong = [kind for kind in kinds if EXIT_CODES[kind] is not ExitCode.OK]
    assert (code is ExitCode.OK) is (whole and not wrong)
    assert code is (exit_code(findings) if wrong else ExitCode.OK if whole else ExitCode.DRIVE)
    report = Report("c", findings=findings, ledgers=ledgers)
    assert report.summary()["sound"] is (code is ExitCode.OK)
    assert report.summary()["exit_code"] == code


@given(st.lists(UNITS, max_size=8), st.lists(FINDINGS, max_size=4), st.sets(st.integers(0, 2)))
def test_every_open_unit_has_a_finding_that_says_why(
    units: list[VerifyUnit], findings: list[Finding], lost: set[int]
) -> None:
    more = unexplained(units, findings, lost_roots=lost)
    assert all(finding.severity is Severity.ERROR for finding in more)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    for unit in units:
        of_root = any(finding.root == unit.root and unit.root in lost for finding in errors)
        of_file = any(finding.path == unit.path for finding in [*errors, *more])
        assert of_root or of_file
    if units:
        assert exit_code([*findings, *more]) is not ExitCode.OK


def test_one_finding_names_the_file_the_extents_and_the_reason() -> None:
    units = [VerifyUnit("/a/x", 1, 10, offset, 3, expert) for expert, offset in enumerate((0, 10, 20))]
    reasons = {"/a/x": (Kind.UNREADABLE, DriveError("cannot open: Input/output error", advice="Look at dmesg"))}
    (finding,) = unexplained(units, [], reasons=reasons)
    text = str(finding)
    assert (finding.kind, finding.path, finding.nbytes, finding.root) == (Kind.UNREADABLE, "/a/x", 30, 1)
    assert "Input/output error" in text
    assert "3 extents of 30 bytes were not compared, from layer 3 expert 0 to layer 3 expert 2" in text
    assert "Look at dmesg" in text
    (unknown,) = unexplained(units[:1], [])
    assert "no reason is known; 1 extent of 10 bytes was not compared" in unknown.problem
