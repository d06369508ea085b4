"""Ctrl-C and SIGTERM as `KeyboardInterrupt` in the main thread, but not while work is handed to a pool.

`ThreadPoolExecutor.submit` takes locks that are written in Python: an exception between taking one and the block
that gives it back leaves it taken, the pool's threads wait for it for ever, and so does who waits for their work.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Interrupts:
    """What the handler and `submit` tell each other; both run in the main thread."""

    held = False
    pending = False


def install() -> None:
    """Let both signals interrupt, also where Ctrl-C is ignored and only SIGTERM can (a job in the background)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


def submit(pool: Executor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """`pool.submit`, from the main thread; an interrupt that comes meanwhile is raised when it is done."""
    _Interrupts.held = True
    try:
        return pool.submit(work, *args, **kwargs)
    finally:
        _Interrupts.held = False
        if _Interrupts.pending:
            _Interrupts.pending = False
            raise KeyboardInterrupt


def _interrupt(number: int, frame: Any) -> None:
    if _Interrupts.held:
        _Interrupts.pending = True
    else:
        raise KeyboardInterrupt
