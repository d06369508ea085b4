"""The place of the daemon's socket: which path, whose it is, and when what lies there may be removed.

A daemon owns its socket by an exclusive flock on `<socket>.lock`, held as long as it lives and never unlinked
(removing a lock file is how two daemons come to hold "the" lock). Under that lock a socket file is stale if, and
only if, connecting to it is answered with ECONNREFUSED. Anything that is not a socket is never touched.

`claim` is called once by a daemon's main thread; the rest is pure or only looks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from k3.container.errno_advice import Operation, refusal
from k3.container.errors import SocketError

PATH_BYTES_MAX = 107
"""sockaddr_un has 108 bytes, the last of them zero."""

SOCKET_NAME = "k3-store.sock"
SYSTEM_DIRECTORY = Path("/run/k3-store")
LOCK_SUFFIX = ".lock"


def default_path(runtime_directory: str | None) -> Path:
    """Where a daemon listens when nobody says otherwise; `runtime_directory` is XDG_RUNTIME_DIR."""
    return (Path(runtime_directory) if runtime_directory else SYSTEM_DIRECTORY) / SOCKET_NAME


def usual_path(runtime_directory: str | None) -> Path:
    """Where a client looks: the user's own daemon if there is a socket, else the system's if there is one."""
    own, system = default_path(runtime_directory), default_path(None)
    return system if system.exists() and not own.exists() else own


def check_length(path: Path) -> None:
    """SocketError when the system's address of a Unix socket has no room for this path."""
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise SocketError(
            f"a socket's path may have {PATH_BYTES_MAX} bytes, this one has {length}",
            path=path,
            advice="Choose a shorter one with --socket, for instance under /run or $XDG_RUNTIME_DIR",
        )


@dataclass(slots=True)
class ClaimedSocket:
    """A bound socket that does not listen yet, and the lock that makes its path ours.

    `lock` is None for a socket that systemd made, whose path is not ours to remove.
    """

    socket: socket.socket
    path: Path
    lock: int | None
    identity: tuple[int, int]

    def withdraw(self) -> None:
        """Stop listening and remove the socket file if it is still ours; nobody else may take the path yet."""
        self.socket.close()
        if self.lock is None:
            return
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self.identity:
                self.path.unlink()

    def close(self) -> None:
        """`withdraw`, and let go of the lock. A second call does nothing."""
        try:
            self.withdraw()
        finally:
            if self.lock is not None:
                os.close(self.lock)
                self.lock = None


def claim(path: Path, *, mode: int = 0o600, group: int | None = None) -> ClaimedSocket:
    """Bind a SOCK_SEQPACKET socket at `path`, which nobody can connect to before it listens.

    SocketError when another daemon has the path, when something else lies there, or when it is too long.
    """
    check_length(path)
    lock = _lock(path)
    try:
        _remove_stale(path)
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            bound.bind(os.fspath(path))
            if group is not None:
                os.chown(path, -1, group)
            path.chmod(mode)
            status = os.lstat(path)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        os.close(lock)
        raise _refused("cannot be made", error, path) from error
    except BaseException:
        os.close(lock)
        raise
    return ClaimedSocket(bound, path, lock, (status.st_dev, status.st_ino))


def adopt(descriptor: int) -> ClaimedSocket:
    """A listening socket that systemd made (LISTEN_FDS). SocketError when it is of another kind."""
    try:
        adopted = socket.socket(fileno=descriptor)
    except OSError as error:
        raise SocketError(f"descriptor {descriptor} from systemd is not a socket: {error.strerror}") from error
    if adopted.family != socket.AF_UNIX or adopted.type != socket.SOCK_SEQPACKET:
        adopted.close()
        raise SocketError(
            "the socket from systemd is not of the kind AF_UNIX, SOCK_SEQPACKET",
            advice="Use ListenSequentialPacket= in the socket unit",
        )
    os.set_inheritable(descriptor, False)
    return ClaimedSocket(adopted, Path(os.fsdecode(adopted.getsockname())), None, (0, 0))


def _lock(path: Path) -> int:
    """An exclusive lock beside the socket. SocketError when somebody has it."""
    lock_path = os.fspath(path) + LOCK_SUFFIX
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.open(lock_path, flags, 0o600)
    except OSError as error:
        raise _refused("cannot be locked", error, path) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _written_pid(lock)
        os.close(lock)
        if error.errno != errno.EWOULDBLOCK:
            raise _refused("cannot be locked", error, path) from error
        raise SocketError(
            f"another k3-store{owner} serves on this socket, or is just starting to",
            path=path,
            advice="Use that one, end it first, or choose another --socket",
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _written_pid(lock: int) -> str:
    """The owner's process as it wrote it, for a message only."""
    text = os.pread(lock, 20, 0).strip()
    return f" (process {text.decode()})" if text.isdigit() else ""


def _remove_stale(path: Path) -> None:
    """Remove the socket of a daemon that is gone. SocketError for everything else that lies at `path`."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise SocketError(
            "something that is not a socket lies at the socket's path, and was left alone",
            path=path,
            advice="Choose another --socket, or move it away",
        )
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
    finally:
        probe.close()
    if code != errno.ECONNREFUSED:
        found = "somebody listens" if code == 0 else f"the system answers {os.strerror(code)!r}"
        raise SocketError(
            f"a socket lies here and is not certainly abandoned: {found}",
            path=path,
            advice="End the program that has it, or choose another --socket",
        )
    path.unlink()


def _refused(problem: str, error: OSError, path: Path) -> SocketError:
    found = refusal(Operation.LISTEN, error.errno, error.strerror or str(error))
    return SocketError(f"the socket {problem}: {found.reason}", path=path, advice=found.advice)
