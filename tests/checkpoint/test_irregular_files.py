"""Holds up that a pipe, a device, a directory or a socket in place of any file is refused at once, by its name."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3.base.direct_io import ReadFile
from k3.base.errors import DriveError, K3Error
from k3.container.reader import Container
from k3.verify.structure import check_structure
from tests.support.containers import Built, build_container

HANG_S = 20


def put_socket(path: Path) -> None:
    """Leave a socket at `path`, whose name may be too long for one."""
    here = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"/proc/self/fd/{here}/{path.name}")
    os.close(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "socket": put_socket,
    "terminal": lambda path: path.symlink_to("/dev/ptmx"),
}
FILES = ["home/manifest.json", "home/catalog.mdb", "home/config.json", "home/dense.safetensors", "a/root.json",
         "a/experts/layer-00001.safetensors"]  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("container")
    return build_container(place / "home", [place / "a"], [1, 2])


@pytest.fixture(autouse=True)
def guard() -> Iterator[None]:
    """End a test that hangs in a system call."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError("it waits for what is no file")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused_by_name(built: Built, tmp_path: Path, name: str, kind: str) -> None:
    shutil.copytree(built.home.parent, tmp_path / "c")
    path = tmp_path / "c" / name
    path.unlink()
    KINDS[kind](path)
    with pytest.raises(K3Error, match=path.name):  # noqa: PT012 - the configuration is read when it is asked for
        container = Container.open(tmp_path / "c" / "home", [tmp_path / "c" / "a"])
        _ = container.config
    try:
        findings = [
            str(finding) for finding in check_structure(tmp_path / "c" / "home", [tmp_path / "c" / "a"]).findings
        ]
    except K3Error as error:
        findings = [str(error)]
    if path.name != "root.json":  # without it, the root is found where the container was made
        assert any(path.name in finding for finding in findings)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_of_data_does_not_wait_for_what_is_no_file(tmp_path: Path, kind: str, direct: bool) -> None:
    KINDS[kind](tmp_path / "x")
    with pytest.raises(DriveError) as caught:
        ReadFile(tmp_path / "x", direct=direct)
    assert caught.value.advice is not None


def test_small_files_have_a_largest_size(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.home.parent, tmp_path / "c")
    os.truncate(tmp_path / "c" / "home" / "manifest.json", 1 << 40)
    with pytest.raises(K3Error, match="more than the 67108864 allowed"):
        Container.open(tmp_path / "c" / "home")
