"""Holds up: k3-store's commands say the truth, in words and in JSON, with the project's exit codes."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.base.direct_io import ReadFile
from k3.base.memory_limit import memory_limit
from k3.store.cli import main
from k3.store.client.daemon_source import DaemonSource
from k3.store.commands import drive_bench
from k3.store.protocol import wire
from tests.support.containers import Built, build_container
from tests.support.daemons import Inside, daemon_inside


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a"], [1, 2], experts=40)


@pytest.fixture
def daemon(built: Built, tmp_path: Path) -> Iterator[Inside]:
    with daemon_inside(tmp_path / "s", built.directories, quota=4, max_clients=2, cache_bytes=300_000) as inside:
        yield inside


def k3_store(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_status(built: Built, daemon: Inside) -> None:
    source = DaemonSource(daemon.socket, name="engine 7")
    held = list(source.lease(1, range(3)))
    told = k3_store("status", "--socket", daemon.socket)
    assert told.exit_code == 0, told.stderr
    for word in (
        str(built.home),
        str(built.directories[1]),
        "33 %",
        "67 %",
        "least-stale",
        "3 held",
        "3 misses",
        "1 of 2",
    ):
        assert word in told.stdout
    (status,) = lines(k3_store("status", "--socket", daemon.socket, "--json"))
    assert status["type"] == "status"
    assert status["cache"]["misses"] == 3
    assert [client["name"] for client in status["clients"]] == ["engine 7"]
    for lease in held:
        lease.release()
    source.close()


def test_ps(daemon: Inside) -> None:
    source = DaemonSource(daemon.socket, name="engine 7")
    held = list(source.lease(1, range(3)))
    told = k3_store("ps", "--socket", daemon.socket).stdout.splitlines()
    assert len(told) == 2
    assert told[0].split() == [
        "client",
        "name",
        "pid",
        "since",
        "leases",
        "leased",
        "waiting",
        "granted",
        "errors",
    ]
    assert "engine 7" in told[1]
    (ps,) = lines(k3_store("ps", "--socket", daemon.socket, "--json"))
    assert [(c["name"], c["leases"], c["leased_bytes"]) for c in ps["clients"]] == [("engine 7", 3, 3 * 24480)]
    assert [drive.keys() for drive in ps["drives"]] == 2 * [{"path", "queue", "oldest_read_s"}]
    for lease in held:
        lease.release()
    source.close()


@pytest.mark.parametrize("command", ["status", "ps", "warm", "bench"])
def test_no_daemon_is_exit_code_10(tmp_path: Path, command: str) -> None:
    told = k3_store(command, "--socket", tmp_path / "none")
    assert told.exit_code == 10
    assert "no k3-store serves on this socket" in told.stderr
    as_json = k3_store(command, "--socket", tmp_path / "none", "--json")
    assert json.loads(as_json.stderr)["error"] == "DaemonError"


def test_warm(daemon: Inside) -> None:
    told = lines(k3_store("warm", "--socket", daemon.socket, "--layers", "1", "--experts", "0-3,6", "--json"))
    assert {key: told[-1][key] for key in ("type", "experts", "read", "read_bytes")} == {
        "type": "warm", "experts": 5, "read": 5, "read_bytes": 5 * 24480,
    }  # fmt: skip
    source = DaemonSource(daemon.socket)
    for lease in source.lease(1, [0, 1, 2, 3, 6]):
        lease.release()
    assert source.stats().hits == 5
    source.close()


def test_warm_refuses_what_does_not_fit(daemon: Inside) -> None:
    told = k3_store("warm", "--socket", daemon.socket)
    assert told.exit_code == 9
    assert "80 experts do not fit into a cache of 12" in told.stderr
    assert k3_store("warm", "--socket", daemon.socket, "--layers", "1", "--experts", "50").exit_code == 3
    assert k3_store("warm", "--socket", daemon.socket, "--layers", "9", "--experts", "0").exit_code == 3


def test_bench(built: Built, daemon: Inside) -> None:
    told = k3_store("bench", "--socket", daemon.socket, "--depths", "1,4", "--seconds", "0.1", "--json")
    if told.exit_code == 9 and "page cache" in told.stderr:
        pytest.skip("no drive here that O_DIRECT reaches")
    assert told.exit_code == 0, told.stderr
    *rows, summary = lines(told)
    wheres = [*sorted(map(str, built.directories)), "all drives", "daemon"]
    assert [(row["where"], row["depth"]) for row in rows] == [(w, d) for w in wheres for d in (1, 4)]
    for row in rows:
        assert row["reads"] > 0
        assert row["from_device"] in (True, None)
        assert row["gb_per_s"] == pytest.approx(row["read_bytes"] / row["seconds"] / 1e9, abs=1e-4)
    assert summary["best_gb_per_s"].keys() == set(wheres)
    text = k3_store("bench", "--socket", daemon.socket, "--depths", "2", "--seconds", "0.05")
    assert "through the daemon" in text.stdout


def test_bench_refuses_a_warm_cache(built: Built, tmp_path: Path) -> None:
    with daemon_inside(tmp_path / "w", built.directories, max_clients=2) as inside:
        source = DaemonSource(inside.socket)
        for layer in (1, 2):
            for lease in source.lease(layer, range(40)):
                lease.release()
        source.close()
        told = k3_store("bench", "--socket", inside.socket, "--depths", "1", "--seconds", "0.05")
        if "page cache" in told.stderr:
            pytest.skip("no drive here that O_DIRECT reaches")
        assert told.exit_code == 9
        assert "came from the daemon's cache" in told.stderr


def test_bench_refuses_the_page_cache(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = (
        "--dirs",
        f"{built.home},{built.directories[1]}",
        "--no-daemon",
        "--depths",
        "1",
        "--seconds",
        "0.05",
    )
    monkeypatch.setattr(drive_bench, "device_read_bytes", lambda: 12345)  # the kernel says: nothing was fetched
    told = k3_store("bench", *options)
    assert told.exit_code == 9
    assert "in a page cache" in told.stderr
    monkeypatch.setattr(ReadFile, "_open_direct", lambda self, flags: -1)
    told = k3_store("bench", *options)
    assert told.exit_code == 9
    assert "would measure the page cache" in told.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["serve", "--dirs", "a,,b"],
        ["serve", "--dirs", "a", "--policy", "magic"],
        ["serve", "--dirs", "a", "--group", "no-such-group-here"],
        ["serve", "--dirs", "a", "--max-clients", "65"],
        ["serve", "--dirs", "a", "--io-depth", "0"],
        ["bench", "--depths", "0"],
        ["bench", "--depths", "1,x"],
        ["warm", "--layers", "x"],
        ["warm", "--experts", "1,1"],
        ["warm", "--experts", "0-3,5-4"],
        ["warm", "--experts", ",".join(["0-999999"] * 20_000)],
        ["serve", "--dirs", "a", "--metrics", "unix:~no-such-user/m"],
        ["serve", "--dirs", "a", "--metrics", "unix:"],
        ["nonsense"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert k3_store(*arguments).exit_code == 2


def test_help_names_every_command_and_exit_code() -> None:
    told = k3_store("--help").stdout
    for word in ("serve", "status", "ps", "bench", "warm", "simulate", "Exit codes", "10"):
        assert word in told
    for command in ("serve", "status", "ps", "bench", "warm"):
        assert k3_store(command, "--help").exit_code == 0


def test_the_environment_names_socket_and_directories(daemon: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3_STORE", str(daemon.socket))
    assert k3_store("status").exit_code == 0
    monkeypatch.delenv("K3_STORE")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemon.socket.parent / "nowhere"))
    assert k3_store("status").exit_code == 10
    assert memory_limit().free_bytes > 0


def test_a_place_that_may_not_be_read_is_no_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of opening it says what to do about that."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    place = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place))
    for command in ("status", "ps", "warm", "bench"):
        assert k3_store(command, "--socket", place).exit_code == 10
    assert k3_store("serve", "--container", tmp_path, "--socket", tmp_path / "t").exit_code == 5


@pytest.mark.parametrize(
    "status", [{}, {"clients": 5, "drives": "x", "home": 3}, {"clients": [{}], "drives": [{}]}]
)
@pytest.mark.parametrize("command", ["status", "ps", "bench"])
def test_a_daemon_of_another_release_is_told_so(tmp_path: Path, command: str, status: dict[str, Any]) -> None:
    """It has been up since before these commands were installed."""
    place = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(place))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                wire.receive(connection)
                wire.send_status(connection, status)

        thread = threading.Thread(target=answer)
        thread.start()
        told = k3_store(command, "--socket", place)
        thread.join()
    assert told.exit_code == 10
    assert "lacks what this command looks for" in told.stderr
    assert "Start the daemon again" in told.stderr
