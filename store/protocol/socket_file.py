"""The place of the daemon's socket: which path, whose it is, and when what lies there may be removed.

A daemon owns its socket by an exclusive flock on `<socket>.lock`, held as long as it lives and never unlinked by
it (removing a lock file is how two daemons come to hold "the" lock), and by a name that nobody can remove
(`path_guard`). Under both, a socket file is stale if, and only if, connecting to it is answered with ECONNREFUSED.
Anything that is not a socket is never touched.

Others may remove socket and lock file (programs that clean /tmp do): `ClaimedSocket.restore` makes them again.

`claim` is called by a daemon's main thread, a `ClaimedSocket` belongs to the control loop's; the rest only looks.
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
from typing import TypeAlias

from k3.base.errno_advice import Operation, refusal
from k3.base.errors import SocketError
from k3.base.presence import NOT_THERE
from k3.store.protocol.closing import close_descriptor, close_socket
from k3.store.protocol.path_guard import already_served, release_guard, take_guard

PATH_BYTES_MAX = 107
"""sockaddr_un has 108 bytes, the last of them zero."""

SOCKET_NAME = "k3-store.sock"
SYSTEM_DIRECTORY = Path("/run/k3-store")
LOCK_SUFFIX = ".lock"
NO_FILE = (0, 0)
"""The identity of a socket that is nobody's file to look after."""


def default_path(runtime_directory: str | None) -> Path:
    """Where a daemon listens when nobody says otherwise; `runtime_directory` is XDG_RUNTIME_DIR."""
    return (Path(runtime_directory, "k3-store") if runtime_directory else SYSTEM_DIRECTORY) / SOCKET_NAME


def usual_path(runtime_directory: str | None) -> Path:
    """Where a client looks: the user's own daemon if there is a socket, else the system's if there is one.

    A place that this user may not look into is none: after `su`, XDG_RUNTIME_DIR may still be another user's.
    """
    own, system = default_path(runtime_directory), default_path(None)
    return system if _can_be_seen(system) and not _can_be_seen(own) else own


