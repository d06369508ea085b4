"""Holds up: the cache policy keeps each layer's newest experts within its quota, and loses nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from k3.model.keys import ExpertKey
from k3.store.local.eviction import LayeredLru, divide

COUNTS = st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=6)


@given(st.integers(0, 200), COUNTS)
def test_division_uses_every_slot_that_can_be_used(slots: int, counts: dict[int, int]) -> None:
    quotas = divide(slots, counts)
    assert set(quotas) == set(counts)
    assert all(0 <= quotas[layer] <= counts[layer] for layer in counts)
    assert sum(quotas.values()) == min(slots, sum(counts.values()))
    open_layers = [quotas[layer] for layer in counts if quotas[layer] < counts[layer]]
    full_layers = [quotas[layer] for layer in counts if quotas[layer] == counts[layer]]
    if open_layers:  # even among those that could take more, and no full layer got more than its share
        assert max(open_layers) - min(open_layers) <= 1
        assert max(full_layers, default=0) <= min(open_layers) + 1


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "take", "drop"]), st.integers(0, 2), st.integers(0, 5)), max_size=60
)


@given(STEPS, st.fixed_dictionaries({0: st.integers(0, 3), 1: st.integers(0, 3), 2: st.integers(0, 3)}))
def test_against_a_list(steps: list[tuple[str, int, int]], quotas: dict[int, int]) -> None:
    """The model: one list of keys, oldest first."""
    cache, model = LayeredLru(quotas), list[ExpertKey]()
    for action, layer, expert in steps:
        key = ExpertKey(layer, expert)
        if action == "take":
            assert cache.take(key) == (key in model)
            model = [other for other in model if other != key]
        elif action == "drop":
            assert cache.drop_oldest() == (model.pop(0) if model else None)
        elif key not in model:
            model.append(key)
            of_layer = [other for other in model if other.layer == layer]
            victim = of_layer[0] if len(of_layer) > quotas[layer] else None
            assert cache.put(key) == victim
            if victim is not None:
                model.remove(victim)
        assert len(cache) == len(model)
        assert all(other in cache for other in model)
