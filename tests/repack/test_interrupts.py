"""Holds up that an interrupt never lands inside a pool's own bookkeeping, and is never lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from k3.repack import interrupts


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.install()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class _Interrupted(Executor):
    """Is interrupted in the middle of `submit`, and goes on."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.finished = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        signal.raise_signal(self.number)
        self.finished = True
        return Future()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_waits_until_work_is_handed_over(number: signal.Signals) -> None:
    pool = _Interrupted(number)
    with pytest.raises(KeyboardInterrupt):
        interrupts.submit(pool, print)
    assert pool.finished
    with pytest.raises(KeyboardInterrupt):  # and comes at once everywhere else
        signal.raise_signal(number)


def test_ctrl_c_stays_ignored_where_it_is() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_hangup_stays_ignored_where_it_is() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts.install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
