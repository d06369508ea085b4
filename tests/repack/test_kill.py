"""Holds up that kill -9 (or a power cut) at any moment loses nothing: run again, and the container is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

RUNNER = Path(__file__).with_name("kill_runner.py")
GROUPS = ("one-root,three-roots,hf-cache,split,jobs", "two-roots,scattered,in-place,layers")
"""The configurations, for one process each: two processors are what everybody has."""


def kill(place: Path, seed: int, points: int) -> list[dict[str, Any]]:
    """Run `points` kill points of every configuration; every one must have come to the undisturbed container."""
    path = os.pathsep.join(filter(None, [str(RUNNER.parents[2]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    runners = []
    for number, names in enumerate(GROUPS):
        arguments = [sys.executable, str(RUNNER), str(place / str(number)), names, str(seed), str(points)]
        (place / str(number)).mkdir()
        runners.append(
            subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    results: list[dict[str, Any]] = []
    for runner in runners:
        out, err = runner.communicate()
        results += [json.loads(line) for line in out.splitlines()]
        assert runner.returncode == 0, err
        bad = [result for result in results if result["problem"]]
        assert not bad, f"{bad}\n{err}"
    return results


def summary(results: list[dict[str, Any]]) -> str:
    points = len(results)
    kills = sum(result["killed"] for result in results)
    power = sum(step[2] and step[3] == 9 for result in results for step in result["story"])
    per = Counter(result["configuration"] for result in results)
    return f"{points} kill points, {kills} kills ({power} with a power cut), all resumed equal: {dict(per)}"


def test_a_killed_run_goes_on_to_the_same_container(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = kill(tmp_path, seed=0, points=3)
    assert len(results) == 27
    assert sum(result["killed"] > 0 for result in results) >= 20
    assert any(result["killed"] > 1 for result in results), "two kills in a row"
    with capsys.disabled():
        print(f"\n{summary(results)}")


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_a_campaign_of_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = kill(tmp_path, seed=int(os.environ.get("K3_TEST_SEED", "1")), points=64)
    with capsys.disabled():
        print(f"\n{summary(results)}")
