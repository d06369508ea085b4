"""Holds up: one daemon per socket; stale ones are taken over only when certainly stale, nothing else removed."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from k3.base.errors import SocketError
from k3.store.daemon import serve
from k3.store.daemon.model_service import ServeSettings
from k3.store.daemon.serve import ServeOptions
from k3.store.daemon.systemd import Supervisor
from k3.store.protocol import path_guard, socket_file
from k3.store.protocol.path_guard import guard_name
from k3.store.protocol.socket_file import adopt, check_length, claim, default_path, usual_path
from tests.support.lingering import lingering
from tests.support.waiting import wait_until


def leave_behind(path: Path) -> None:
    """Make a socket file as a killed daemon leaves it."""
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.listen()
    left.close()
    assert path.exists()


def test_a_claimed_socket_listens_and_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    claimed = claim(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early, pytest.raises(ConnectionRefusedError):
        early.connect(str(path))  # not before it listens
    claimed.socket.listen()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))
    claimed.close()
    assert not path.exists()
    claimed.close()
    claim(path).close()


def test_a_daemon_that_drains_keeps_the_path_without_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    claimed = claim(path)
    claimed.withdraw()
    assert not path.exists()
    with pytest.raises(SocketError, match="another k3-store"):
        claim(path)
    claimed.close()
    claim(path).close()


def test_a_mode_and_a_group(tmp_path: Path) -> None:
    claimed = claim(tmp_path / "s", mode=0o660, group=os.getgid())
    status = (tmp_path / "s").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, os.getgid())
    claimed.close()


def test_a_stale_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leave_behind(path)
    claim(path).close()


def test_a_second_daemon_is_refused_and_told_by_whom(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = claim(path)
    for _ in range(2):
        with pytest.raises(SocketError, match=rf"another k3-store \(process {os.getpid()}\)") as raised:
            claim(path)
        assert raised.value.path == str(path)
    assert path.exists()
    first.close()


@pytest.mark.parametrize("kind", ["file", "directory", "link", "pipe"])
def test_what_is_not_a_socket_is_never_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        leave_behind(tmp_path / "other")
        path.symlink_to("other")
    else:
        os.mkfifo(path)
    before = os.lstat(path)
    with pytest.raises(SocketError, match="not a socket"):
        claim(path)
    assert os.lstat(path) == before


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_somebody_elses_live_socket_is_left_alone(tmp_path: Path, kind: socket.SocketKind) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, kind) as other:
        other.bind(str(path))
        if kind != socket.SOCK_DGRAM:
            other.listen()
        with pytest.raises(SocketError, match="not certainly abandoned"):
            claim(path)
        assert path.exists()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "s.lock").symlink_to(tmp_path / "target")
    with pytest.raises(SocketError, match="cannot be locked"):
        claim(tmp_path / "s")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["file of a user", "second name of a file", "pipe", "directory"])
def test_what_is_no_lock_file_is_left_as_it_is(tmp_path: Path, kind: str) -> None:
    lock, precious = tmp_path / "s.lock", tmp_path / "precious"
    precious.write_text("1234\n")
    if kind == "file of a user":
        lock.write_text('version = "1.0"\n')
    elif kind == "second name of a file":
        lock.hardlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(lock)
    else:
        lock.mkdir()
    before = os.lstat(lock)
    with pytest.raises(SocketError, match="no lock file" if kind != "directory" else "cannot be locked"):
        claim(tmp_path / "s")
    assert os.lstat(lock) == before
    assert precious.read_text() == "1234\n"
    assert not (tmp_path / "s").exists()


def test_a_lock_file_on_a_full_disk_is_a_lock_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    claimed = claim(tmp_path / "s")
    (tmp_path / "s.lock").unlink()
    assert claimed.restore() is None
    assert claimed.is_in_place()
    monkeypatch.undo()
    with pytest.raises(SocketError, match="another k3-store"):
        claim(tmp_path / "s")
    claimed.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_lock_file_of_another_user_is_called_so(open_place: Path) -> None:
    (open_place / "s.lock").touch(0o600)
    open_place.chmod(0o777)
    os.seteuid(65534)
    try:
        with pytest.raises(SocketError, match=r"another user's lock file") as raised:
            claim(open_place / "s")
    finally:
        os.seteuid(0)
    assert raised.value.path == str(open_place / "s.lock")
    assert "Remove it" in (raised.value.advice or "")


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_the_mode_is_the_one_asked_for_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for mode in (0o600, 0o660):
            claimed = claim(tmp_path / f"s{mode}", mode=mode, group=os.getgid())
            assert stat.S_IMODE(claimed.path.stat().st_mode) == mode
            claimed.close()
    finally:
        os.umask(before)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_others_put_in_the_socket_s_place_gets_no_rights(tmp_path: Path, kind: str) -> None:
    """Between the binding of the socket and the setting of its mode."""
    precious, path = tmp_path / "precious", tmp_path / "s"
    precious.touch(0o600)
    if kind == "link":
        path.symlink_to(precious)
    else:
        path.hardlink_to(precious)
    with pytest.raises(SocketError, match="replaced by others"):
        socket_file._give_rights(path, 0o660, os.getgid())
    assert stat.S_IMODE(precious.stat().st_mode) == 0o600


def test_a_socket_that_was_replaced_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    claimed = claim(path)
    path.rename(tmp_path / "moved")  # so that the number cannot be given again
    path.write_text("precious")
    claimed.close()
    assert path.read_text() == "precious"


def test_a_long_path_is_refused_by_its_length(tmp_path: Path) -> None:
    path = tmp_path / ("d" * 120) / "s"
    with pytest.raises(SocketError, match="may have 107 bytes, this one has") as raised:
        claim(path)
    assert str(path) in str(raised.value)
    assert "--socket" in str(raised.value)
    check_length(Path("/" + "x" * 106))
    with pytest.raises(SocketError):
        check_length(Path("/" + "é" * 54))  # bytes, not characters


def test_a_missing_directory_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match=r"No such file.*Make the directory"):
        claim(tmp_path / "no" / "s")


STARTER = """
    import signal, sys
    from pathlib import Path
    from k3.base.errors import SocketError
    from k3.store.protocol.socket_file import claim
    print("up", flush=True)
    sys.stdin.readline()
    try:
        claimed = claim(Path(sys.argv[1]))
        claimed.socket.listen()
        print("mine", flush=True)
        signal.pause()
    except SocketError as error:
        print("refused", error, flush=True)
