"""The beginning of every program: its imports under guard, then its command.

Importing a command takes a quarter of a second, and what fails or interrupts that has not reached
`cli_support.run`. Python would show a traceback and end with 1, which means damaged bytes here. So the programs of
the distribution begin with `start`, and this module imports nothing that may fail. For the main thread.
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

_DRIVE, _UNSUPPORTED, _INTERNAL, _INTERRUPTED = 6, 9, 70, 130  # of errors.ExitCode, which is not imported yet

_LEAST_BYTES = ((resource.RLIMIT_AS, 160 << 20, "ulimit -v"), (resource.RLIMIT_DATA, 64 << 20, "ulimit -d"))
"""Limits below which the libraries cannot be loaded. OpenBLAS would end the process with 1, or by SIGINT."""

_ADVICE = {
    errno.ENOMEM: "Raise the limit of memory (ulimit -v, the cgroup's)",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENFILE: "Raise the limit of open files of this machine (fs.file-max)",
    errno.EACCES: "Check the permissions of the installation",
    errno.EIO: "The drive of the installation reports a fault; look at its health (dmesg, smartctl)",
}


def start(module: str) -> NoReturn:
    """Import the command `main` of a module and run it, so that every end has one of the project's exit codes.

    Ctrl-C during the imports ends the process at once with 130 and a word. What the system refuses to them ends it
    with a line and 9 (memory) or 6 (anything else), a fault of their own with a traceback and 70. What the command
    itself does is guarded by `cli_support.Command`.
    """
    catches = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so for a job in the background
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
    """The command of a module; ends the process when it cannot be imported."""
    try:
        return import_module(module).main
    except Exception as error:
        number = _refusal(error)
        if number is None:  # a fault of ours, or of the installation: shown whole
            _end(traceback.format_exc().rstrip(), _INTERNAL)
        place = getattr(error, "filename", None) or getattr(error, "path", None)
        _end(
            f"error: the program cannot be loaded: {os.strerror(number)}{f' (file {place})' if place else ''}. "
            + _ADVICE.get(number, "Look at the place where it is installed, or install it anew"),
            _UNSUPPORTED if number == errno.ENOMEM else _DRIVE,
        )


def _refusal(error: Exception) -> int | None:
    """The errno of an import that the system refused, None for any other error."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error, ImportError):  # the dynamic loader says why in words only, which nobody has translated
        said = f"{error} {error.__cause__ or error.__context__}"
        return next((number for number in _ADVICE if os.strerror(number) in said), None)
    return None


def _leave(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """End the process as interrupted, at once: nothing has begun yet."""
    _say("\ninterrupted")
    os._exit(_INTERRUPTED)


def _end(text: str, code: int) -> NoReturn:
    _say(text)
    os._exit(code)


def _say(text: str) -> None:
    """Write to stderr without its buffer: a signal may have come while that is in use."""
    if sys.stderr is None:  # it was closed, and its number may be another file's by now
        return
    with contextlib.suppress(OSError):  # the exit status has to do
        os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))
