"""Holds up: the native cache policies do, step for step, what the models in words and plain code say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from k3.store import _store
from tests.support.policy_models import MODELS, Key, Policy, PolicyModel, divide, make_model

MakePolicy: TypeAlias = Callable[[str, int, dict[int, int], list[Key]], Policy]

COUNTS = st.dictionaries(st.integers(0, 6), st.integers(1, 6), min_size=1, max_size=4)


def test_both_know_the_same_policies() -> None:
    assert _store.policy_names() == tuple(MODELS)


@given(st.integers(0, 60), st.dictionaries(st.integers(0, 9), st.integers(0, 12), max_size=6))
def test_both_divide_the_room_alike(slots: int, counts: dict[int, int]) -> None:
    assert _store.divide(slots, counts) == divide(slots, counts)


@given(st.integers(0, 200), st.dictionaries(st.integers(0, 9), st.integers(0, 20), max_size=6))
def test_division_uses_every_slot_that_can_be_used(slots: int, counts: dict[int, int]) -> None:
    quotas = _store.divide(slots, counts)
    assert set(quotas) == set(counts)
    assert all(0 <= quotas[layer] <= counts[layer] for layer in counts)
    assert sum(quotas.values()) == min(slots, sum(counts.values()))
    open_layers = [quotas[layer] for layer in counts if quotas[layer] < counts[layer]]
    full_layers = [quotas[layer] for layer in counts if quotas[layer] == counts[layer]]
    if open_layers:  # even among those that could take more, and no full layer got more than its share
        assert max(open_layers) - min(open_layers) <= 1
        assert max(full_layers, default=0) <= min(open_layers) + 1


class PolicyMachine(RuleBasedStateMachine):
    """Drives a native policy and its model alike, keeping what every policy promises in plain sight."""

    native: Policy
    model: PolicyModel
    keys: list[Key]
    held: dict[Key, int]

    @initialize(name=st.sampled_from(list(MODELS)), capacity=st.integers(1, 14), counts=COUNTS, data=st.data())
    def start(self, name: str, capacity: int, counts: dict[int, int], data: st.DataObject) -> None:
        self.keys = [(layer, expert) for layer, count in sorted(counts.items()) for expert in range(count)]
        pins = (
            data.draw(st.lists(st.sampled_from(self.keys), max_size=3, unique=True)) if name == "pin-lru" else []
        )
        self.native = _store.Policy(name, capacity, counts, pins)
        self.model = make_model(name, capacity, counts, pins)
        self.pins = set(pins)
        self.inside: set[Key] = set()
        self.held = {}

    def draw(self, data: st.DataObject, keys: set[Key]) -> Key:
        return data.draw(st.sampled_from(sorted(keys)))

    def gone(self, key: Key) -> None:
        assert key in self.inside
        assert key not in self.held, "a held key was evicted"
        assert key not in self.pins, "a pinned key was evicted"
        self.inside.remove(key)

    @rule(data=st.data())
    def access(self, data: st.DataObject) -> None:
        key = self.draw(data, set(self.keys))
        found = self.native.access(*key)
        assert found == self.model.access(*key) == (key in self.inside)

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        key = self.draw(data, set(self.keys))
        if key in self.inside:
            for policy in (self.native, self.model):
                with pytest.raises(ValueError, match="in already"):
                    policy.insert(*key)
        elif self.is_stuck():
            for policy in (self.native, self.model):
                with pytest.raises(RuntimeError):
                    policy.insert(*key)
        else:
            evicted = self.native.insert(*key)
            assert evicted == self.model.insert(*key)
            assert len(evicted) <= 1
            for victim in evicted:
                self.gone(victim)
            self.inside.add(key)

    def is_stuck(self) -> bool:
        """Whether there is no room and no key may leave."""
        return len(self.inside) == self.native.capacity and not self.inside - self.pins - set(self.held)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def access_and_hold(self, data: st.DataObject) -> None:
        key = self.draw(data, self.inside)
        for policy in (self.native, self.model):
            assert policy.access(*key)
            policy.hold(*key)
        self.held[key] = self.held.get(key, 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        key = self.draw(data, set(self.held))
        self.native.unhold(*key)
        self.model.unhold(*key)
        self.held[key] -= 1
        if self.held[key] == 0:
            del self.held[key]

    @rule(data=st.data())
    def evict_one(self, data: st.DataObject) -> None:
        victim = self.native.evict_one()
        assert victim == self.model.evict_one()
        if victim is None:
            assert not self.inside - self.pins - set(self.held)
        else:
            self.gone(victim)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = self.draw(data, self.inside)
        self.native.remove(*key)
        self.model.remove(*key)
        self.inside.remove(key)
        self.held.pop(key, None)

    @rule(data=st.data())
    def refuse_what_is_not_in(self, data: st.DataObject) -> None:
        key = self.draw(data, set(self.keys))
        for policy in (self.native, self.model):
            if key not in self.held:
                with pytest.raises(ValueError, match="not"):
                    policy.unhold(*key)
            if key not in self.inside:
                for refused in (policy.hold, policy.remove):
                    with pytest.raises(ValueError, match="not in"):
                        refused(*key)

    @invariant()
    def same_books(self) -> None:
        if not hasattr(self, "native"):
            return
        for policy in (self.native, self.model):
            assert len(policy) == len(self.inside) <= policy.capacity
            for key in self.keys:
                assert policy.contains(*key) == (key in self.inside)
                assert policy.held(*key) == (key in self.held)


PolicyMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestPolicyMachine = PolicyMachine.TestCase


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from(list(MODELS)),
    st.integers(2, 12),
    st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 5), min_size=1, max_size=2)), max_size=80),
)
def test_long_runs_of_sets_agree(name: str, capacity: int, sets: list[tuple[int, set[int]]]) -> None:
    """As the daemon drives them: a set is held while it is used."""
    counts = dict.fromkeys(range(4), 6)
    both = (_store.Policy(name, capacity, counts), make_model(name, capacity, counts))
    for layer, wanted in sets:
        answers = []
        for policy in both:
            found = [expert for expert in sorted(wanted) if policy.access(layer, expert)]
            for expert in found:
                policy.hold(layer, expert)
            evicted = []
            for expert in sorted(wanted - set(found)):
                evicted += policy.insert(layer, expert)
                policy.hold(layer, expert)
            for expert in sorted(wanted):
                policy.unhold(layer, expert)
            answers.append((found, evicted))
        assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "make",
    [
        _store.Policy,
        make_model,
    ],
)
def test_no_room(make: MakePolicy) -> None:
    """Told apart from a key that is in already."""
    policy = make("lru", 1, {1: 4}, [])
    policy.insert(1, 0)
    policy.hold(1, 0)
    with pytest.raises(RuntimeError, match="room"):
        policy.insert(1, 1)
    assert policy.contains(1, 0)


@pytest.mark.parametrize("make", [_store.Policy, make_model])
def test_refusals(make: MakePolicy) -> None:
    with pytest.raises(ValueError, match="room"):
        make("lru", 0, {1: 4}, [])
    with pytest.raises(ValueError, match="no policy is called"):
        make("fifo", 3, {1: 4}, [])
    with pytest.raises(ValueError, match="pins"):
        make("lru", 3, {1: 4}, [(1, 1)])


@pytest.mark.parametrize("make", [_store.Policy, make_model])
class TestByHand:
    """Small cases whose right answer was written down before either side ran."""

    def test_lru_sends_away_the_least_recently_used(self, make: MakePolicy) -> None:
        policy = make("lru", 2, {0: 9}, [])
        policy.insert(0, 1)
        policy.insert(0, 2)
        policy.access(0, 1)
        assert policy.insert(0, 3) == [(0, 2)]

    def test_the_end_of_a_hold_is_a_use(self, make: MakePolicy) -> None:
        policy = make("lru", 2, {0: 9}, [])
        policy.insert(0, 1)
        policy.hold(0, 1)
        policy.insert(0, 2)
        policy.unhold(0, 1)
        assert policy.insert(0, 3) == [(0, 2)]

    def test_layer_lru_makes_a_full_layer_pay_for_itself(self, make: MakePolicy) -> None:
        policy = make("layer-lru", 4, {0: 9, 1: 9}, [])
        for key in ((0, 0), (0, 1), (1, 0), (1, 1)):
            policy.insert(*key)
        assert policy.insert(1, 2) == [(1, 0)]
        assert policy.insert(0, 2) == [(0, 0)]

    def test_layer_lru_takes_back_what_a_layer_borrowed(self, make: MakePolicy) -> None:
        policy = make("layer-lru", 4, {0: 9, 1: 9}, [])
        for expert in range(4):
            policy.insert(0, expert)
        assert policy.insert(1, 0) == [(0, 0)]
        assert policy.insert(1, 1) == [(0, 1)]
        assert policy.insert(1, 2) == [(1, 0)]

    def test_least_stale_sends_away_what_its_layer_passed_over(self, make: MakePolicy) -> None:
        """In the second pass, at layer 1: layer 0 has passed over 0 once, nothing else was passed over."""
        policy = make("least-stale", 4, {0: 9, 1: 9, 2: 9}, [])
        for key in ((0, 0), (0, 1), (1, 0), (2, 0)):
            policy.access(*key)
            policy.insert(*key)
        policy.access(0, 1)
        policy.access(1, 0)
        assert policy.insert(1, 1) == [(0, 0)]
        assert policy.insert(1, 2) == [(1, 0)]  # all equally fresh: layer 1 comes round last, its oldest goes
        assert policy.evict_one() == (1, 1)
        assert policy.evict_one() == (1, 2)
        assert policy.evict_one() == (0, 1)  # then the layer below, and only then layer 2, which is wanted next

    def test_s3_fifo_lets_only_what_was_used_again_into_main(self, make: MakePolicy) -> None:
        policy = make("s3-fifo", 10, {0: 99}, [])
        for expert in range(10):
            policy.insert(0, expert)
        policy.access(0, 0)
        policy.access(0, 0)
        assert policy.insert(0, 10) == [(0, 1)]  # 0 was used twice and is in main now
        assert policy.insert(0, 1) == [(0, 2)]  # 1 is remembered and goes to main at once
        assert [policy.evict_one() for _ in range(9)] == [
            *((0, expert) for expert in range(3, 10)), (0, 10), (0, 0)
        ]  # fmt: skip

    def test_s3_fifo_remembers_as_many_as_main_holds(self, make: MakePolicy) -> None:
        policy = make("s3-fifo", 10, {0: 99}, [])
        for expert in range(20):
            policy.insert(0, expert)  # 0 to 9 have left again; 1 to 9 are remembered
        policy.insert(0, 0)
        policy.insert(0, 2)
        gone = [policy.evict_one() for _ in range(10)]
        assert gone == [*((0, expert) for expert in range(12, 20)), (0, 0), (0, 2)]  # 2 alone was in main

    def test_pins_stay(self, make: MakePolicy) -> None:
        policy = make("pin-lru", 2, {0: 9}, [(0, 1)])
        policy.insert(0, 1)
        policy.insert(0, 2)
        assert policy.insert(0, 3) == [(0, 2)]
        assert policy.evict_one() == (0, 3)
        assert policy.evict_one() is None