"""


def test_starters_race_for_a_stale_socket_and_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "s"
    leave_behind(path)
    command = [sys.executable, "-c", textwrap.dedent(STARTER), str(path)]
    starters = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    try:
        for starter in starters:
            assert starter.stdout is not None
            assert starter.stdout.readline() == "up\n"
        for starter in starters:
            assert starter.stdin is not None
            starter.stdin.write("\n")
            starter.stdin.flush()
        said = [starter.stdout.readline() for starter in starters if starter.stdout]
        assert sorted(line.split()[0] for line in said) == ["mine", "refused", "refused", "refused"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(path))
        winner = starters[[line.split()[0] for line in said].index("mine")]
        winner.send_signal(signal.SIGKILL)
        winner.wait()
        claim(path).close()  # what a killed daemon leaves is no obstacle
    finally:
        for starter in starters:
            starter.kill()
            starter.communicate()


def test_a_socket_from_systemd(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(path))
        made.listen()
        claimed = adopt(os.dup(made.fileno()))
    assert claimed.path == path
    claimed.close()
    assert path.exists()  # systemd's, not ours


def test_a_socket_from_systemd_must_listen(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(tmp_path / "s"))
        with pytest.raises(SocketError, match="does not listen"):
            adopt(os.dup(made.fileno()))


def test_a_socket_of_systemd_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(tmp_path / "s"))
        made.listen()
        claimed = adopt(os.dup(made.fileno()))
        assert claimed.is_in_place()
        (tmp_path / "s").unlink()
        assert not claimed.is_in_place()
        with pytest.raises(SocketError, match="Restart the socket unit"):
            claimed.restore()
        claimed.close()
        again = adopt(os.dup(made.fileno()))  # a daemon that is started anew cannot help it either
        assert again.is_in_place()
        again.close()


def test_a_name_that_another_user_took_is_no_proof(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It must not keep a daemon from starting; the lock still keeps a second one from it."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        squatter.bind(guard_name(path, os.geteuid()))  # does not listen: the kernel says nothing of its owner
        claimed = claim(path)
        assert "only the lock file does now" in caplog.text
        with pytest.raises(SocketError, match="another k3-store"):
            claim(path)
        claimed.close()


@pytest.mark.parametrize("can_refuse", [True, False])
def test_what_strangers_send_to_the_name_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_refuse: bool
) -> None:
    """An abstract name has no rights: every user can connect to it, and send what takes long to close."""
    monkeypatch.setattr(path_guard, "RELEASE_S", 0.05)
    if not can_refuse:  # a kernel before Linux 6.16
        monkeypatch.setattr(path_guard, "refuse_descriptors", lambda listening: False)
    claimed = claim(tmp_path / "s")
    assert claimed.guard is not None
    with (
        lingering() as (item,),
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
    ):
        stranger.connect(claimed.guard.getsockname())
        try:
            item.sent_over(stranger, b"x")
        except PermissionError:
            assert can_refuse
        closing = threading.Thread(target=claimed.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        item.release()
    wait_until(lambda: not any(thread.name == "k3-guard" for thread in threading.enumerate()))


def test_a_second_daemon_is_refused_by_the_name_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = claim(path)
    path.unlink()
    Path(f"{path}.lock").unlink()
    with pytest.raises(SocketError, match=rf"another k3-store \(process {os.getpid()}\)"):
        claim(tmp_path / "." / "s")
    first.close()
    claim(path).close()


def test_another_kind_of_descriptor_from_systemd_is_refused(tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream,
        pytest.raises(SocketError, match="SEQPACKET"),
    ):
        adopt(os.dup(stream.fileno()))
    with open(tmp_path / "f", "w") as file, pytest.raises(SocketError, match="not a socket"):
        adopt(os.dup(file.fileno()))


def test_the_directory_of_a_default_socket_is_made(tmp_path: Path) -> None:
    path = default_path(str(tmp_path))
    options = ServeOptions(ServeSettings(), path, makes_directory=True)
    for _ in range(2):
        claimed = serve._socket(options, Supervisor())
        assert path.exists()
        claimed.close()
    with pytest.raises(SocketError, match="Make the directory"):
        serve._socket(ServeOptions(ServeSettings(), tmp_path / "other" / "s"), Supervisor())


def test_default_places(tmp_path: Path) -> None:
    assert default_path("/run/user/1000") == Path("/run/user/1000/k3-store/k3-store.sock")
    assert default_path(None) == default_path("") == Path("/run/k3-store/k3-store.sock")
    assert usual_path(str(tmp_path)) == tmp_path / "k3-store" / "k3-store.sock"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_place_of_another_user_is_none(tmp_path: Path) -> None:
    """After `su`, XDG_RUNTIME_DIR is still the other user's."""
    place = tmp_path / "run"
    place.mkdir(0o700)
    os.seteuid(65534)
    try:
        assert usual_path(str(place)) == place / "k3-store" / "k3-store.sock"
    finally:
        os.seteuid(0)
