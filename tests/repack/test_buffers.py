"""Holds up that buffers go round: as many as there may be, each with one holder at a time."""

from __future__ import annotations

import queue
import threading

import pytest

from k3.base import page_buffers
from k3.base.direct_io import Bytes
from k3.repack import buffers
from tests.support.waiting import let_others_run, wait_until, wait_until_standing


def test_threads_that_take_at_once_get_buffers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six take, four buffers may be made: the last two wait for one that comes back."""
    make = page_buffers.huge_buffer

    def slowly(nbytes: int) -> Bytes:
        let_others_run()  # time for every other thread to look
        return make(nbytes)

    monkeypatch.setattr(buffers, "huge_buffer", slowly)
    pool, ready = buffers.BufferPool(4, 4096), threading.Barrier(6)
    taken: queue.Queue[Bytes] = queue.Queue()

    def take() -> None:
        ready.wait()
        taken.put(pool.take())

    threads = [threading.Thread(target=take, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    held = [taken.get(timeout=20) for _ in range(4)]
    assert len({buffer.ctypes.data for buffer in held}) == len(pool.made) == 4
    wait_until(lambda: sum(thread.is_alive() for thread in threads) == 2)
    wait_until_standing(*(thread for thread in threads if thread.is_alive()))
    assert taken.empty()
    for buffer in held[:2]:
        pool.give(buffer)
    later = [taken.get(timeout=20) for _ in range(2)]
    assert {buffer.ctypes.data for buffer in later} == {buffer.ctypes.data for buffer in held[:2]}
    assert len(pool.made) == 4
