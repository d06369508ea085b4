"""Holds up: a lease is given back once, whoever does it, and what is ready is handed out in its order."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from k3.store._store import Lease, ReadyLeases
from tests.support.source_suite import run_threads

PAYLOAD = np.frombuffer(b"expert", np.uint8)


class Stream(ReadyLeases):
    """Hands out what `later` returns when nothing is ready."""

    def __init__(self, ready: deque[Lease], later: Callable[[], Lease]) -> None:
        super().__init__(ready)
        self.later = later

    def _await_next(self) -> Lease:
        return self.later()


def raises(error: BaseException) -> Callable[[], Lease]:
    def step() -> Lease:
        raise error

    return step


def leases(count: int) -> list[Lease]:
    return [Lease(1, expert, PAYLOAD) for expert in range(count)]


def test_a_lease_is_given_back_once_by_many_threads() -> None:
    calls: list[int] = []
    for number in range(200):
        lease = Lease(3, number, PAYLOAD, lambda number=number: calls.append(number))  # type: ignore[misc]
        run_threads(*[lease.release] * 4)
    assert calls == list(range(200))


def test_a_with_block_gives_back_and_lets_errors_through() -> None:
    calls: list[int] = []
    lease = Lease(3, 7, PAYLOAD, lambda: calls.append(7))

    def work() -> None:
        with lease as entered:
            assert entered is lease
            assert (lease.layer, lease.expert) == (3, 7)
            assert lease.payload is PAYLOAD
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert calls == [7]
    with pytest.raises(ValueError, match="lease of layer 3, expert 7 was released"):
        _ = lease.payload


def test_an_error_of_giving_back_is_raised_once() -> None:
    lease = Lease(3, 7, PAYLOAD, lambda: 1 // 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        lease.release()
    lease.release()


def test_a_withdrawn_lease_tells_nobody() -> None:
    calls: list[int] = []
    lease = Lease(3, 7, PAYLOAD, lambda: calls.append(7))
    assert lease.withdraw() == ()
    lease.release()
    assert calls == []
    with pytest.raises(ValueError, match="was released"):
        _ = lease.payload


def test_a_lease_in_a_circle_is_collected() -> None:
    class Owner:
        def take_back(self) -> None: ...

    owner = Owner()
    owner.lease = Lease(3, 7, PAYLOAD, owner.take_back)  # type: ignore[attr-defined]
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def test_a_stream_in_a_circle_is_collected() -> None:
    stream = Stream(deque(leases(2)), raises(StopIteration()))
    stream.later = stream._await_next
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None


def test_the_ready_come_first_and_in_order() -> None:
    first, more = leases(3), leases(1)
    ready = deque(first[:2])
    stream = Stream(ready, raises(StopIteration()))
    assert next(stream) is first[0]
    ready.append(first[2])
    assert list(stream) == first[1:]
    stream.later = more.pop
    assert next(stream).expert == 0
    assert iter(stream) is stream


def test_an_error_of_waiting_is_raised() -> None:
    with pytest.raises(OSError, match="lost"):
        next(Stream(deque(), raises(OSError("lost"))))
    assert next(Stream(deque(), raises(StopIteration())), None) is None
