"""How a run ends early: SIGTERM and SIGHUP are what Ctrl-C is, so that temporary files go and a state is saved.

Where what the passes have made is to be kept, all of them wait for the end of the pass. A signal that is ignored
(`nohup`, a job in the background) stays ignored. Outside of the main thread, where signals cannot be caught,
nothing is done.
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
    """Inside, SIGTERM and SIGHUP are a KeyboardInterrupt."""
    before = _caught(_ENDING, _interrupt)
    try:
        yield
    finally:
        _put_back(before)


class HeldInterrupts:
    """A context manager. Inside it the first interrupt is kept until `check`, a second one is a KeyboardInterrupt.

    Does nothing when it is not `wanted`.
    """

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._asked = False
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """KeyboardInterrupt if there was an interrupt since the beginning."""
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
        with contextlib.suppress(OSError):  # a terminal that hung up
            os.write(2, _SAID)  # a buffered stream may be in use at this very moment


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _caught(numbers: tuple[int, ...], handler: _Handler) -> dict[int, Any]:
    """Let signals that are not ignored go to `handler`; returns what they went to before."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {
        number: signal.signal(number, handler) for number in numbers if signal.getsignal(number) != signal.SIG_IGN
    }


def _put_back(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        signal.signal(number, handler)
