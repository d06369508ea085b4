"""Entry of every program: import its command and run it, with an exit code for every failure.

Importing a command takes a quarter of a second, and a failure or an interrupt during that time comes before
`cli_support.run`. Python would show a traceback and exit with 1, which means damaged bytes here. So the programs
of the distribution call `start`, and this module imports nothing that may fail. For the main thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import traceback
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

_DRIVE, _UNSUPPORTED, _INTERNAL, _INTERRUPTED = 6, 9, 70, 130  # as in errors.ExitCode, which is not imported yet

_LEAST_BYTES = ((resource.RLIMIT_AS, 160 << 20, "ulimit -v"), (resource.RLIMIT_DATA, 64 << 20, "ulimit -d"))
"""Limits below which the libraries cannot be loaded: OpenBLAS would end the process with 1, or by SIGINT."""

_ADVICE = {
    errno.ENOMEM: "Raise the limit of memory (ulimit -v, the cgroup's)",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENFILE: "Raise the limit of open files of this machine (fs.file-max)",
    errno.EACCES: "Check the permissions of the installation",
    errno.EIO: "The drive of the installation reports a fault; check its health (dmesg, smartctl)",
}


def start(module: str) -> NoReturn:
    """Import the command `main` of a module and run it, so that every end has one of the project's exit codes.

    Ctrl-C during the imports ends the process at once, with a line on stderr and 130. An import that the system
    refuses ends it with a line and 9 (memory) or 6 (anything else), one that fails otherwise with a traceback and
    70. The command itself is guarded by `cli_support.Command`.
    """
    catches = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # false in a background job
    try:
        if catches:  # an exception inside an import could be swallowed, or shown by a library as "ignored"
            signal.signal(signal.SIGINT, _leave)
        _refuse_little_memory()
        command = _imported(module)
        if catches:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
        raise AssertionError("a command ends by SystemExit")
    except KeyboardInterrupt:
        _leave()
    finally:
        if catches:  # while the interpreter ends, Ctrl-C shows no traceback either
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _refuse_little_memory() -> None:
    for number, least_bytes, name in _LEAST_BYTES:
        allowed_bytes, _ = resource.getrlimit(number)
        if allowed_bytes != resource.RLIM_INFINITY and allowed_bytes < least_bytes:
            _end(
                f"error: {name} allows {allowed_bytes / 1e6:.1f} MB of memory, and no command runs with less than "
                f"{least_bytes / 1e6:.1f} MB. Raise the limit ({name})",
                _UNSUPPORTED,
            )


def _imported(module: str) -> Any:
    """Return the command of a module; end the process when it cannot be imported."""
    try:
        return import_module(module).main
    except Exception as error:
        number = _refusal(error)
        if number is None:  # a bug here or in the installation: show its traceback
            _end(traceback.format_exc().rstrip(), _INTERNAL)
        place = getattr(error, "filename", None) or getattr(error, "path", None)
        _end(
            f"error: the program cannot be loaded: {os.strerror(number)}{f' (file {place})' if place else ''}. "
            + _ADVICE.get(number, "Check the directory in which it is installed, or install it again"),
            _UNSUPPORTED if number == errno.ENOMEM else _DRIVE,
        )


def _refusal(error: Exception) -> int | None:
    """Return the errno of an import that the system refused, None for any other error."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, ImportError):  # the dynamic loader gives the reason as English text only
        said = f"{error} {error.__cause__ or error.__context__}"
        return next((number for number in _ADVICE if os.strerror(number) in said), None)
    return None


def _leave(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """End the process as interrupted, at once: the command has not begun."""
    _say("\ninterrupted")
    os._exit(_INTERRUPTED)


def _end(text: str, code: int) -> NoReturn:
    _say(text)
    os._exit(code)


def _say(text: str) -> None:
    """Write to stderr without its buffer, which the code that the signal interrupted may be using."""
    if sys.stderr is None:  # closed: its descriptor may belong to another file by now
        return
    with contextlib.suppress(OSError):  # only the exit code is left to report with
        os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
