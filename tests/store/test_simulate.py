"""Holds up: a replay counts what a cache would have read, Belady is the best there is, the command shows both."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.store.routing.belady import belady_misses, first_uses, next_use
from k3.store.routing.route_trace import Choice, RoutedPass, RouteHeader, TracedLayer, write_route_trace
from k3.store.routing.simulate import BELADY, compulsory, replay, simulate
from k3.store.routing.simulate_command import simulate_command
from k3.store.routing.trace_requests import Requests
from tests.support.policy_models import MODELS, make_model

LAYERS, EXPERTS = 2, 4
HEADER = RouteHeader("m", 3, tuple(TracedLayer(layer, EXPERTS, 100 + layer) for layer in range(LAYERS)))

Sets = list[tuple[set[int], ...]]  # per pass and layer


def routed(passes: Sets) -> list[RoutedPass]:
    """Each set as the choice of one token."""
    return [
        RoutedPass(position, 1, tuple(Choice(*map(_u16, ([len(ids)], sorted(ids)))) for ids in layers))
        for position, layers in enumerate(passes)
    ]


def _u16(numbers: list[int]) -> np.ndarray[Any, Any]:
    return np.array(numbers, np.uint16)


def requests_of(passes: Sets) -> Requests:
    return Requests.from_passes(HEADER, routed(passes))


SETS = st.lists(
    st.tuples(*[st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=3)] * LAYERS), min_size=1, max_size=6
)


def test_a_set_is_what_the_tokens_of_a_pass_share() -> None:
    choices = (Choice(_u16([2, 1]), _u16([0, 2, 2])), Choice(_u16([1, 2]), _u16([3, 1, 3])))
    requests = Requests.from_passes(HEADER, [RoutedPass(0, 2, choices), *routed([({1}, {2})])])
    sets = [ids.tolist() for ids in np.split(requests.experts, requests.starts[1:-1])]
    assert (requests.layers.tolist(), sets) == ([0, 1, 0, 1], [[0, 2], [1, 3], [1], [2]])
    assert (requests.passes, requests.tokens, len(requests)) == (2, 3, 4)
    assert requests.most_wanted(2) == [(0, 0), (0, 1)]


def test_nothing_at_all() -> None:
    requests = requests_of([])
    for policy in (*MODELS, BELADY):
        result = simulate(requests, policy, 3)
        assert (result.hits, result.misses, result.hit_rate, result.bytes_read) == (0, 0, 0.0, 0)


def best_misses(sets: list[frozenset[tuple[int, int]]], slots: int) -> int:
    """Return the fewest reads, found by trying everything: any cache content within the rules after each set."""

    @functools.cache
    def from_here(place: int, cache: frozenset[tuple[int, int]]) -> int:
        if place == len(sets):
            return 0
        wanted = sets[place]
        there = cache | wanted
        stays = wanted if len(wanted) <= slots else frozenset()  # a set that fits is there as a whole at the end
        room = min(slots, len(there)) - len(stays)
        after = (stays | set(more) for more in itertools.combinations(sorted(there - stays), room))
        return len(wanted - cache) + min(from_here(place + 1, frozenset(cache)) for cache in after)

    return from_here(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(SETS, st.integers(1, 7))
def test_belady_is_the_best_there_is(passes: Sets, slots: int) -> None:
    sets = [frozenset((layer, expert) for expert in ids) for layers in passes for layer, ids in enumerate(layers)]
    assert belady_misses(requests_of(passes), slots).sum() == best_misses(sets, slots)


@settings(max_examples=150, deadline=None)
@given(SETS, st.integers(1, 8), st.sampled_from(list(MODELS)))
def test_replays_agree_with_the_models_and_lie_between_the_bounds(passes: Sets, slots: int, name: str) -> None:
    requests = requests_of(passes)
    native = simulate(requests, name, slots)
    assert native.misses == replay(requests, make_model(name, slots, HEADER.counts)).sum()
    assert native.hits + native.misses == len(requests.experts)
    least, none = simulate(requests, BELADY, slots), compulsory(requests)
    assert none.misses <= least.misses <= native.misses
    if slots >= LAYERS * EXPERTS:
        assert native.misses == none.misses


@settings(max_examples=60, deadline=None)
@given(SETS)
def test_next_and_first_uses(passes: Sets) -> None:
    requests = requests_of(passes)
    keys, of_set = requests.keys.tolist(), np.repeat(np.arange(len(requests)), requests.sizes).tolist()
    later = [
        next((of_set[j] for j in range(i + 1, len(keys)) if keys[j] == keys[i]), len(requests))
        for i in range(len(keys))
    ]
    assert next_use(requests).tolist() == later
    assert first_uses(requests).sum() == len(set(keys))


def test_what_is_in_is_held_before_anything_goes_for_the_missing() -> None:
    """Expert 2 is the oldest; taking in 1 first would send it away just before it is served."""
    requests = requests_of([({2, 3}, {0}), ({1, 2}, {0})])
    misses = replay(requests, make_model("lru", 3, HEADER.counts))
    assert misses.tolist() == [2, 1, 1, 0]


def test_a_set_larger_than_the_cache_goes_through_it() -> None:
    requests = requests_of([({0, 1, 2}, {0}), ({0, 1, 2}, {0})])
    for name in ("lru", "s3-fifo", "least-stale", "layer-lru"):
        assert simulate(requests, name, 1).misses == 8
    assert simulate(requests, BELADY, 1).misses == 7
    assert simulate(requests, BELADY, 2).misses == 6


def test_bytes_are_those_of_each_layers_experts() -> None:
    result = simulate(requests_of([({0, 1}, {0, 1, 2}), ({0}, {3})]), "lru", 8)
    assert (result.hits, result.misses, result.bytes_read) == (1, 6, 2 * 100 + 4 * 101)
    assert result.hit_rate == 1 / 7


def test_one_token_after_the_other_over_all_layers() -> None:
    """Why a global LRU that is smaller than a token's experts is of no use, and what is."""
    shape = RouteHeader("m", 2, tuple(TracedLayer(layer, EXPERTS, 1) for layer in range(4)))
    requests = Requests.from_passes(shape, routed([({0, 1},) * 4] * 50))
    rates = {name: simulate(requests, name, 6).hit_rate for name in ("lru", "least-stale", BELADY)}
    assert rates["lru"] == 0
    assert 0.45 < rates["least-stale"] <= rates[BELADY] < 0.7


