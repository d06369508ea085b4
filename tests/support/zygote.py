"""Commands of the project, forked from a process that has imported everything: some milliseconds for each.

`Zygote` starts `python -m tests.support.zygote`, tells it line by line what to run, and reads how that ended.
Each command has its own standard streams (files, or closed) and environment. What it imports, the parent imports
too, so that from the second run on no calls are those of an import. With the preloaded shim
(tests/sweep/shim.c) one call of one function fails with one errno, counted from where the command line is parsed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FUNCTIONS = (
    "open", "read", "pread", "write", "pwrite", "fsync", "fdatasync", "rename", "link", "unlink", "mkdir", "stat",
    "fstat", "statvfs", "mmap", "munmap", "msync", "ftruncate", "fallocate", "fadvise", "close", "flock", "fcntl",
    "opendir", "readdir", "memfd", "socket", "bind", "listen", "accept", "connect", "sendmsg", "recvmsg",
    "eventfd", "poll", "epoll", "thread", "madvise", "affinity", "syscall", "chmod", "lseek", "readlink", "rmdir",
    "pipe", "sockopt",
)  # fmt: skip
"""Names of the shim's functions in the order of its enumeration."""

HANG_S = 60.0

BROKEN_PIPE = "a pipe that nobody reads"
"""In the place of a file: a stream whose reader has gone."""


@dataclass(frozen=True)
class Fault:
    """Call number `nth` (from 1) of a C function, which fails with errno `number`."""

    function: str
    nth: int
    number: int


@dataclass(frozen=True)
class Ended:
    """The end of a command: its status (negative: the signal), its streams, and the shim's counts."""

    code: int
    out: str
    err: str
    struck: bool
    counts: Mapping[str, int]
    hung: bool = False


