"""One suite of tests for the contract of every expert source. Subclass it and give the `opened` fixture.

The contract is that of `k3.store.source`; nothing here depends on the kind of source.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest

from k3.base.errors import ExpertError
from k3.model.keys import ExpertKey
from k3.store.source import POISON, ExpertSource

THREADS = 4


class Open(Protocol):
    """Open one more source of the same kind over the same experts."""

    def __call__(self, *, debug: bool = False) -> ExpertSource: ...


@dataclass
class Opened:
    """A source, the right bytes of its experts, and a function that opens another one."""

    source: ExpertSource
    payloads: Mapping[ExpertKey, bytes]
    again: Open

    @property
    def layers(self) -> list[int]:
        return sorted({key.layer for key in self.payloads})

    def experts(self, layer: int) -> list[int]:
        return sorted(key.expert for key in self.payloads if key.layer == layer)

    def take_all(self, layer: int) -> dict[int, bytes]:
        """Lease every expert of a layer, and return copies of their bytes by number."""
        found: dict[int, bytes] = {}
        for lease in self.source.lease(layer, self.experts(layer)):
            with lease:
                assert lease.layer == layer
                assert lease.expert not in found, "arrived twice"
                found[lease.expert] = lease.payload.tobytes()
        return found

    def right(self, layer: int) -> dict[int, bytes]:
        return {expert: self.payloads[ExpertKey(layer, expert)] for expert in self.experts(layer)}


class SourceSuite:
    """The tests. A subclass has a fixture `opened` that gives an `Opened` and closes it afterwards."""

    def test_every_id_arrives_once_with_its_bytes(self, opened: Opened) -> None:
        for layer in opened.layers * 2:
            assert opened.take_all(layer) == opened.right(layer)

    def test_a_subset_in_any_order(self, opened: Opened) -> None:
        layer = opened.layers[-1]
        asked: Any = np.array(opened.experts(layer)[::-2], dtype=np.int64)  # ids as an engine has them
        got = {lease.expert: lease.payload.tobytes() for lease in opened.source.lease(layer, asked)}
        assert got == {int(e): opened.payloads[ExpertKey(layer, int(e))] for e in asked}

    def test_nothing_asked_nothing_given(self, opened: Opened) -> None:
        assert list(opened.source.lease(opened.layers[0], [])) == []

    def test_duplicates_are_refused_before_anything_is_read(self, opened: Opened) -> None:
        before = opened.source.stats()
        with pytest.raises(ValueError, match=r"more than once: \[1\]"):
            opened.source.lease(opened.layers[0], [1, 0, 1])
        assert opened.source.stats().reads == before.reads

    @pytest.mark.parametrize("expert", [-1, 100_000])
    def test_an_unknown_expert_is_an_error(self, opened: Opened, expert: int) -> None:
        layer = opened.layers[0]
        with pytest.raises(ExpertError) as raised:
            opened.source.lease(layer, [0, expert])
        assert (raised.value.layer, raised.value.expert) == (layer, expert)

    def test_an_unknown_layer_is_an_error(self, opened: Opened) -> None:
        with pytest.raises(ExpertError, match="Layers with experts: ") as raised:
            opened.source.lease(1000, [0])
        assert raised.value.layer == 1000

    def test_payloads_are_flat_and_cannot_be_written(self, opened: Opened) -> None:
        for lease in opened.source.lease(opened.layers[0], [0, 1]):
            with lease:
                payload = lease.payload
                assert payload.dtype == np.uint8
                assert payload.ndim == 1
                assert payload.flags.c_contiguous
                with pytest.raises(ValueError, match="read-only"):
                    payload[0] = 1
                with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                    payload.flags.writeable = True

    def test_a_released_lease_gives_no_payload(self, opened: Opened) -> None:
        (lease,) = opened.source.lease(opened.layers[0], [0])
        lease.release()
        lease.release()  # twice is harmless
        with pytest.raises(ValueError, match="was released"):
            _ = lease.payload

    def test_a_debug_source_poisons_what_was_released(self, opened: Opened) -> None:
        source = opened.again(debug=True)
        try:
            (one,), (two,) = source.lease(opened.layers[0], [0]), source.lease(opened.layers[0], [0])
            kept = one.payload
            one.release()
            assert (kept == POISON).all()
            assert two.payload.tobytes() == opened.payloads[ExpertKey(opened.layers[0], 0)]
            two.release()
            (again,) = source.lease(opened.layers[0], [0])
            assert again.payload.tobytes() == opened.payloads[ExpertKey(opened.layers[0], 0)]
            again.release()
        finally:
            source.close()

    def test_leases_of_several_requests_are_held_together(self, opened: Opened) -> None:
        first = list(opened.source.lease(opened.layers[0], opened.experts(opened.layers[0])))
        second = list(opened.source.lease(opened.layers[-1], opened.experts(opened.layers[-1])))
        for lease in first + second:
            assert lease.payload.tobytes() == opened.payloads[ExpertKey(lease.layer, lease.expert)]
            lease.release()

    def test_four_threads_at_once(self, opened: Opened) -> None:
        def work(seed: int) -> None:
            order = np.random.default_rng(seed)
            for _ in range(10):
                layer = int(order.choice(opened.layers))
                asked: Any = order.permutation(opened.experts(layer))[: int(order.integers(1, 6))]
                for lease in opened.source.lease(layer, asked):
                    with lease:
                        right = opened.payloads[ExpertKey(lease.layer, lease.expert)]
                        assert lease.payload.tobytes() == right

        run_threads(*[lambda seed=seed: work(seed) for seed in range(THREADS)])

    def test_a_stream_can_be_given_up(self, opened: Opened) -> None:
        layer = opened.layers[0]
        for _ in range(20):  # more than would fit if anything were lost
            stream = opened.source.lease(layer, opened.experts(layer))
            next(stream).release()
            stream.close()
            stream.close()
            assert list(stream) == []
        assert opened.take_all(layer) == opened.right(layer)

    def test_a_stream_can_be_forgotten(self, opened: Opened) -> None:
        layer = opened.layers[0]
        for _ in range(20):
            stream = opened.source.lease(layer, opened.experts(layer))
            next(stream).release()
            del stream
        gc.collect()
        assert opened.take_all(layer) == opened.right(layer)

    def test_a_prefetch_changes_no_answer(self, opened: Opened) -> None:
        for layer in opened.layers * 3:
            cancel = opened.source.prefetch(layer, opened.experts(layer)[1:3])
            assert opened.take_all(layer) == opened.right(layer)
            cancel()
            cancel()
            nothing: Any = np.array([], dtype=np.int64)
            opened.source.prefetch(layer, nothing)()
        stats = opened.source.stats()
        assert stats.hits + stats.joined + stats.misses == sum(len(opened.experts(i)) for i in opened.layers) * 3

    def test_prefetches_that_nobody_uses_take_no_room(self, opened: Opened) -> None:
        first, last = opened.layers[0], opened.layers[-1]
        for layer in (first, last, first):
            opened.source.prefetch(layer, opened.experts(layer))
        held = list(opened.source.lease(first, opened.experts(first)))
        held += list(opened.source.lease(last, opened.experts(last)))
        for lease in held:
            assert lease.payload.tobytes() == opened.payloads[ExpertKey(lease.layer, lease.expert)]
            lease.release()

    def test_a_prefetch_is_refused_like_a_request(self, opened: Opened) -> None:
        layer = opened.layers[0]
        with pytest.raises(ValueError, match="more than once"):
            opened.source.prefetch(layer, [1, 1])
        for wrong_layer, expert in ((layer, 100_000), (1000, 0)):
            with pytest.raises(ExpertError):
                opened.source.prefetch(wrong_layer, [expert])
        cancel = opened.source.prefetch(layer, [0])
        opened.source.close()
        cancel()
        with pytest.raises(ValueError, match="closed"):
            opened.source.prefetch(layer, [0])

    def test_every_expert_asked_for_is_counted_once(self, opened: Opened) -> None:
        asked = 0
        for layer in opened.layers * 3:
            opened.take_all(layer)
            asked += len(opened.experts(layer))
        stats = opened.source.stats()
        assert stats.hits + stats.joined + stats.misses == asked

    def test_a_closed_source_refuses(self, opened: Opened) -> None:
        stream = opened.source.lease(opened.layers[0], [0, 1])
        next(stream).release()
        opened.source.close()
        opened.source.close()
        with pytest.raises(ValueError, match="closed"):
            next(stream)
        with pytest.raises(ValueError, match="closed"):
            opened.source.lease(opened.layers[0], [0])


def run_threads(*bodies: Callable[[], Any]) -> None:
    """Run the bodies in threads at the same time, and raise the first exception of any of them."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], Any]) -> None:
        try:
            body()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread never came back"
    if failures:
        raise failures[0]
