"""The file of --logits: raw little-endian float32, one row of the vocabulary per position.

Row i holds the logits after token i of prompt and generation, so that a run on both together writes the same
file. The file appears under its name only when the run has ended well. One thread.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3.base.output_file import OutputFile


class LogitsFile(OutputFile):
    """A file of logits. A context manager: without `publish`, it removes what it wrote."""

    def __init__(self, path: Path) -> None:
        """Open a temporary file beside `path`. DriveError when nothing can be written there."""
        super().__init__(path, "logits")

    def append(self, rows: npt.NDArray[np.float32]) -> None:
        """Write rows [S, vocab]. DriveError or SpaceError when they cannot be written."""
        self.write(rows.astype("<f4", copy=False).tobytes())
