"""Holds up: the unit files say what the daemon needs, and start it with options that it has."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from k3.store.cli import main
from k3.store.socket_file import default_path

PACKAGING = Path(__file__).parents[2] / "packaging"


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((PACKAGING / name).read_text())
    return parser


def test_the_service() -> None:
    service = unit("k3-store.service")["Service"]
    assert service["Type"] == "notify"
    assert service["RuntimeDirectory"] == default_path(None).parent.name
    assert {"LimitMEMLOCK", "LimitNOFILE", "WatchdogSec", "Restart"} <= set(service)
    program, command, *options = service["ExecStart"].split()
    assert (program, command) == ("k3-store", "serve")
    told = CliRunner().invoke(main, ["serve", "--help"]).stdout
    for option in options:
        assert option in told or not option.startswith("--"), option
    assert options[options.index("--socket") + 1] == str(default_path(None))


def test_the_socket() -> None:
    socket = unit("k3-store.socket")["Socket"]
    assert socket["ListenSequentialPacket"] == str(default_path(None))
    assert not {"ListenStream", "ListenDatagram", "Accept"} & set(socket)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", ["k3-store.service", "k3-store.socket"])
def test_systemd_accepts_it(name: str, tmp_path: Path) -> None:
    for path in PACKAGING.iterdir():
        shutil.copy(path, tmp_path)
    told = subprocess.run(["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True)
    assert "Unknown" not in told.stderr
