"""Ctrl-C that waits for the end of a pass, so that what the passes have made can be saved. Main thread only."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SAID = b"\ninterrupted: saving the state after this pass; again to stop at once\n"


class HeldInterrupts:
    """A context manager. Inside it the first Ctrl-C is kept until `check`, a second one is a KeyboardInterrupt.

    Does nothing when it is not `wanted`, and outside of the main thread, where signals cannot be caught.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._asked = False
        self._before: Any = None

    def check(self) -> None:
        """KeyboardInterrupt if Ctrl-C was pressed since the beginning."""
        if self._asked:
            raise KeyboardInterrupt

    def __enter__(self) -> HeldInterrupts:
        if self._wanted:
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wanted:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        os.write(2, _SAID)  # a buffered stream may be in use at this very moment
