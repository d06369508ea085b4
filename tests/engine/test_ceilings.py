"""Holds up that the ceilings are measured on what they claim; how high they are is no test."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3.base.direct_io import ReadFile
from k3.base.errors import DriveError
from k3.engine.report import machine_rates
from k3.engine.report.machine_rates import MemoryMeter, drive_rate
from tests.support.engines import snapshot


@pytest.mark.parametrize("threads", [1, 3])
def test_memory(threads: int) -> None:
    with MemoryMeter(threads, nbytes=1 << 20) as meter:
        assert meter.bytes_per_s() > 0


@pytest.mark.parametrize("depth", [1, 8])
def test_drives(depth: int) -> None:
    source = snapshot()
    rate = drive_rate(source, source.expert_layers(), seconds=0.02, depth=depth)
    assert rate is not None
    assert rate.bytes_per_s > 0


def test_no_experts_no_rate() -> None:
    assert drive_rate(snapshot(), [], seconds=0.02) is None


def test_a_failing_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> object:
        raise DriveError("cannot open for reading", path=path)

    monkeypatch.setattr(machine_rates, "ReadFile", refuse)
    with pytest.raises(DriveError):
        drive_rate(snapshot(), [1], seconds=0.02)


def test_reads_through_the_page_cache_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "ReadFile", lambda path: ReadFile(path, direct=False))
    rate = drive_rate(snapshot(), [1], seconds=0.02)
    assert rate is not None
    assert not rate.direct
