"""Holds up: the store's benchmark still runs, on a model of kilobytes, and says everything that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "store.py"


def test_store_in_tiny(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, BENCH, "--work", tmp_path, "--tiny"], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["tiny"] is True
    assert {
        "cold_ratio", "daemon_cpu_s_per_gb", "ring_p50_us", "ring_p99_us", "source_p50_us", "source_p99_us",
        "read_share_2_clients", "read_share_lag_0.5", "shares_finish_ratio", "start_store_s", "start_files_s",
    } <= line["medians"].keys()  # fmt: skip
    assert line["medians"]["read_share_2_clients"] == 1
    assert list(tmp_path.iterdir()) == []