def _can_be_seen(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def check_length(path: Path) -> None:
    """SocketError when the system's address of a Unix socket has no room for this path."""
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise SocketError(
            f"a socket's path may have {PATH_BYTES_MAX} bytes, this one has {length}",
            path=path,
            advice="Choose a shorter one with --socket, for instance under /run or $XDG_RUNTIME_DIR",
        )


Socket: TypeAlias = socket.socket


@dataclass(slots=True)
class ClaimedSocket:
    """A bound socket that does not listen yet, and the lock and the name that make its path ours.

    `lock` is None for a socket that systemd made, whose path is not ours to remove or to make again.
    """

    socket: Socket
    path: Path
    lock: int | None
    identity: tuple[int, int]
    guard: Socket | None = None
    mode: int = 0o600
    group: int | None = None

    def is_in_place(self) -> bool:
        """Return True while socket and lock file at the path are still the ones made here.

        OSError when the system does not say.
        """
        if self.lock is None:
            return self.identity == NO_FILE or _is_at(self.path, self.identity)
        if not _is_at(self.path, self.identity):
            return False
        status = os.fstat(self.lock)
        return _is_at(_lock_path(self.path), (status.st_dev, status.st_ino))

    @staticmethod
    def _is_file(path: Path, identity: tuple[int, int]) -> bool:
        """Return True if this very file is at `path`, False also where that cannot be seen."""
        try:
            return _is_at(path, identity)
        except OSError:
            return False

    def restore(self) -> Socket | None:
        """Make socket and lock file again where they are gone. Returns the socket that was replaced, if one was.

        The new one does not listen yet. SocketError when the path is not to be had: its directory is gone, or
        somebody else has it, or systemd made the socket.
        """
        if self.lock is None:
            raise SocketError(
                "the socket that systemd made is not at its path any more",
                path=self.path,
                advice="Restart the socket unit",
            )
        status = os.fstat(self.lock)
        if not self._is_file(_lock_path(self.path), (status.st_dev, status.st_ino)):
            lock = _lock(self.path)
            close_descriptor(self.lock)
            self.lock = lock
        if self._is_file(self.path, self.identity):
            return None
        before = self.socket
        self.socket, self.identity = _bind(self.path, before.type, self.mode, self.group)
        return before

    def withdraw(self) -> None:
        """Stop listening and remove the socket file if it is still ours; nobody else may take the path yet."""
        close_socket(self.socket)
        if self.lock is not None and self._is_file(self.path, self.identity):
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def close(self) -> None:
        """`withdraw`, and let go of the lock. A second call does nothing."""
        try:
            self.withdraw()
        finally:
            if self.guard is not None:
                release_guard(self.guard)
                self.guard = None
            if self.lock is not None:
                close_descriptor(self.lock)
                self.lock = None


def claim(
    path: Path, *, mode: int = 0o600, group: int | None = None, kind: int = socket.SOCK_SEQPACKET
) -> ClaimedSocket:
    """Bind a socket at `path`, which nobody can connect to before it listens.

    SocketError when another daemon has the path, when something else lies there, or when it is too long.
    """
    check_length(path)
    if not path.name:
        raise SocketError("this is a directory, and no place for a socket", path=path, advice="Name a file in it")
    guard = take_guard(path)
    lock = None
    try:
        lock = _lock(path)
        bound, identity = _bind(path, kind, mode, group)
    except BaseException:
        if guard is not None:
            release_guard(guard)
        if lock is not None:
            close_descriptor(lock)
        raise
    return ClaimedSocket(bound, path, lock, identity, guard, mode, group)


def adopt(descriptor: int) -> ClaimedSocket:
    """Return a listening socket that systemd made (LISTEN_FDS). SocketError when it is of another kind."""
    try:
        adopted = socket.socket(fileno=descriptor)
    except OSError as error:
        raise SocketError(f"descriptor {descriptor} from systemd is not a socket: {error.strerror}") from error
    problem = None
    if adopted.family != socket.AF_UNIX or adopted.type != socket.SOCK_SEQPACKET:
        problem = "is not of the kind AF_UNIX, SOCK_SEQPACKET"
    elif not adopted.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        problem = "does not listen"
    if problem is not None:
        close_socket(adopted)
        raise SocketError(
            f"the socket from systemd {problem}",
            advice="Use ListenSequentialPacket= in the socket unit, and no Accept=yes",
        )
    os.set_inheritable(descriptor, False)
    name = os.fsdecode(adopted.getsockname())
    path, identity = Path(name.replace("\0", "@")), NO_FILE  # an @ is how systemd writes an abstract name
    if not name.startswith("\0"):
        with contextlib.suppress(FileNotFoundError):  # removed before we were started: nothing to look after
            status = os.lstat(path)
            identity = (status.st_dev, status.st_ino)
    return ClaimedSocket(adopted, path, None, identity)


def _bind(path: Path, kind: int, mode: int, group: int | None) -> tuple[socket.socket, tuple[int, int]]:
    """Return a socket bound to a path that was claimed, and the device and inode of its file."""
    try:
        _remove_stale(path)
        bound = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
        try:
            os.fchmod(bound.fileno(), mode)  # the file that bind makes has this mode, less the umask
            bound.bind(os.fspath(path))
            identity = _give_rights(path, mode, group)
        except BaseException:
            close_socket(bound)
            raise
    except OSError as error:
        raise _refused("cannot be made", error, path) from error
    return bound, identity


def _give_rights(path: Path, mode: int, group: int | None) -> tuple[int, int]:
    """Give a socket that was just bound its group and mode. Returns which file it is.

    Whoever may write the directory can put something else at the path before we look, also a link: nothing but a
    socket of this user is touched. SocketError when that is not what lies there.
    """
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise SocketError(
                "the socket was replaced by others as soon as it was made",
                path=path,
                advice="Choose a --socket in a directory that nobody else may write",
            )
        itself = f"/proc/self/fd/{found}"
        if group is not None and status.st_gid != group:
            os.chown(itself, -1, group)
        if stat.S_IMODE(status.st_mode) != mode:
            os.chmod(itself, mode)  # noqa: PTH101 - a name of the kernel's, not a path
    finally:
        close_descriptor(found)
    return status.st_dev, status.st_ino


def _is_at(path: Path, identity: tuple[int, int]) -> bool:
    """Return True if the file of this device and inode is at `path`. OSError when the system does not say."""
    try:
        status = os.lstat(path)
    except NOT_THERE:
        return False
    return (status.st_dev, status.st_ino) == identity


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + LOCK_SUFFIX)


def _lock(path: Path) -> int:
    """Return the descriptor of a lock file beside the socket, locked exclusively.

    SocketError when another process holds the lock, or the file is no lock file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    place = _lock_path(path)
    try:
        lock = os.open(place, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM) and os.path.lexists(place):
            raise SocketError(
                "another user's lock file lies beside the socket's path",
                path=place,
                advice="Remove it if no k3-store of that user serves there, or choose another --socket",
            ) from error
        raise _refused("cannot be locked", error, path) from error
    try:
        owner = _written_owner(lock, place)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        close_descriptor(lock)
        if error.errno != errno.EWOULDBLOCK:
            raise _refused("cannot be locked", error, path) from error
        raise already_served(owner, path) from None
    except SocketError:
        close_descriptor(lock)
        raise
    with contextlib.suppress(OSError):  # a full disk: the number is for people, and the lock is what counts
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _written_owner(lock: int, place: Path) -> str:
    """Return " (process N)" as the lock's owner wrote it, "" if nothing is written there. For messages only.

    SocketError for a file that is no lock file. Its content is about to be replaced, so it must be neither a file
    of another purpose nor a link to one.
    """
    status = os.fstat(lock)
    text = os.pread(lock, 20, 0) if stat.S_ISREG(status.st_mode) else b""
    is_ours = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1 and status.st_size < 20
    if not is_ours or not (text.strip().isdigit() or not text):
        raise SocketError(
            "something that is no lock file of k3-store lies beside the socket's path, and was left alone",
            path=place,
            advice="Move it away, or choose another --socket",
        )
    return f" (process {text.strip().decode()})" if text else ""


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
        close_socket(probe)
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
