"""The standard streams as a command finds them: closed, full, without a reader, or in another encoding.

`prepare` comes before anything is parsed, `settle` last; between them `say` writes to stderr. Main thread only.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from k3.base.safe_text import visible_text


def prepare() -> None:
    """Let closed streams lead nowhere, and let every name be shown. A second call does nothing."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # its number must not go to another file
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it lives as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that cannot be shown must not end the run


def say(text: str) -> None:
    """Write to stderr. A stderr that takes nothing is left alone from then on: the exit status has to do."""
    try:
        sys.stderr.write(visible_text(text))
        sys.stderr.flush()
    except OSError:
        _lead_nowhere(sys.stderr)


def settle() -> None:
    """Leave nothing in the streams that the interpreter would try to write at its end, and fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _lead_nowhere(stream)


def _lead_nowhere(stream: TextIO) -> None:
    try:
        number = stream.fileno()
    except (OSError, io.UnsupportedOperation):
        return  # a stream of a test, which has no descriptor
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
