"""Holds up that chunks, threads, instruction sets, caches and order of arrival never change a bit of output."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from k3 import kernels
from k3.engine.forward.model import Model
from k3.engine.run.session import Session
from k3.store.source import ExpertSource
from tests.support.engines import Array, all_logits, golden, loaded, snapshot
from tests.support.faults import FaultySource

IDS = golden("tiny_s1")["input_ids"]


@pytest.fixture(autouse=True)
def _machine_restored() -> Iterator[None]:
    threads, variant = kernels.get_threads(), kernels.cpu_variant()
    yield
    kernels.set_threads(threads)
    kernels.set_variant(variant)


KINDS = [(16, True), (8, True), (8, False), (4, False)]
"""Bits of the weights, and whether activations stay float32."""


@pytest.fixture(scope="module", params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> tuple[int, bool]:
    bits, exact = request.param
    return bits, exact


@pytest.fixture(scope="module")
def model(kind: tuple[int, bool]) -> Iterator[Model]:
    with loaded(snapshot("tiny_s1", kind[0]), exact=kind[1]) as model:
        yield model


@pytest.fixture(scope="module")
def whole(model: Model) -> Array:
    """Return the logits of the prompt in one chunk."""
    return all_logits(model, IDS, len(IDS))


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_chunks(model: Model, whole: Array, chunk: int) -> None:
    assert all_logits(model, IDS, chunk).tobytes() == whole.tobytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 24])
def test_threads(model: Model, whole: Array, threads: int, chunk: int) -> None:
    kernels.set_threads(threads)
    assert all_logits(model, IDS, chunk).tobytes() == whole.tobytes()


@pytest.mark.parametrize("variant", kernels.cpu_variants())
@pytest.mark.parametrize("chunk", [1, 5, 24])
def test_instruction_sets(model: Model, whole: Array, variant: str, chunk: int) -> None:
    """With 1, 2 and 3 threads each. `whole` was computed with the best of this machine."""
    kernels.set_variant(variant)
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        assert all_logits(model, IDS, chunk).tobytes() == whole.tobytes(), threads


@pytest.mark.parametrize("cache_bytes", [0, 200_000, 1 << 24])
def test_caches(kind: tuple[int, bool], whole: Array, cache_bytes: int) -> None:
    with loaded(snapshot("tiny_s1", kind[0]), exact=kind[1], cache_bytes=cache_bytes) as model:
        for chunk in (3, 24):
            assert all_logits(model, IDS, chunk).tobytes() == whole.tobytes()


@pytest.mark.parametrize("seed", range(4))
def test_order_of_arrival(kind: tuple[int, bool], whole: Array, seed: int) -> None:
    def shuffled(experts: ExpertSource) -> ExpertSource:
        return FaultySource(experts, seed=seed, window=8)

    with loaded(snapshot("tiny_s1", kind[0]), exact=kind[1], wrap=shuffled) as model:
        assert all_logits(model, IDS, 9).tobytes() == whole.tobytes()


def test_the_last_row_alone_is_the_same_row(model: Model, whole: Array) -> None:
    assert Session(model, len(IDS), 24).prefill(IDS.tolist()).tobytes() == whole[-1].tobytes()


def test_more_tokens_do_not_touch_earlier_rows(model: Model, whole: Array) -> None:
    assert all_logits(model, IDS[:11], 11).tobytes() == whole[:11].tobytes()
