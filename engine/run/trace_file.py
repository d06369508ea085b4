"""The file of --trace: a run as JSON lines, one per layer of each pass and one per pass.

A pass is one way through the layers, with a chunk of the prompt or one generated token.

    {"type": "layer", "pass": 0, "layer": 1, "attention": "kda" | "mla", "mlp": "dense" | "moe",
     "position": 0, "tokens": 24,          first position and number of tokens of the pass
     "attention_ms": 1.2, "mlp_ms": 3.4,   wall time of the two halves, mixing and norms included
     "wait_ms": 0.8,                       part of mlp_ms spent waiting for experts
     "read_bytes": 842752,                 requested from the drives during the layer, prefetches included
     "experts": [[0, 3, 9, 14], ...],      per token, ascending; null in a dense layer
     "foreseen": [3, 14, ...]}             the last prefetch of look-ahead, the likeliest first: empty where
                                           none pays; null without look-ahead, and in the first pass
    {"type": "pass", "pass": 0, "position": 0, "tokens": 24, "ms": 25.0, "head_ms": 1.0, "read_bytes": ...}

The file appears with the first pass and grows by a whole pass at a time, so that it can be used after a run that
failed. A trace never changes what is computed. One thread.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from k3.base.output_file import OutputFile

_ADVICE = "The passes before are kept, if any; choose another place, or free space, and run again"


class TraceFile:
    """The file of a trace, created with the first pass. A context manager; leaving it closes the file."""

    def __init__(self, path: Path) -> None:
        """Raise DriveError when nothing can be written to `path`."""
        self._lines: list[str] = []
        self._file = OutputFile(path, "the trace", _ADVICE)

    def record(self, kind: str, **fields: Any) -> None:
        """Keep one record until the end of its pass."""
        self._lines.append(json.dumps({"type": kind, **fields}) + "\n")

    def end_pass(self) -> None:
        """Write the records of the pass. DriveError or SpaceError, and then none of them is written."""
        self._file.write("".join(self._lines).encode())
        self._file.publish()
        self._lines.clear()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
