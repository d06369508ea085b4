"""Every program of the distribution ends with a code of the project also while it is being imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

PROGRAMS = {entry.name: entry.value for entry in distribution("k3-store").entry_points}

INTERRUPTED = """
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupted())
"""


def _program(name: str, prepared: str = "", limits: str = ":", arguments: str = "--help") -> str:
    """Return a shell's line that begins a program as its script does, after some Python."""
    module, _, function = PROGRAMS[name].partition(":")
    code = f"import os, signal, sys\n{prepared}\nfrom {module} import {function}\nsys.exit({function}())"
    return f"{limits}; exec {sys.executable} -c '{code}' {arguments}"


def _ended(line: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


@pytest.mark.parametrize("name", PROGRAMS)
def test_ctrl_c_during_the_imports_is_one_word(name: str) -> None:
    ended = _ended(_program(name, INTERRUPTED))
    assert (ended.returncode, ended.stdout, ended.stderr.split()) == (130, "", ["interrupted"])


def test_ctrl_c_that_is_ignored_stays_ignored() -> None:
    ended = _ended(_program("k3-verify", INTERRUPTED, limits='trap "" INT'))
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("kilobytes", [60_000, 110_000, 150_000])
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_address_space_without_room_for_the_libraries_is_told(name: str, kilobytes: int) -> None:
    """OpenBLAS would end the process with 1, which means damage."""
    ended = _ended(_program(name, limits=f"ulimit -v {kilobytes}"))
    assert ended.returncode == 9, ended.stderr
    assert f"ulimit -v allows {kilobytes * 1024 / 1e6:.1f} MB" in ended.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_too_little_data_for_the_libraries_is_told(name: str) -> None:
    ended = _ended(_program(name, limits="ulimit -d 60000"))
    assert ended.returncode == 9, ended.stderr
    assert "ulimit -d allows 61.4 MB" in ended.stderr


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [
        ("raise MemoryError", 9, "Cannot allocate memory"),
        ("raise OSError(24, os.strerror(24), name)", 6, "Too many open files (file click). Raise the limit"),
        ("raise OSError(5, os.strerror(5), name)", 6, "Input/output error (file click)"),
        ('raise ImportError("x.so: failed to map segment: Cannot allocate memory")', 9, "Cannot allocate memory"),
        ('raise ImportError("x.so: cannot open: Too many open files", path="x.so")', 6, "(file x.so)"),
    ],
)
@pytest.mark.parametrize("name", ["k3-verify", "k3-run"])
def test_what_the_system_refuses_to_the_imports_is_one_line(name: str, failure: str, code: int, said: str) -> None:
    ended = _ended(_program(name, INTERRUPTED.replace("os.kill(os.getpid(), signal.SIGINT)", failure)))
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert said in ended.stderr


def test_a_fault_of_the_installation_is_shown_whole_and_is_not_damage() -> None:
    prepared = INTERRUPTED.replace(
        "os.kill(os.getpid(), signal.SIGINT)", 'raise ImportError("not for this Python")'
    )
    ended = subprocess.run(["bash", "-c", _program("k3-verify", prepared)], capture_output=True, text=True)
    assert ended.returncode == 70
    assert "Traceback" in ended.stderr
    assert "not for this Python" in ended.stderr


def test_a_closed_stderr_changes_no_exit_code(tmp_path: Path) -> None:
    ended = _ended(_program("k3-verify", INTERRUPTED, arguments="--help 2>&-"))
    assert (ended.returncode, ended.stderr) == (130, "")
