"""`--logits FILE`: raw little-endian float32, one row of the vocabulary per position.

Row i holds the logits that follow token i of the prompt and then of what was generated, so that a run over
prompt and continuation together writes the same file. Rows go to a temporary file beside the wanted one,
which takes its name only when the run has ended well. One thread.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from k3.engine.writing import write_error


class LogitsFile:
    """A context manager: left without `publish`, it removes what it wrote."""

    def __init__(self, path: Path) -> None:
        """DriveError when nothing can be written there."""
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            self._file = open(self._temporary, "wb")  # noqa: SIM115 - closed in __exit__
        except OSError as error:
            raise write_error("cannot write logits", error, path) from error

    def append(self, rows: npt.NDArray[np.float32]) -> None:
        """Write rows [S, vocab]. DriveError or SpaceError when they cannot be written."""
        try:
            self._file.write(rows.astype("<f4", copy=False).tobytes())
        except OSError as error:
            raise write_error("cannot write logits", error, self.path) from error

    def publish(self) -> None:
        """Give the file its name."""
        try:
            self._file.close()
            self._temporary.replace(self.path)
        except OSError as error:
            raise write_error("cannot write logits", error, self.path) from error

    def __enter__(self) -> LogitsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)
