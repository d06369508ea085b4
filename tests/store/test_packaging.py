"""Holds up: the unit files say what the daemon needs, and start it with options that it has."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from k3.store.cli import main
from k3.store.daemon.control_loop import DaemonOptions
from k3.store.protocol.socket_file import default_path

PACKAGING = Path(__file__).parents[2] / "packaging"


def unit(name: str, section: str) -> dict[str, list[str]]:
    """Return the directives of a section, each with all of its values."""
    found: dict[str, list[str]] = {}
    here = ""
    for line in (PACKAGING / name).read_text().splitlines():
        if line.startswith("["):
            here = line.strip("[]")
        elif line and not line.startswith("#") and here == section:
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_service() -> None:
    service = unit("k3-store.service", "Service")
    assert service["Type"] == ["notify"]
    assert {"LimitNOFILE", "WatchdogSec", "Restart"} <= set(service)
    program, command, *options = service["ExecStart"][0].split()
    assert (program, command) == ("k3-store", "serve")
    told = CliRunner().invoke(main, ["serve", "--help"]).stdout
    for option in options:
        assert option in told or not option.startswith("--"), option
    assert options[options.index("--socket") + 1] == str(default_path(None))
    assert float(service["TimeoutStopSec"][0]) > 2 * DaemonOptions().drain_s


def test_the_service_may_do_little() -> None:
    service = unit("k3-store.service", "Service")
    for directive in (
        "LockPersonality", "MemoryDenyWriteExecute", "NoNewPrivileges", "PrivateDevices", "PrivateTmp",
        "ProtectClock", "ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules",
        "ProtectKernelTunables", "RemoveIPC", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID",
    ):  # fmt: skip
        assert service[directive] == ["yes"], directive
    assert service["CapabilityBoundingSet"] == [""]
    assert service["UMask"] == ["0077"]
    assert service["ProtectProc"] == ["invisible"]
    assert service["IPAddressDeny"] == ["any"]
    assert service["IPAddressAllow"] == ["localhost"]
    filters = service["SystemCallFilter"]
    assert filters[0] == "@system-service"
    assert {"~@privileged", "~@resources"} <= set(filters)
    assert "prlimit64" in filters[-1]  # the soft limit of descriptors is raised


def test_the_directory_of_the_socket_is_removed_by_neither_unit() -> None:
    directory = default_path(None).parent
    for name, section in (("k3-store.service", "Service"), ("k3-store.socket", "Socket")):
        assert "RuntimeDirectory" not in unit(name, section)
    kind, path, mode, user, group, age = (
        (PACKAGING / "k3-store.tmpfiles.conf").read_text().splitlines()[-1].split()
    )
    assert (kind, path, mode, age) == ("d", str(directory), "0755", "-")
    assert [user] == unit("k3-store.service", "Service")["User"]
    assert group == user


def test_the_users_that_the_units_name_are_made() -> None:
    lines = (PACKAGING / "k3-store.sysusers.conf").read_text().splitlines()
    made = {tuple(line.split()[:2]) for line in lines if not line.startswith("#")}
    socket = unit("k3-store.socket", "Socket")
    assert ("u", unit("k3-store.service", "Service")["User"][0]) in made
    assert ("u", socket["SocketUser"][0]) in made
    assert ("g", socket["SocketGroup"][0]) in made


def test_the_socket() -> None:
    socket = unit("k3-store.socket", "Socket")
    assert socket["ListenSequentialPacket"] == [str(default_path(None))]
    assert not {"ListenStream", "ListenDatagram", "Accept"} & set(socket)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_score_of_the_service() -> None:
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=20"]
    told = subprocess.run([*command, PACKAGING / "k3-store.service"], capture_output=True, text=True)
    if "--offline" in told.stderr:
        pytest.skip("systemd is older than 250")
    assert told.returncode == 0, told.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", ["k3-store.service", "k3-store.socket"])
def test_systemd_accepts_it(name: str, tmp_path: Path) -> None:
    for path in PACKAGING.glob("k3-store.*"):
        shutil.copy(path, tmp_path)
    told = subprocess.run(["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True)
    assert "Unknown" not in told.stderr
