"""Holds up `k3-run --plan`: it loads nothing, writes nothing, and says what a run would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.base.huge_pages import HugePages
from k3.base.memory_limit import Limit
from k3.checkpoint.snapshot import Snapshot
from k3.container.reader import Container
from k3.engine.cli import main
from k3.engine.forward.model import Model
from k3.engine.report import plan_command
from k3.engine.report.machine_rates import DriveRate
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.store.client.daemon_model import DaemonModel
from tests.support.daemons import daemon_inside
from tests.support.engines import VECTORS

TINY = ["--snapshot", str(VECTORS / "tiny_s1")]
RATES = ["--drive-gb-per-s", "2", "--memory-gb-per-s", "10"]
LAYERS, TOP_K, EXPERTS = 4, 4, 16  # of the tiny model: MoE layers, and a layer's experts


def k3_run(*arguments: Any) -> Result:
    result = CliRunner().invoke(main, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def plan(*arguments: Any, code: int = 0) -> dict[str, Any]:
    result = k3_run("--plan", "--json", *arguments)
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["type"] == "plan"
    return found


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in ((Model, "__init__"), (Container, "read_tensor"), (Snapshot, "read_tensor"),
                       (DaemonModel, "read_tensor")):  # fmt: skip
        monkeypatch.delattr(kind, name)


@pytest.fixture
def container(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    repack(RepackRequest((VECTORS / "tiny_s1",), home, direct=False), Watcher())
    return home


@pytest.mark.usefixtures("nothing_loaded")
def test_a_snapshot_a_container_and_a_daemon(container: Path, tmp_path: Path) -> None:
    before = sorted(container.rglob("*"))
    snapshot = plan(*TINY, *RATES)
    own = plan("--container", container, *RATES)
    with daemon_inside(tmp_path / "socket", [container], max_clients=2) as daemon:
        behind = plan("--store", daemon.socket, *RATES)
        unknown = plan("--store", daemon.socket)
        slots = daemon.status()["cache"]["slots"]
    for found in (snapshot, own, behind):
        assert found["fits"]
        assert found["memory"]["experts"] == LAYERS * EXPERTS
        assert found["generate"]["experts_per_pass"] == LAYERS * TOP_K
        # A snapshot's tensors are the same, without padding to pages.
        assert found["generate"]["memory_bytes_per_token"] >= snapshot["generate"]["memory_bytes_per_token"]
    assert snapshot["memory"]["load_bytes"] > own["memory"]["load_bytes"] == 0
    assert behind["memory"]["dense_bytes"] < own["memory"]["dense_bytes"] / 2  # the daemon has the weights
    assert behind["memory"]["cache_bytes"] == behind["memory"]["working_bytes"] == 0
    assert behind["hit_share"] == min(slots, LAYERS * EXPERTS) / (LAYERS * EXPERTS)
    assert unknown["drive"]["bytes_per_s"] is None
    assert "--drive-gb-per-s" in unknown["drive"]["origin"]
    assert sorted(container.rglob("*")) == before


@pytest.mark.usefixtures("nothing_loaded")
def test_rates_and_seconds() -> None:
    found = plan(*TINY, *RATES, "--expert-gb", "0")
    one = found["generate"]
    assert found["hit_share"] == 0
    assert one["drive_s_per_token"] == pytest.approx(one["drive_bytes_per_token"] / 2e9)
    assert one["memory_s_per_token"] == pytest.approx(one["memory_bytes_per_token"] / 1e10)
    assert one["least_s_per_token"] == max(one["drive_s_per_token"], one["memory_s_per_token"])
    assert found["prompt"]["tokens_per_pass"] == 64
    assert found["prompt"]["drive_bytes_per_token"] < one["drive_bytes_per_token"] / 4
    assert (found["drive"]["origin"], found["memory_rate"]["origin"]) == ("as given", "as given")
    half = plan(*TINY, *RATES, "--expert-gb", found["memory"]["experts"] / 2 * 0.0000164)
    assert 0.3 < half["hit_share"] < 0.7
    assert half["generate"]["drive_bytes_per_token"] == pytest.approx(
        one["drive_bytes_per_token"] * (1 - half["hit_share"]), rel=1e-6
    )


def test_rates_are_measured_when_they_are_not_given() -> None:
    found = plan(*TINY, "--threads", "1")
    assert found["drive"]["bytes_per_s"] > 1e5
    assert found["memory_rate"]["bytes_per_s"] > 1e8
    assert "measured" in found["drive"]["origin"]
    assert "1 threads" in found["memory_rate"]["origin"]


def test_the_context_is_the_runs(tmp_path: Path) -> None:
    def context(*arguments: Any) -> tuple[int, bool]:
        found = plan(*TINY, *RATES, *arguments)["memory"]
        assert found["context_bytes"] == pytest.approx(
            found["context_fixed_bytes"] + found["context_tokens"] * found["context_bytes_per_1000_tokens"] / 1000
        )
        return found["context_tokens"], found["context_assumed"]

    assert context() == (1000, True)
    assert context("--max-tokens", "300") == (300, False)
    assert context("--ids", "1,2,3", "--ngen", "9") == (12, False)
    assert context("--ngen", "9", "Hello") == (14, False)
    state = tmp_path / "state"
    assert context("--ids", "1,2", "--ngen", "0", "--state", state) == (2, False)
    assert not state.exists()
    k3_run(*TINY, "--ids", "1,2,3,4", "--ngen", "0", "--state", state)
    before = state.read_bytes()
    assert context("--ngen", "5", "--state", state) == (9, False)
    assert (state.read_bytes(), list(tmp_path.iterdir())) == (before, [state])
    for arguments, code in (
        (["--ids", "9", "--state", state], 8),
        (["--ids", "1,2", "--max-tokens", "9", "--ngen", "8"], 2),
        (["--ids", "512"], 2),
    ):
        assert k3_run("--plan", *TINY, *RATES, *arguments).exit_code == code


@pytest.mark.usefixtures("nothing_loaded")
def test_what_does_not_fit_is_printed_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [Limit(5e12, "the machine"), Limit(1e6, "the memory limit of a cgroup")]
    monkeypatch.setattr(plan_command, "memory_limits", lambda: limits)
    result = k3_run("--plan", *TINY, *RATES)
    assert result.exit_code == 9
    assert "set by the memory limit of a cgroup" in result.stdout
    assert "does not fit" in result.stdout
    assert "the memory limit of a cgroup leaves 0.001 GB" in result.stderr
    found = plan(*TINY, *RATES, code=9)
    assert not found["fits"]
    assert [limit["set_by"] for limit in found["limits"]] == [limit.set_by for limit in limits]


@pytest.mark.usefixtures("nothing_loaded")
def test_people_can_read_it() -> None:
    shown = k3_run("--plan", *TINY, *RATES).stdout
    for part in ("KDA attention", "shared experts", "expert cache, 64 of 64", "The run fits", "MemAvailable",
                 "for every 1,000 tokens", "2.000 GB/s (as given)", "generating", "64 tokens a pass",
                 "assumed: give a prompt"):  # fmt: skip
        assert part in shown
    assert max(map(len, shown.splitlines())) < 140


def test_rates_are_for_a_plan() -> None:
    result = k3_run(*TINY, "--ids", "1", *RATES)
    assert result.exit_code == 2
    assert "--plan" in result.stderr


@pytest.mark.parametrize(
    ("direct", "granted_bytes", "said"),
    [(True, 1 << 22, "past the page cache"), (False, 1 << 22, "O_DIRECT does not work here"),
     (True, 0, "measured; huge pages: granted 0 B of 4.2 MB")],
)  # fmt: skip
def test_how_the_drives_rate_was_measured_is_told(
    direct: bool, granted_bytes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = DriveRate(1e9, direct, HugePages(1 << 22, granted_bytes))
    monkeypatch.setattr(plan_command, "drive_rate", lambda source, layers: rate)
    assert said in plan(*TINY, "--memory-gb-per-s", "10")["drive"]["origin"]