def test_refusals() -> None:
    requests = requests_of([({0}, {1})])
    with pytest.raises(ValueError, match="no policy is called"):
        simulate(requests, "fifo", 3)
    with pytest.raises(ValueError, match="leave no room"):
        simulate(requests, "pin-lru", 1, [(0, 0)])
    for policy in ("lru", BELADY):
        with pytest.raises(ValueError, match="takes pins"):
            simulate(requests, policy, 3, [(0, 0)])
        with pytest.raises(ValueError, match="room"):
            simulate(requests, policy, 0)


# The command


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    random = np.random.default_rng(0)
    passes = [tuple(set(random.integers(0, EXPERTS, 3).tolist()) for _ in range(LAYERS)) for _ in range(30)]
    write_route_trace(path, HEADER, routed(passes))
    return path


def simulate_cli(*arguments: str) -> Result:
    return CliRunner().invoke(simulate_command, list(arguments))


def test_the_table(trace: Path) -> None:
    result = simulate_cli("--trace", str(trace), "--cache-gb", "4e-7,6e-7", "--policies", "layer-lru,s3-fifo")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "30 passes, 30 tokens, 2 layers" in result.stdout
    assert lines[-3].split() == ["cache", "GB", "slots", "layer-lru", "s3-fifo", "belady"]
    requests = Requests.from_trace(trace)
    for line, size, slots in ((lines[-2], "4e-07", 3), (lines[-1], "6e-07", 5)):
        rates = [simulate(requests, name, slots).hit_rate for name in ("layer-lru", "s3-fifo", BELADY)]
        assert line.split() == [size, str(slots), *(f"{100 * rate:.1f}" for rate in rates)]


def test_the_table_as_json(trace: Path) -> None:
    arguments = ["--trace", str(trace), "--cache-gb", "4e-7", "--pins-from", str(trace), "--json"]
    head, *rows = [json.loads(line) for line in simulate_cli(*arguments).stdout.splitlines()]
    requests = Requests.from_trace(trace)
    assert (head["type"], head["wanted"], head["slot_bytes"]) == ("trace", len(requests.experts), 101)
    assert head["compulsory_misses"] == compulsory(requests).misses == 8
    assert [row["policy"] for row in rows] == [*MODELS, BELADY]
    pins = requests.most_wanted(1)
    for row in rows:
        wanted = simulate(requests, row["policy"], 3, pins if row["policy"] == "pin-lru" else ())
        assert row == {"type": "result", "cache_gb": 4e-7, **wanted.as_dict()}


def test_pin_lru_is_left_out_without_another_trace(trace: Path) -> None:
    result = simulate_cli("--trace", str(trace), "--cache-gb", "4e-7")
    assert "pin-lru" not in result.stdout
    assert "least-stale" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--cache-gb", "1,none"], "not a list of sizes"),
        (["--cache-gb", "0"], "above 0"),
        (["--cache-gb", "nan"], "above 0"),
        (["--cache-gb", "1e-9"], "no room for one expert of 101 bytes"),
        (["--policies", "lru,fifo"], "'fifo' is not a policy"),
        (["--policies", "lru,lru"], "names a policy twice"),
        (["--policies", "pin-lru"], "--pins-from"),
    ],
)
def test_wrong_usage(trace: Path, arguments: list[str], problem: str) -> None:
    result = simulate_cli("--trace", str(trace), *arguments)
    assert (result.exit_code, problem in result.stderr) == (2, True), result.stderr


def test_pins_of_another_model(trace: Path, tmp_path: Path) -> None:
    write_route_trace(tmp_path / "other", RouteHeader("n", 1, (TracedLayer(7, 4, 1),)), [])
    result = simulate_cli("--trace", str(trace), "--pins-from", str(tmp_path / "other"))
    assert (result.exit_code, "other layers or experts" in result.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--trace", "--pins-from"])
def test_a_file_that_is_no_trace_is_wrong_usage_and_no_damage(trace: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "x").write_text("x")
    traces = {"--trace": str(trace), "--pins-from": str(trace), option: str(tmp_path / "x")}
    result = simulate_cli(*(word for pair in traces.items() for word in pair), "--json")
    assert result.exit_code == 2
    told = json.loads(result.stderr)
    assert (told["error"], told["path"]) == ("NotARouteTraceError", str(tmp_path / "x"))
    assert "k3-run --route-trace" in told["advice"]


def test_a_damaged_trace_is_damage(trace: Path) -> None:
    data = trace.read_bytes()
    trace.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert simulate_cli("--trace", str(trace)).exit_code == 1
