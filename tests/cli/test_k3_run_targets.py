"""Holds up that what `k3-run` writes damages no model, no device and no other output, and is whole or absent."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from k3.engine.cli import main
from k3.engine.launch import launched
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from tests.support.daemons import daemon_inside
from tests.support.engines import VECTORS, copied
from tests.support.mounts import small_tmpfs

TINY = str(VECTORS / "tiny_s1")
OPTIONS = ["--logits", "--trace", "--route-trace"]
WITH_STATE = [*OPTIONS, "--state"]  # which is read too, and has tests of its own
SHARD = "model-00003-of-000008.safetensors"


def k3_run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(main, [*arguments, "--ids", "1,2,3", "--ngen", "3", "--ignore-eos"], **options)


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, with its bytes."""
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copied("tiny_s1", tmp_path / "snapshot")


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run fail that loads anything."""
    monkeypatch.delattr(launched, "loading_weights")


def refused(result: Result, *said: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    for part in said:
        assert part in result.stderr


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize("option", WITH_STATE)
@pytest.mark.parametrize("name", [SHARD, "config.json", "new", "../link", "../linked/new", "../dangling"])
def test_a_snapshot_is_never_written_into(option: str, name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model / SHARD)
    (tmp_path / "linked").symlink_to(model, target_is_directory=True)
    (tmp_path / "dangling").symlink_to(model / "not-there-yet")
    before = content(tmp_path)
    refused(k3_run("--snapshot", str(model), option, str(model / name)), option, name, "belongs to the model")
    assert content(tmp_path) == before


@pytest.mark.usefixtures("never_loaded")
def test_a_path_relative_to_the_model_is_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    refused(k3_run("--snapshot", ".", "--logits", SHARD), "--logits", SHARD, "belongs to the model")


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize("linked", [True, False])
def test_a_blob_that_a_snapshot_links_to_is_the_models(linked: bool, model: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "abc"
    blob.parent.mkdir()
    (model / SHARD).rename(blob)
    (model / SHARD).symlink_to(blob)
    before = blob.read_bytes()
    target = model / SHARD if linked else blob
    refused(k3_run("--snapshot", str(model), "--logits", str(target)), "--logits", str(target), "model")
    assert blob.read_bytes() == before


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize("place", ["home", "d1", "d2"])
def test_a_container_and_its_roots_are_never_written_into(place: str, tmp_path: Path) -> None:
    home, drives = tmp_path / "home", (tmp_path / "d1", tmp_path / "d2")
    repack(RepackRequest((VECTORS / "tiny_s1",), home, drives=drives, shares=(2, 1), direct=False), Watcher())
    before = content(tmp_path)
    model = ["--container", str(home), "--dirs", ",".join(map(str, drives))]
    files = [path for path in before if path.startswith(str(tmp_path / place))]
    assert files
    for path in (*files, str(tmp_path / place / "new")):
        refused(k3_run(*model, "--trace", path), "--trace", path, "belongs to the model")
    assert content(tmp_path) == before


@pytest.mark.usefixtures("never_loaded")
def test_the_source_of_a_container_in_place_is_the_models(model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    repack(RepackRequest((model,), home, in_place=True, direct=False), Watcher())
    before = content(tmp_path)
    refused(k3_run("--container", str(home), "--logits", str(model / SHARD)), "--logits", "belongs to the model")
    assert content(tmp_path) == before


@pytest.mark.usefixtures("never_loaded")
def test_a_container_behind_a_daemon_is_the_models(tmp_path: Path) -> None:
    home, drive = tmp_path / "home", tmp_path / "drive"
    repack(RepackRequest((VECTORS / "tiny_s1",), home, drives=(drive,), direct=False), Watcher())
    before = content(tmp_path)
    with daemon_inside(tmp_path / "socket", [home, drive], max_clients=2) as daemon:
        for path in before:
            result = k3_run("--store", str(daemon.socket), "--route-trace", path)
            refused(result, "--route-trace", path, "belongs to the model")
        assert content(home) | content(drive) == before


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (1, 2), (0, 3), (3, 2)])
@pytest.mark.parametrize("spelling", ["file", "link", "a/../file", "hard"])
def test_two_options_on_one_file(one: int, other: int, spelling: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    if spelling == "hard":
        (tmp_path / "file").touch()
        (tmp_path / "hard").hardlink_to(tmp_path / "file")
    (tmp_path / "link").symlink_to("file")
    arguments = [WITH_STATE[one], str(tmp_path / "file"), WITH_STATE[other], str(tmp_path / spelling)]
    refused(k3_run("--snapshot", TINY, *arguments), WITH_STATE[one], WITH_STATE[other], "same file")


@pytest.mark.parametrize("option", OPTIONS)
def test_a_device_stays_a_device(option: str, tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_bytes(b"x")
    except PermissionError:
        pytest.skip("making device nodes is not permitted")
    result = k3_run("--snapshot", TINY, option, str(device))
    assert result.exit_code == 0, result.output
    assert stat.S_ISCHR(device.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["null"]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_pipe_gets_what_a_file_would(option: str, tmp_path: Path) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert k3_run("--snapshot", TINY, option, str(pipe)).exit_code == 0
    reader.join(60)
    assert k3_run("--snapshot", TINY, option, str(file)).exit_code == 0
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    if option == "--trace":  # its times differ
        assert len(got[0].splitlines()) == len(file.read_bytes().splitlines())
    else:
        assert got == [file.read_bytes()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(option: str, there: bool, tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "far" / "file"
    file.parent.mkdir()
    link.symlink_to(Path("far", "file"))
    if there:
        file.write_text("before")
    assert k3_run("--snapshot", TINY, option, str(link)).exit_code == 0
    assert link.readlink() == Path("far", "file")
    assert file.stat().st_size > 100
    assert [path.name for path in file.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_full_disk(option: str, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "drive", "64k") as drive:
        (drive / "filler").write_bytes(bytes(64 << 10))
        result = k3_run("--snapshot", TINY, option, str(drive / "file"))
        assert result.exit_code == 7, result.output
        for part in ("cannot write", "No space left", str(drive / "file"), "free space"):
            assert part in result.stderr
        assert "it continues where it stopped" not in result.stderr
        assert [path.name for path in drive.iterdir()] == ["filler"]


def test_a_trace_that_fills_the_disk_keeps_whole_passes(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "drive", "12k") as drive:
        arguments = ["--snapshot", TINY, "--trace", str(drive / "trace"), "--ngen", "100"]
        result = CliRunner().invoke(main, [*arguments, "--ids", "1,2,3", "--ignore-eos"])
        assert result.exit_code == 7, result.output
        assert "generation stopped after" in result.stderr
        assert "The passes before are kept" in result.stderr
        lines = (drive / "trace").read_text().splitlines()
        assert lines[-1].startswith('{"type": "pass"')
        assert all(line.endswith("}") for line in lines)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_run_that_fails_early_leaves_what_was_there(option: str, tmp_path: Path) -> None:
    target = tmp_path / "file"
    for before in ([], [target]):
        for path in before:
            path.write_text("before")
        assert k3_run("--snapshot", TINY, option, str(target), "--expert-gb", "1e9").exit_code == 9
        assert list(tmp_path.iterdir()) == before
    assert target.read_text() == "before"


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
@pytest.mark.parametrize("option", ["--temperature", "--expert-gb", "--top-p"])
def test_no_number_without_an_end(option: str, value: str) -> None:
    refused(k3_run("--snapshot", TINY, option, value), f"'{value}' is not a finite number")


def test_a_rate_of_nothing_is_not_a_number() -> None:
    arguments = ["--snapshot", TINY, "--ids", "1,2,3", "--ignore-eos"]
    one = CliRunner().invoke(main, [*arguments, "--ngen", "1"])
    assert "decode 1 tokens, - tok/s" in one.stderr
    two = CliRunner().invoke(main, [*arguments, "--ngen", "2"])
    assert "decode 2 tokens, - tok/s" not in two.stderr
