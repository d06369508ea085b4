"""Ctrl-C, SIGTERM and SIGHUP as `KeyboardInterrupt` in the main thread, but not inside a pool's or future's code.

`ThreadPoolExecutor.submit` and `Future.result` take locks that are written in Python: an exception between taking
one and the block that gives it back leaves it taken, the pool's threads wait for it forever, and so does who waits
for their work.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as StillRunning
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


POLL_S = 0.2
"""Longest that an interrupt is held while a result is waited for."""


class _Interrupts:
    """Flags that the handler and `submit` share; both run in the main thread."""

    held = False
    pending = False


def install() -> None:
    """Let the signals interrupt, also where Ctrl-C is ignored and only SIGTERM can (a job in the background).

    A SIGHUP that is ignored (`nohup`) stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)


def submit(pool: Executor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """`pool.submit`, from the main thread; an interrupt that comes meanwhile is raised when it is done."""
    with _held():
        return pool.submit(work, *args, **kwargs)


def result(future: Future[T]) -> T:
    """`future.result()`, from the main thread; an interrupt that comes then is raised after a turn at most."""
    while True:
        with _held():
            try:
                return future.result(POLL_S)
            except StillRunning:
                if future.done():  # it is what the work itself raised, or the work is done just now
                    return future.result()


@contextmanager
def _held() -> Iterator[None]:
    _Interrupts.held = True
    try:
        yield
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
