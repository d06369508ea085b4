"""Holds up the statistics and the forms of `k3-run bench`: by hand, and read back by other programs' rules."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from k3.engine.report.bench_table import (
    Format,
    Machine,
    ReadsFrom,
    Result,
    Sample,
    Workload,
    mean_and_deviation,
    open_table,
    result_fields,
)

MACHINE = Machine(
    version="k3-store 0.1.0", cpu='A "CPU", of sorts', variant="avx2", threads=2, model_path="/k3",
    model_type="Kimi K3", model_bytes=3 << 30, parameters=5_000_000_000, cache_type="f32", exact=False,
    direct=True,
)  # fmt: skip
SECOND = 10**9
SAMPLES = (
    Sample(2 * SECOND, 8 * 10**9, 3 * 10**9, SECOND, 32, 8, 15e9),
    Sample(SECOND, 8 * 10**9, 0, 0, 32, 24, 30e9),
)


def result(reads_from: ReadsFrom = "drive", drive_rate: float | None = 2e9) -> Result:
    return Result(MACHINE, Workload(0, 4, 0, 1), "2026-11-29T12:00:00Z", 2, SAMPLES, drive_rate, reads_from)


def printed(form: Format, *results: Result) -> str:
    stream = io.StringIO()
    table = open_table(form, stream)
    for one in results:
        table.row(one)
    table.end()
    return stream.getvalue()


def test_mean_and_deviation() -> None:
    assert mean_and_deviation([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0]) == pytest.approx((5.0, 2.13809))
    assert mean_and_deviation([3.0]) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("test", "name", "tokens"),
    [
        (Workload(512, 0, 0, 64), "pp512", 512),
        (Workload(0, 128, 0, 1), "tg128", 128),
        (Workload(0, 128, 4096, 1), "tg128 @ d4096", 128),
    ],
)
def test_names_are_llama_benchs(test: Workload, name: str, tokens: int) -> None:
    assert (test.name, test.tokens) == (name, tokens)


def test_a_result_is_told_in_full() -> None:
    told = result_fields(result())
    assert (told["avg_ns"], told["stddev_ns"]) == (1_500_000_000, 707_106_781)
    assert (told["avg_ts"], told["stddev_ts"]) == (3.0, pytest.approx(1.414214))  # of 2 and 4 tokens per second
    assert told["memory_gb_per_s"] == 20.0  # 15 for two seconds, 30 for one
    assert told["memory_share"] == round(16e9 / 3 / 20e9, 4)
    assert told["drive_share"] == 0.5
    assert told["read_bytes_per_token"] == 375_000_000
    assert told["moved_bytes_per_token"] == 2_000_000_000
    assert (told["hit_share"], told["wait_share"]) == (0.5, round(1 / 3, 4))
    assert (told["n_prompt"], told["n_gen"], told["n_batch"], told["reads_from"]) == (0, 4, 1, "drive")


@pytest.mark.parametrize("origin", ["page cache", "daemon", "memory"])
def test_what_no_drive_did_is_no_share_of_one(origin: ReadsFrom) -> None:
    assert result_fields(result(origin))["drive_share"] is None
    row = printed("md", result(origin)).splitlines()[2].split("|")
    assert row[10].strip() == ("-" if origin == "memory" else origin)
    assert "0.50" not in row[10]


def test_drives_that_were_not_measured_have_no_share() -> None:
    assert result_fields(result(drive_rate=None))["drive_share"] is None
    assert "not measured" in printed("md", result(drive_rate=None))


def test_no_experts_no_hits() -> None:
    bare = replace(result("memory"), samples=[replace(sample, asked=0, hits=0) for sample in SAMPLES])
    assert result_fields(bare)["hit_share"] is None
    assert printed("md", bare)


def test_markdown_is_a_table() -> None:
    lines = printed("md", result(), result()).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4
    assert len({len(line) for line in table}) == 1
    assert [cell.strip() for cell in table[0].split("|")[1:10]] == [
        "model", "size", "params", "backend", "threads", "n_batch", "test", "t/s", "of memory",
    ]  # fmt: skip
    cells = [cell.strip() for cell in table[2].split("|")[1:-1]]
    assert cells == [
        "Kimi K3", "3.00 GiB", "5.00 B", "CPU", "2", "1", "tg4", "3.00 ± 1.41", "0.27", "0.50", "375.0 MB", "50%",
    ]  # fmt: skip
    assert "20.0 GB/s" in lines[-3]
    assert "2 GB/s" in lines[-2]


def test_csv_is_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(printed("csv", result(), result("memory")))))
    assert [row["avg_ts"] for row in rows] == ["3.0", "3.0"]
    assert rows[0]["cpu_info"] == MACHINE.cpu
    assert (rows[0]["drive_share"], rows[1]["drive_share"]) == ("0.5", "")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_json_is_one_array(count: int) -> None:
    parsed = json.loads(printed("json", *[result()] * count))
    assert len(parsed) == count
    for one in parsed:
        assert one["samples_ns"] == [2 * SECOND, SECOND]
        assert one["samples_ts"] == [2.0, 4.0]
        assert one == result_fields(result()) | {"samples_ns": one["samples_ns"], "samples_ts": one["samples_ts"]}
