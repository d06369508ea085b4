"""The standard streams, which may be closed, full, without a reader, or in another encoding.

Call `prepare` before anything is parsed and `settle` last; between them `say` writes to stderr. Main thread only.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from k3.base.safe_text import visible_text


def prepare() -> None:
    """Connect closed streams to /dev/null, and make every name printable. A second call does nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # or the next file opened would get its descriptor
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it lives as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the encoding lacks


def say(text: str) -> None:
    """Write to stderr. Once a write fails, stderr is dropped: only the exit code is left to report with."""
    try:
        sys.stderr.write(visible_text(text))
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)


def settle() -> None:
    """Flush the streams, so that the interpreter has nothing left to write, and to fail at, on exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: TextIO) -> None:
    try:
        number = stream.fileno()
    except (OSError, io.UnsupportedOperation):
        return  # a test's stream, without a descriptor
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
