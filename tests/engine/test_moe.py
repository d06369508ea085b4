"""Holds up that experts are chosen, pruned and summed as defined, and that damaged ones are named."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from k3.base.errors import ExitCode, ExpertError, SourceError, UnsupportedError
from k3.engine.forward.moe import ExpertSum, LatentMoe, Routing, expert_matrices, kept_experts
from k3.model.keys import ExpertKey, ExpertLayout, ExpertPart
from k3.store.lending.memory_source import MemorySource
from k3.store.source import ExpertSource
from tests.support.engines import Array, all_logits, golden, loaded, snapshot

WEIGHTS = hnp.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 7)), elements=st.floats(2**-7, 1, width=32)
)


@given(WEIGHTS, st.floats(0.01, 1))
def test_pruning_keeps_the_smallest_set_that_is_heavy_enough(weights: Array, share: float) -> None:
    for row, kept in zip(weights.astype(np.float64), kept_experts(weights, share), strict=True):
        assert kept.any()
        slack = 1e-6 * row.sum()
        assert row[kept].sum() >= share * row.sum() - slack
        assert row[kept].min() >= row[~kept].max(initial=0)
        fewer = np.sort(row)[::-1][: kept.sum() - 1].sum()
        assert fewer < share * row.sum() + slack


def test_pruning_ties_go_to_the_lowest_id() -> None:
    weights = np.full((1, 4), 0.25, np.float32)
    assert kept_experts(weights, 0.5).tolist() == [[True, True, False, False]]
    assert kept_experts(weights, 1.0).all()


def test_sums_do_not_depend_on_arrival() -> None:
    random = np.random.default_rng(3)
    experts = np.sort(np.array([random.permutation(6)[:3] for _ in range(5)]), axis=-1)
    routing = Routing(experts, random.random((5, 3), np.float32), np.ones((5, 3), np.bool_))
    wanted = routing.wanted()
    outputs = {e: random.standard_normal((5, 8), np.float32) * 10.0 ** random.integers(-3, 4) for e in wanted}
    results = set()
    for order in itertools.permutations(wanted):
        total = ExpertSum(routing, 8)
        for expert in order:
            total.add(expert, total.gather(outputs[expert].astype(np.float32), expert).copy())
        results.add(total.finish().tobytes())
    assert len(results) == 1


def test_an_expert_that_never_came_is_noticed() -> None:
    routing = Routing(np.array([[0, 1]]), np.ones((1, 2), np.float32), np.ones((1, 2), np.bool_))
    total = ExpertSum(routing, 4)
    total.add(1, np.ones((1, 4), np.float32))
    with pytest.raises(AssertionError, match="never arrived"):
        total.finish()


class _Counting:
    """Counts what is asked of a source."""

    def __init__(self, inner: ExpertSource) -> None:
        self.inner = inner
        self.requests: list[tuple[int, tuple[int, ...]]] = []

    def lease(self, layer: int, experts: list[int]) -> object:
        self.requests.append((layer, tuple(experts)))
        return self.inner.lease(layer, experts)

    def stats(self) -> object:
        return self.inner.stats()


def counted(keep_share: float, chunk: int) -> list[tuple[int, tuple[int, ...]]]:
    counters: list[_Counting] = []

    def count(experts: ExpertSource) -> ExpertSource:
        counters.append(_Counting(experts))
        return counters[0]  # type: ignore[return-value]

    ids = golden("tiny_s1")["input_ids"]
    with loaded(snapshot("tiny_s1"), keep_share=keep_share, wrap=count) as model:
        all_logits(model, ids, chunk)
    return counters[0].requests


def test_each_expert_is_leased_once_per_chunk() -> None:
    requests = counted(1.0, 24)
    assert [layer for layer, _ in requests] == [1, 2, 3, 4]
    assert all(list(experts) == sorted(set(experts)) for _, experts in requests)


def test_pruned_experts_are_not_read() -> None:
    everything = [len(experts) for _, experts in counted(1.0, 1)]
    pruned = [len(experts) for _, experts in counted(0.3, 1)]
    assert set(everything) == {4}
    assert set(pruned) <= {1, 2}


def memory_source(change: Callable[[ExpertKey, Array], None]) -> Callable[[ExpertSource], ExpertSource]:
    """Replace the source by one in RAM whose payloads were changed."""

    def replaced(experts: ExpertSource) -> ExpertSource:
        payloads = {}
        for layer in (1, 2, 3, 4):
            for lease in experts.lease(layer, range(16)):
                with lease:
                    key = ExpertKey(layer, lease.expert)
                    payloads[key] = lease.payload.copy()
                    change(key, payloads[key])
        return MemorySource(payloads, debug=True)

    return replaced


@pytest.mark.parametrize("exact", [True, False])
def test_a_reserved_scale_names_layer_and_expert(exact: bool) -> None:
    source = snapshot("tiny_s1")
    scale = source.expert_layout(2).part("w3.weight_scale").offset

    def damage(key: ExpertKey, payload: Array) -> None:
        if key.layer == 2:
            payload[scale + 5] = 255

    with (
        loaded(source, exact=exact, wrap=memory_source(damage)) as model,
        pytest.raises(ExpertError, match="255") as caught,
    ):
        all_logits(model, golden("tiny_s1")["input_ids"], 24)
    assert caught.value.layer == 2
    assert caught.value.expert is not None
    assert caught.value.exit_code == ExitCode.SOURCE  # its bytes may be those that were published


def test_an_output_that_is_not_finite_names_layer_and_expert() -> None:
    source = snapshot("tiny_s1")
    layout = source.expert_layout(3)

    def damage(key: ExpertKey, payload: Array) -> None:
        if key == ExpertKey(3, 9):
            part = layout.part("w2.weight_scale")
            payload[part.offset : part.offset + part.nbytes] = 254

    with (
        loaded(source, wrap=memory_source(damage)) as model,
        pytest.raises(ExpertError, match="finite") as caught,
    ):
        all_logits(model, golden("tiny_s1")["input_ids"], 24)
    assert (caught.value.layer, caught.value.expert) == (3, 9)


def test_released_payloads_are_not_read_again() -> None:
    """The debug source poisons what was given back; the bits stay those of the file source."""
    ids = golden("tiny_s1")["input_ids"]
    with loaded(snapshot("tiny_s1")) as model:
        wanted = all_logits(model, ids, 5)
    with loaded(snapshot("tiny_s1"), wrap=memory_source(lambda key, payload: None)) as model:
        assert all_logits(model, ids, 5).tobytes() == wanted.tobytes()


def test_a_router_that_is_not_finite_is_an_error() -> None:
    with loaded(snapshot("tiny_s1")) as model:
        mlp = model.layers[2].mlp
        assert isinstance(mlp, LatentMoe)
        mlp.router._bias()[4] = np.nan
        with pytest.raises(SourceError, match="expert 4") as caught:
            all_logits(model, golden("tiny_s1")["input_ids"], 24)
    assert caught.value.layer == 2


def test_another_packing_is_refused() -> None:
    source = snapshot("tiny_s1")
    with loaded(source) as model:
        config = model.config
    part = ExpertPart("w1.weight", "F8_E4M3", (96, 64), 0, 96 * 64)
    with pytest.raises(UnsupportedError, match=r"w1\.weight"):
        expert_matrices(ExpertLayout("x.experts", (part,)), config, 1)
