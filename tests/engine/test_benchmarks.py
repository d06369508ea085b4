"""Holds up: the engine's benchmarks still run, on a model of kilobytes, and say everything that they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "engine.py"


def test_engine_in_tiny(tmp_path: Path) -> None:
    arguments = ["--work", str(tmp_path), "--tiny", "--rounds", "1", "--only", "decode,prefill,breakdown"]
    result = subprocess.run([sys.executable, BENCH, *arguments], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["tiny"] is True
    assert {figure["part"] for figure in line["figures"]} == {"decode", "prefill", "breakdown"}
    assert all(figure["measured"] > 0 for figure in line["figures"])
    assert all((figure["goal"] is None) == (figure["met"] is None) for figure in line["figures"])
    for work in (
        "experts",
        "attention: q, k, v, g, o projections",
        "KDA: states",
        "MLA: latent attention",
        "head",
    ):
        assert f"| {work}" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.k3"]
