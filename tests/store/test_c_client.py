"""Holds up: the C header compiles without a warning; a client made with it gets the right bytes and errors."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3.model.keys import ExpertKey
from tests.support.containers import Built, build_container, flip
from tests.support.daemons import Inside, daemon_inside, daemon_outside
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def compiled(source: Path, program: Path) -> Path:
    command = [
        "cc", "-std=c11", "-O2", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror",
        "-fsanitize=address,undefined", "-I", str(ROOT / "store" / "include"), str(source), "-o", str(program),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def lease(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled example."""
    return compiled(ROOT / "examples" / "c_client" / "lease.c", tmp_path_factory.mktemp("c") / "lease")


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program that is sent signals, and that forks."""
    return compiled(Path(__file__).with_name("signals_and_forks.c"), tmp_path_factory.mktemp("c") / "disturbed")


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a"], [1, 2])


@pytest.fixture
def daemon(built: Built, tmp_path: Path) -> Iterator[Inside]:
    with daemon_inside(tmp_path / "s", built.directories, quota=2, max_clients=2) as inside:
        yield inside


def run(lease: Path, socket: Path, *numbers: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([lease, socket, *map(str, numbers)], capture_output=True, text=True, timeout=60)


def fnv1a(data: bytes) -> int:
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


def test_the_right_bytes(lease: Path, built: Built, daemon: Inside) -> None:
    for layer in (1, 2):
        for _ in range(2):  # cold and warm
            done = run(lease, daemon.socket, layer, 4, 0, 2, 1, 3)
            assert done.returncode == 0, done.stderr
            found = {}
            for line in done.stdout.splitlines():
                of_layer, expert, nbytes, digest = line.split()
                assert (int(of_layer), int(nbytes)) == (layer, 24480)
                found[int(expert)] = int(digest, 16)
            assert found == {expert: fnv1a(built.payloads[ExpertKey(layer, expert)]) for expert in range(5)}
    wait_until(lambda: daemon.server.stats()["clients"] == [])
    assert daemon.server.stats()["slots"]["held"] == 0


def test_many_in_one_go(lease: Path, daemon: Inside) -> None:
    """More than the ring's entries, so that its indices go round."""
    done = run(lease, daemon.socket, 1, *([0, 1, 2, 3, 4] * 600))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3000
    assert len(set(done.stdout.splitlines())) == 5


def test_errors_have_their_place(lease: Path, built: Built, daemon: Inside) -> None:
    path, extent = built.piece(1, 2)
    flip(path, extent.offset)
    done = run(lease, daemon.socket, 1, 0, 2)
    assert done.returncode == 1
    assert f"layer 1, expert 2: status 4, file 0, offset {extent.offset}" in done.stderr
    assert done.stdout.startswith("1 0 24480")
    assert "status 1" in run(lease, daemon.socket, 1, 5).stderr


def test_refusals(lease: Path, daemon: Inside, tmp_path: Path) -> None:
    assert "No such file" in run(lease, tmp_path / "none", 1, 0).stderr
    assert "File name too long" in run(lease, tmp_path / ("x" * 120), 1, 0).stderr
    from k3.store.client.socket_link import Link

    links = [Link.open(daemon.socket, "x") for _ in range(2)]
    done = run(lease, daemon.socket, 1, 0)
    assert done.returncode == 10
    assert "2 clients are attached" in done.stderr
    for link in links:
        link.close()


def test_the_daemon_goes(lease: Path, built: Built, tmp_path: Path) -> None:
    with daemon_outside(tmp_path / "t", built.directories) as outside:
        numbers = [str(n % 5) for n in range(100_000)]
        client = subprocess.Popen(
            [lease, tmp_path / "t", "1", *numbers], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert client.stdout is not None
        client.stdout.readline()
        outside.kill()
        _, err = client.communicate(timeout=30)
        assert client.returncode == 10
        assert "the daemon ended the connection" in err


@pytest.mark.parametrize("restart", [0, 1], ids=["interrupts", "restarts"])
@pytest.mark.parametrize("number", [signal.SIGCHLD, signal.SIGALRM, signal.SIGWINCH])
def test_signals_end_nothing(disturbed: Path, daemon: Inside, number: signal.Signals, restart: int) -> None:
    """A wait whose time began anew with each signal would not end; one that gives up says that all is void."""
    daemon.server.inject("stall", argument=60_000)
    command = [str(disturbed), "signals", str(daemon.socket), str(int(number)), str(restart)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        said = program.stdout.readline()
        daemon.server.clear_faults()
        out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert (said, out[:8]) == ("asked\n", "signals ")


def test_a_forked_child_leaves_its_parent_s_leases_alone(disturbed: Path, daemon: Inside) -> None:
    command = [str(disturbed), "fork", str(daemon.socket)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        said = program.stdout.readline()
        held = [client["leases"] for client in daemon.server.stats()["clients"]]
        _, err = program.communicate("\n", timeout=60)
    assert program.returncode == 0, err
    assert (said, held) == ("forked\n", [2])
    assert daemon.server.stats()["stale_releases"] == 0