class Zygote:
    """A context manager around the process that forks. `shim` is the preloaded library, if faults are wanted."""

    def __init__(self, place: Path, shim: Path | None = None) -> None:
        self._place = place
        self._number = 0
        root = Path(__file__).parents[2]
        environment = {
            **os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        if shim is not None:
            environment["LD_PRELOAD"] = str(shim)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(HANG_S)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def run(
        self,
        command: Sequence[str],
        *,
        fault: Fault | None = None,
        streams: Mapping[int, str | None] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Ended:
        """Run a command to its end. `streams`: by number, a file in place of the usual one, or None for closed."""
        return self.wait(self.spawn(command, fault=fault, streams=streams, env=env))

    def spawn(
        self,
        command: Sequence[str],
        *,
        fault: Fault | None = None,
        streams: Mapping[int, str | None] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> int:
        """Begin a command and return its number for `wait` and `kill`; only one at a time can have a fault."""
        self._number += 1
        usual: dict[int, str | None] = {
            0: os.devnull, 1: str(self._place / f"out{self._number}"), 2: str(self._place / f"err{self._number}")
        }  # fmt: skip
        order = None if fault is None else [FUNCTIONS.index(fault.function), fault.nth, fault.number]
        return int(
            self._ask(
                "spawn", command=list(map(os.fsdecode, command)), fault=order, number=self._number,
                streams={**usual, **(streams or {})}, env=dict(env or {}),
                modules=str(self._place / f"modules{self._number}"),
            )["spawned"]
        )  # fmt: skip

    def lives(self, number: int) -> bool:
        """Return whether a command that has been begun has not ended yet."""
        return bool(self._ask("poll", number=number)["lives"])

    def kill(self, number: int, signal_number: int) -> None:
        """Send a signal to a command that has been begun."""
        self._ask("kill", number=number, signal=signal_number)

    def wait(self, number: int, patience_s: float = HANG_S) -> Ended:
        """Wait for a command's end; one that does not end is killed and told as `hung`."""
        found = self._ask("wait", number=number, patience_s=patience_s)
        texts = []
        for name in ("out", "err"):
            path = self._place / f"{name}{number}"
            texts.append(path.read_text(errors="replace") if path.exists() else "")
            path.unlink(missing_ok=True)
        counts = dict(zip(FUNCTIONS, found["counts"], strict=True))
        return Ended(found["code"], texts[0], texts[1], found["struck"], counts, found["hung"])

    def _ask(self, what: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"what": what, **fields}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


class _Shim(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_int), ("number", ctypes.c_int), ("struck", ctypes.c_int),
        ("nth", ctypes.c_long), ("counts", ctypes.c_long * 64),
    )  # fmt: skip


def _find_shim() -> tuple[_Shim, Callable[[int], None]]:
    """Return the shim's shared memory and the function that arms it here; without a shim, stand-ins for both."""
    library = ctypes.CDLL(None)
    try:
        library.k3_shim.restype = ctypes.POINTER(_Shim)
    except AttributeError:
        return _Shim(), lambda wanted: None
    return library.k3_shim().contents, library.k3_arm


def _import_everything() -> dict[str, Any]:
    import pkgutil

    import k3.container
    import k3.engine
    import k3.kernels
    import k3.repack
    import k3.serve
    import k3.store
    import k3.verify

    for package in (k3.container, k3.engine, k3.kernels, k3.repack, k3.serve, k3.store, k3.verify):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    import tqdm  # noqa: F401 - imported with the first bar

    from k3.engine.cli import main as run
    from k3.repack.cli import main as repack
    from k3.serve.cli import main as chat
    from k3.store.cli import main as store
    from k3.verify.cli import main as verify

    return {"k3-run": run, "k3-repack": repack, "k3-store": store, "k3-verify": verify, "k3-chat": chat}


def _become(order: dict[str, Any], mains: Mapping[str, Any], shim: _Shim, arm: Callable[[int], None]) -> None:
    """In the child: take the streams, arm the fault and call the command, which ends by SystemExit."""
    os.setpgid(0, 0)
    for text, place in order["streams"].items():
        number = int(text)
        if place is None:
            os.close(number)
            continue
        if place == BROKEN_PIPE:
            reader, writer = os.pipe()
            os.close(reader)
            os.dup2(writer, number)
            os.close(writer)
            continue
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(place, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    for name, value in order["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    closed = {int(text) for text, place in order["streams"].items() if place is None}
    modes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("stdin", {"mode": "r"}), ("stdout", {"mode": "w"}),
        ("stderr", {"mode": "w", "buffering": 1, "errors": "backslashreplace"}),
    )  # fmt: skip
    for number, (name, how) in enumerate(modes):
        stream = None if number in closed else open(number, closefd=False, **how)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program, *arguments = order["command"]
    main = mains[program]
    known = set(sys.modules)
    if order["fault"] is not None:
        shim.function, shim.nth, shim.number = order["fault"]
    elif order["counted"]:
        shim.function = -1
    if order["counted"]:
        arm(1)
    try:
        main(arguments, prog_name=program)
    finally:
        arm(0)
        with open(order["modules"], "w") as file:
            file.write("\n".join(sorted(set(sys.modules) - known)))


def _serve() -> None:
    mains = _import_everything()
    shim, arm = _find_shim()
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    children: dict[int, int] = {}
    modules: dict[int, str] = {}
    gc.freeze()
    for line in orders:
        order = json.loads(line)
        answer: dict[str, Any] = {}
        number = order["number"]
        if order["what"] == "spawn":
            order["counted"] = order["fault"] is not None or not children  # the first of those that run at once
            if order["counted"]:
                shim.struck = 0
                for place in range(len(FUNCTIONS)):
                    shim.counts[place] = 0
            pid = os.fork()
            if pid == 0:
                os.close(orders.fileno())
                os.close(answers.fileno())
                _become(order, mains, shim, arm)
                raise SystemExit(99)  # no command returns
            children[number], modules[number] = pid, order["modules"]
            answer["spawned"] = number
        elif order["what"] == "poll":
            state = os.waitid(os.P_PID, children[number], os.WEXITED | os.WNOHANG | os.WNOWAIT)
            answer["lives"] = state is None
        elif order["what"] == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(children[number], order["signal"])
        else:
            answer = _reap(children.pop(number), order["patience_s"])
            answer |= {"struck": bool(shim.struck), "counts": list(shim.counts[: len(FUNCTIONS)])}
            _import_too(Path(modules.pop(number)))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _import_too(listed: Path) -> None:
    """Import what a child has imported. A child that was killed has listed nothing."""
    if listed.exists():
        for name in listed.read_text().split():
            with contextlib.suppress(ImportError):  # made by another module, and by no file of its name
                importlib.import_module(name)
        listed.unlink()


def _reap(pid: int, patience_s: float) -> dict[str, Any]:
    end_s = time.monotonic() + patience_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return {"code": os.waitstatus_to_exitcode(status), "hung": False}
        if time.monotonic() > end_s:
            os.kill(pid, signal.SIGABRT)
            os.waitpid(pid, 0)
            return {"code": -signal.SIGABRT, "hung": True}
        time.sleep(0.002)


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    _serve()
