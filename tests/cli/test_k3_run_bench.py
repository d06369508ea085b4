"""Holds up `k3-run bench`: what is measured, in which forms, what is refused, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.base.huge_pages import HugePages
from k3.base.memory_limit import Limit
from k3.engine.cli import main
from k3.engine.forward.model import Model
from k3.engine.report import bench_run
from k3.engine.report.machine_rates import DriveRate, MemoryMeter
from k3.engine.run.session import Session
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.store.lending.file_source import FileSource
from k3.store.source import SourceStats
from tests.support.daemons import daemon_inside
from tests.support.engines import VECTORS

TINY = str(VECTORS / "tiny_s1")


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings without the second that measuring them takes."""
    monkeypatch.setattr(bench_run, "MemoryMeter", lambda threads: MemoryMeter(threads, nbytes=1 << 16))
    monkeypatch.setattr(bench_run, "drive_rate", lambda source, layers, seed: DriveRate(1e9, True, HugePages()))


def k3_bench(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], **options)


def measured(*arguments: str) -> list[dict[str, Any]]:
    result = k3_bench(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    parsed: list[dict[str, Any]] = json.loads(result.stdout)
    return parsed


@pytest.mark.usefixtures("_quick")
def test_every_combination_is_a_row() -> None:
    rows = measured(
        "--snapshot", TINY, "-p", "3,5", "-n", "2,0", "-b", "1,4", "-d", "0,2", "-r", "2", "--threads", "1"
    )
    found = [(row["n_prompt"], row["n_gen"], row["n_batch"], row["n_depth"]) for row in rows]
    prompts = [(prompt, 0, batch, depth) for depth in (0, 2) for prompt in (3, 5) for batch in (1, 4)]
    assert found == prompts + [(0, 2, 1, depth) for depth in (0, 2)]
    for row in rows:
        assert len(row["samples_ns"]) == row["repetitions"] == 2
        assert row["avg_ts"] > 0
        assert (row["n_threads"], row["model_filename"], row["backends"]) == (1, TINY, "CPU")


@pytest.mark.usefixtures("_quick")
def test_every_form_tells_the_same_tests() -> None:
    arguments = ["--snapshot", TINY, "-p", "4", "-n", "2", "-r", "1"]
    names = [("4", "0"), ("0", "2")]
    assert [(str(row["n_prompt"]), str(row["n_gen"])) for row in measured(*arguments)] == names
    rows = csv.DictReader(io.StringIO(k3_bench(*arguments, "-o", "csv").stdout))
    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == names
    table = k3_bench(*arguments)
    assert table.exit_code == 0
    assert [line.split("|")[7].strip() for line in table.stdout.splitlines()[:4]][2:] == ["pp4", "tg2"]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every list of ids that a session takes in."""
    seen: list[list[int]] = []
    original = Session.prefill

    def prefill(self: Session, ids: Any, on_logits: Any = None) -> Any:
        seen.append(list(ids))
        return original(self, ids, on_logits)

    monkeypatch.setattr(Session, "prefill", prefill)
    return seen


@pytest.mark.usefixtures("_quick")
def test_repetitions_differ_runs_and_chunks_do_not(passes: list[list[int]]) -> None:
    measured("--snapshot", TINY, "-p", "6", "-n", "0", "-b", "2,6", "-r", "2")
    first = list(passes)
    assert [len(ids) for ids in first] == [6] * 6  # with a warm-up each
    assert first[:3] == first[3:]
    assert len({tuple(ids) for ids in first}) == 3
    passes.clear()
    measured("--snapshot", TINY, "-p", "6", "-n", "0", "-r", "2", "--no-warmup", "--seed", "0")
    assert passes == first[1:3]
    passes.clear()
    measured("--snapshot", TINY, "-p", "6", "-n", "0", "-r", "2", "--no-warmup", "--seed", "1")
    assert passes != first[1:3]


@pytest.mark.usefixtures("_quick")
def test_depth_is_taken_in_but_not_measured(passes: list[list[int]]) -> None:
    (row,) = measured("--snapshot", TINY, "-p", "0", "-n", "2", "-d", "9", "-r", "1", "--no-warmup")
    assert [len(ids) for ids in passes] == [9, 1, 1]
    (bare,) = measured("--snapshot", TINY, "-p", "0", "-n", "2", "-r", "1", "--no-warmup")
    assert row["moved_bytes_per_token"] > bare["moved_bytes_per_token"]  # of the latent cache


@pytest.mark.usefixtures("_quick")
def test_all_weights_are_in_memory_before_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = Model.forward

    def noted(self: Model, *given: Any, **more: Any) -> Any:
        seen.append(self.resident_bytes)
        result = forward(self, *given, **more)
        seen.append(self.resident_bytes)
        return result

    monkeypatch.setattr(Model, "forward", noted)
    measured("--snapshot", TINY, "-p", "2", "-n", "0", "-r", "1", "--no-warmup")
    assert len(seen) == 2
    assert seen[0] == seen[1] > 0


@pytest.mark.usefixtures("_quick")
def test_the_latent_caches_type_is_the_cache_type() -> None:
    (row,) = measured("--snapshot", TINY, "-p", "2", "-n", "0", "-r", "1", "--latent-dtype", "bf16")
    assert (row["type_k"], row["type_v"]) == ("bf16", "bf16")
    assert measured("--snapshot", TINY, "-p", "2", "-n", "0", "-r", "1")[0]["type_k"] == "f32"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "-1"], "-1"),
        (["-p", "1,,2"], "1,,2"),
        (["-p", "x"], "'x'"),
        (["-p", "99999999999"], "too large"),
        (["-p", "1048577", "-n", "0"], "1048576"),
        (["-d", "1048576"], "1048576"),
        (["-b", "0"], "at least 1"),
        (["-r", "0"], "--repetitions"),
        (["-o", "sql"], "sql"),
        (["--seed", "-1"], "--seed"),
        (["--threads", "0"], "--threads"),
        (["--container", "x"], "two models"),
        (["word"], "word"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_nonsense(arguments: list[str], said: str) -> None:
    result = k3_bench("--snapshot", TINY, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_no_model() -> None:
    result = k3_bench("-p", "4")
    assert result.exit_code == 2
    assert "give --container, --snapshot or --store" in result.stderr


def test_too_little_memory_for_the_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "memory_limit", lambda: Limit(1e8, "a test"))
    result = k3_bench("--snapshot", TINY)
    assert result.exit_code == 9
    assert "a test leaves 0.100 GB" in result.stderr
    assert result.stdout == ""


def test_only_the_first_word_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    for words in (
        ["--snapshot", TINY, "--ngen", "1", "bench"],
        ["--prompt", "bench", "--snapshot", TINY, "--ngen", "1"],
    ):
        result = runner.invoke(main, words)
        assert result.exit_code == 0
        assert "prefill 5 tokens" in result.stderr
    assert "k3-run bench" in runner.invoke(main, ["--help"]).stdout
    assert "Usage: k3-run bench" in runner.invoke(main, ["bench", "--help"], prog_name="k3-run").stdout


def test_help_imports_nothing_heavy() -> None:
    heavy = "import sys, k3.engine.report.bench_command; print({'numpy', 'tiktoken', 'lmdb'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout == "set()\n"


@pytest.mark.usefixtures("_quick")
def test_a_container_is_the_same_test_as_its_snapshot(tmp_path: Path) -> None:
    request = RepackRequest((VECTORS / "tiny_s1",), tmp_path / "k3", direct=False)
    repack(request, Watcher())
    arguments = ["-p", "4", "-n", "0", "-r", "1"]
    (snapshot,) = measured("--snapshot", TINY, *arguments)
    (container,) = measured("--container", str(tmp_path / "k3"), *arguments)
    for key in ("model_type", "model_size", "model_n_params", "moved_bytes_per_token"):
        assert container[key] == snapshot[key], key
    assert container["model_filename"] == str(tmp_path / "k3")


@pytest.mark.usefixtures("_quick")
def test_on_a_daemon_the_reads_are_the_daemons(tmp_path: Path) -> None:
    request = RepackRequest((VECTORS / "tiny_s1",), tmp_path / "k3", direct=False)
    repack(request, Watcher())
    with daemon_inside(tmp_path / "s", [tmp_path / "k3"]) as daemon:
        (row,) = measured("--store", str(daemon.socket), "-p", "4", "-n", "0", "-r", "1")
    assert (row["reads_from"], row["drive_share"], row["drive_gb_per_s"]) == ("daemon", None, None)
    assert row["model_size"] > 0


@pytest.mark.usefixtures("_quick")
class TestWhereReadsComeFrom:
    """Only what a block device delivered, past the page cache, is a drive's."""

    ARGUMENTS = ("--snapshot", TINY, "-p", "4", "-n", "0", "-r", "2", "--expert-gb", "0")

    @staticmethod
    def device_delivers(monkeypatch: pytest.MonkeyPatch, per_look: int | None) -> None:
        looks = iter(range(0, 1 << 60, max(1, per_look or 1)))
        monkeypatch.setattr(bench_run, "device_read_bytes", lambda: None if per_look is None else next(looks))

    @staticmethod
    def is_direct(monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
        original = FileSource.stats

        def stats(self: FileSource) -> SourceStats:
            return replace(original(self), direct={Path("/drive"): direct})

        monkeypatch.setattr(FileSource, "stats", stats)

    def test_the_drive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_direct(monkeypatch, True)
        self.device_delivers(monkeypatch, 1 << 40)
        (row,) = measured(*self.ARGUMENTS)
        assert row["reads_from"] == "drive"
        assert row["drive_share"] > 0
        assert row["read_bytes_per_token"] > 0

    def test_direct_reads_that_reached_no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_direct(monkeypatch, True)
        self.device_delivers(monkeypatch, 1)
        (row,) = measured(*self.ARGUMENTS)
        assert (row["reads_from"], row["drive_share"]) == ("page cache", None)

    def test_a_file_system_without_o_direct(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_direct(monkeypatch, False)
        self.device_delivers(monkeypatch, 1 << 40)
        result = k3_bench(*self.ARGUMENTS)
        assert "page cache" in result.stdout.splitlines()[2]
        assert "O_DIRECT" in result.stderr

    def test_asked_not_to(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device_delivers(monkeypatch, 1 << 40)
        (row,) = measured(*self.ARGUMENTS, "--no-direct")
        assert (row["reads_from"], row["use_direct_io"]) == ("page cache", False)

    def test_a_kernel_that_does_not_say(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_direct(monkeypatch, True)
        self.device_delivers(monkeypatch, None)
        assert measured(*self.ARGUMENTS)[0]["reads_from"] == "drive"

    def test_nothing_was_read(self) -> None:
        (row,) = measured(*self.ARGUMENTS[:-2], "--expert-gb", "0.1", "-r", "1", "-p", "64")
        rows = measured(*self.ARGUMENTS[:-2], "--expert-gb", "0.1", "-r", "1", "-p", "64,64")
        assert row["hit_share"] > 0
        assert (rows[1]["reads_from"], rows[1]["hit_share"], rows[1]["drive_share"]) == ("memory", 1.0, None)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("form", ["md", "json", "csv"])
def test_an_interrupt_keeps_what_was_measured(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third repetition of the second test: its row has the two that there are."""
    original, calls = Session.prefill, iter(range(100))

    def prefill(self: Session, ids: Any, on_logits: Any = None) -> Any:
        if next(calls) == 3 + 2:
            raise KeyboardInterrupt
        return original(self, ids, on_logits)

    monkeypatch.setattr(Session, "prefill", prefill)
    result = k3_bench("--snapshot", TINY, "-p", "3,4", "-n", "1", "-r", "3", "--no-warmup", "-o", form)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    if form == "json":
        assert [(row["n_prompt"], row["repetitions"]) for row in json.loads(result.stdout)] == [(3, 3), (4, 2)]
        assert json.loads(result.stderr)["type"] == "error"
    else:
        assert "pp4: 2 of 3 repetitions" in result.stderr
        assert "pp4" in result.stdout or form == "csv"
        assert "tg1" not in result.stdout


@pytest.mark.parametrize("form", ["md", "json", "csv"])
def test_an_interrupt_before_anything_was_measured(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: object, layers: object, seed: int) -> DriveRate:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "drive_rate", interrupted)
    result = k3_bench("--snapshot", TINY, "-o", form)
    assert result.exit_code == 130
    assert result.stdout == ("[]\n" if form == "json" else "")
