"""The tree of operating errors, and the exit code that each one gives a command.

An operating error is something a user can cause or meet: a bad file, a full drive, a damaged byte. Its message
says what is wrong, where (file, tensor, layer, expert, offset) and what to do about it; it never shows a
traceback. A mistake of the programmer is an assertion or a plain Python exception instead.

    K3Error
    ├── SourceError            the snapshot cannot be used as it is
    │   ├── HeaderError        a safetensors header is invalid
    │   ├── ShardError         a shard is missing, truncated, empty, a pointer, or not the published bytes
    │   ├── IndexFileError     model.safetensors.index.json is missing, stale or contradicts the shards
    │   ├── ConfigError        config.json is missing or contradicts itself
    │   ├── ExpertError        an expert is incomplete or differs from its neighbours in form
    │   └── QuantizeError      a weight is not finite
    ├── ContainerError         the container cannot be used as it is
    │   ├── NotAContainerError
    │   ├── IncompleteError    the repack is unfinished, or a root is missing
    │   ├── VersionError       written in a newer format version (also of a saved state)
    │   └── DamageError        bytes differ from their digest
    ├── DriveError             the operating system refused a read or a write
    │   ├── SpaceError         a drive is full, or would be
    │   └── NoMemoryError      the system had no memory for it
    ├── DaemonError            k3-store is not running, refused, or ended
    │   ├── WireError          a control message breaks the protocol
    │   └── SocketError        the socket's path cannot be used, or another daemon has it
    ├── ResumeError            the work to resume has other parameters or another source
    └── UnsupportedError       valid input, but this program cannot do what is asked
"""

from __future__ import annotations

import enum
import os
from typing import Any

from k3.base.safe_text import visible


class ExitCode(enum.IntEnum):
    """The exit codes of a command; the same for every command of the project."""

    OK = 0
    DAMAGED = 1
    USAGE = 2
    SOURCE = 3
    INCOMPLETE = 4
    NOT_A_CONTAINER = 5
    DRIVE = 6
    SPACE = 7
    RESUME = 8
    UNSUPPORTED = 9
    DAEMON = 10
    INTERNAL = 70
    INTERRUPTED = 130
    CLOSED_PIPE = 141


EXIT_CODE_HELP: dict[ExitCode, str] = {
    ExitCode.OK: "success",
    ExitCode.DAMAGED: "bytes are damaged, missing or differ from the source",
    ExitCode.USAGE: "wrong arguments",
    ExitCode.SOURCE: "the snapshot, or the model in it, cannot be used as it is",
    ExitCode.INCOMPLETE: "the container is unfinished, or a root is missing",
    ExitCode.NOT_A_CONTAINER: "not a container",
    ExitCode.DRIVE: "a read or write failed",
    ExitCode.SPACE: "not enough space",
    ExitCode.RESUME: "the work to resume has other parameters or another source",
    ExitCode.UNSUPPORTED: "a newer format, too little memory, or something this program cannot do",
    ExitCode.DAEMON: "k3-store is not running, refused, or ended",
    ExitCode.INTERNAL: "a bug in this program",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.CLOSED_PIPE: "the reader of the output closed the pipe",
}


_VERBS = (
    "is ", "was ", "has ", "does ", "cannot be ", "holds ", "names ", "says ", "lies ", "ends ", "differs ",
)  # fmt: skip


class K3Error(Exception):
    """An operating error: the problem, its place, and the next step.

    `problem` is one sentence without a full stop; where it begins with a verb ("is a dangling link"), the place is
    its subject. The keywords name the place; `advice` is the next step.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(
        self,
        problem: str,
        *,
        path: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        layer: int | None = None,
        expert: int | None = None,
        offset: int | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = None if path is None else os.fspath(path)
        self.tensor = tensor
        self.layer = layer
        self.expert = expert
        self.offset = offset
        self.advice = advice

    def where(self) -> str:
        """Return the place as one phrase, empty when none was given."""
        parts = []
        if self.path is not None:
            parts.append(f"file {self.path}")
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor}")
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.expert is not None:
            parts.append(f"expert {self.expert}")
        if self.offset is not None:
            parts.append(f"offset {self.offset}")
        return ", ".join(parts)

    def __str__(self) -> str:
        where = self.where()
        text = f"{self.problem} ({where})" if where else self.problem
        if where and self.problem.startswith(_VERBS):
            text = f"{where} {self.problem}"
        return visible(f"{text}. {self.advice}" if self.advice else text)

    def as_dict(self) -> dict[str, Any]:
        """Return the error as a JSON object, without the places that are unknown."""
        fields = {
            "error": type(self).__name__,
            "exit_code": int(self.exit_code),
            "problem": self.problem,
            "path": self.path,
            "tensor": self.tensor,
            "layer": self.layer,
            "expert": self.expert,
            "offset": self.offset,
            "advice": self.advice,
        }
        return {key: value for key, value in fields.items() if value is not None}


class SourceError(K3Error):
    """The snapshot cannot be used as it is."""

    exit_code = ExitCode.SOURCE


class HeaderError(SourceError):
    """A safetensors header is invalid."""


class ShardError(SourceError):
    """A shard is missing, truncated, empty, a pointer file, or not the bytes that were published."""


class IndexFileError(SourceError):
    """The shard index is missing, stale or contradicts the shards."""


class ConfigError(SourceError):
    """config.json is missing, unreadable or contradicts itself."""


class ExpertError(SourceError):
    """An expert is incomplete or differs from its neighbours in form."""


class QuantizeError(SourceError):
    """A weight that should be quantized is not finite."""


class ContainerError(K3Error):
    """The container cannot be used as it is."""

    exit_code = ExitCode.DAMAGED


class NotAContainerError(ContainerError):
    """There is no container at this path."""

    exit_code = ExitCode.NOT_A_CONTAINER


class IncompleteError(ContainerError):
    """The repack is unfinished, or a root is missing."""

    exit_code = ExitCode.INCOMPLETE


class VersionError(ContainerError):
    """The container, or a saved state, was written in a newer format version."""

    exit_code = ExitCode.UNSUPPORTED


class DamageError(ContainerError):
    """Bytes differ from their digest, or a file from its recorded size."""


class DriveError(K3Error):
    """The operating system refused a read or a write."""

    exit_code = ExitCode.DRIVE


class SpaceError(DriveError):
    """A drive is full, or would be."""

    exit_code = ExitCode.SPACE


class NoMemoryError(DriveError):
    """The operating system had no memory for a read, a write or a mapping; no drive has failed."""

    exit_code = ExitCode.UNSUPPORTED


class DaemonError(K3Error):
    """The k3-store daemon is not running, refused, or ended."""

    exit_code = ExitCode.DAEMON


class WireError(DaemonError):
    """A control message breaks the protocol."""


class SocketError(DaemonError):
    """The socket's path cannot be used, or another daemon has it."""


class ResumeError(K3Error):
    """The work to resume (a repack, a saved state) has other parameters or another source."""

    exit_code = ExitCode.RESUME


class UnsupportedError(K3Error):
    """The input is valid, but this program cannot do what is asked with it."""

    exit_code = ExitCode.UNSUPPORTED
