"""`ModelMemory`: what every client of a daemon shares besides experts: dense tensors, and the model's description.

Read once, each tensor and file compared with its digest, then sealed: clients can map it and not change it. Main
thread only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from k3.base import checksum
from k3.base.errors import DamageError
from k3.base.regular_file import read_small_file
from k3.container.reader import SMALL_FILE_BYTES_MAX, Container
from k3.store.daemon.dense_memory import load_dense, plan_runs
from k3.store.protocol import wire
from k3.store.protocol.closing import close_descriptor
from k3.store.protocol.model_descriptor import describe, place_dense
from k3.store.protocol.native import make_memfd, seal_all, seal_future_write


class ModelMemory:
    """The two memfds that all clients share: dense tensors and the model's descriptor, both sealed."""

    def __init__(self, dense: int, dense_bytes: int, model: int, model_bytes: int) -> None:
        self.dense, self.dense_bytes = dense, dense_bytes
        self.model, self.model_bytes = model, model_bytes
        self.huge_bytes = 0
        """How much of the dense tensors is in huge pages."""
        self.load_s = 0.0

    @classmethod
    def load(
        cls,
        container: Container,
        files: Sequence[Path],
        direct: bool,
        on_progress: Callable[[str, int, int], None],
    ) -> ModelMemory:
        """Read every dense tensor and text file. DamageError or DriveError when one is not as it was written.

        `files` are the server's, by its numbers: what an error completion names. ConfigError for a configuration
        that every client would refuse.
        """
        began_s = time.monotonic()
        tensors = tuple(container.tensor(name) for name in container.tensor_names())
        placed, dense_bytes = place_dense(tensors)
        described = describe(container, placed, _text_files(container), files)
        described.identity()  # what every client computes, and would refuse
        text = described.render()
        dense, huge_bytes = make_memfd(
            "k3-dense",
            dense_bytes,
            lambda done_bytes: on_progress("reserving memory for dense tensors", done_bytes, dense_bytes),
        )
        try:
            done_bytes = 0

            def on_read(nbytes: int) -> None:
                nonlocal done_bytes
                done_bytes += nbytes
                on_progress("reading dense tensors", done_bytes, dense_bytes)

            runs = plan_runs(container, tensors)
            load_dense(dense, dense_bytes, runs, direct=direct, on_read=on_read)
            seal_future_write(dense)
            model, _ = make_memfd("k3-model", len(text))
        except BaseException:
            close_descriptor(dense)
            raise
        done = 0
        while done < len(text):
            done += os.pwrite(model, text[done:], done)
        seal_all(model)
        memory = cls(dense, dense_bytes, model, len(text))
        memory.huge_bytes, memory.load_s = huge_bytes, time.monotonic() - began_s
        return memory

    def close(self) -> None:
        """Close both; clients keep theirs."""
        wire.close_all([self.dense, self.model])


def _text_files(container: Container) -> dict[str, bytes]:
    """Return the model's small files by name, each compared with its digest."""
    found = {}
    for file in container.manifest.text_files:
        path = container.home / file.path
        data = read_small_file(path, SMALL_FILE_BYTES_MAX, DamageError, "Restore it, or repack")
        if checksum.digest(data).hex() != file.digest:
            raise DamageError("a text file does not match its digest", path=path, advice="Restore it, or repack")
        found[file.path] = data
    if "config.json" not in found:
        raise DamageError("container has no config.json", path=container.home)
    return found
