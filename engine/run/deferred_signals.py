"""Early ends of a run: SIGTERM and SIGHUP act like Ctrl-C, so that temporary files go and a state is saved.

With --state, signals are deferred to the end of the pass. A signal that is ignored (`nohup`, a job in the
background) stays ignored. Outside of the main thread, where Python catches no signals, nothing is done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_SAID = b"\ninterrupted: saving the state after this pass; again to stop at once\n"


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP inside the block."""
    before = _caught(_ENDING, _interrupt)
    try:
        yield
    finally:
        _put_back(before)


class HeldInterrupts:
    """A context manager that defers the first interrupt until `check`; a second one is raised at once.

    Does nothing unless `wanted`.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._asked = False
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was an interrupt since the block was entered."""
        if self._asked:
            raise KeyboardInterrupt

    def __enter__(self) -> HeldInterrupts:
        if self._wanted:
            self._before = _caught((signal.SIGINT, *_ENDING), self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _put_back(self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        with contextlib.suppress(OSError):  # a terminal that is gone
            os.write(2, _SAID)  # a signal may come while a buffered stream is in use


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _caught(numbers: tuple[int, ...], handler: _Handler) -> dict[int, Any]:
    """Route signals that are not ignored to `handler`, and return what handled them before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {
        number: signal.signal(number, handler) for number in numbers if signal.getsignal(number) != signal.SIG_IGN
    }


def _put_back(before: dict[int, Any]) -> None:
    """Restore the handlers that `_caught` returned."""
    for number, handler in before.items():
        signal.signal(number, handler)
