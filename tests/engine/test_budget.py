"""Holds up: a run that does not fit in memory is refused before it begins, with numbers."""

from __future__ import annotations

import pytest

from k3.base.errors import UnsupportedError
from k3.base.memory_limit import Limit
from k3.engine.definition.settings import ModelSettings
from k3.engine.launch.memory_need import Need, check_fits
from k3.engine.launch.memory_plan import plan_memory
from k3.engine.launch.model_files import open_model_files
from tests.support.engines import VECTORS, snapshot

GB = 10**9


def test_loading_and_running_do_not_add_up() -> None:
    need = Need(10, 5, 1, 2, 3, 4)
    assert need.total_bytes == 10 + 1 + max(5, 2 + 3 + 4)


def test_a_refusal_names_every_term() -> None:
    need = Need(10 * GB, 2 * GB, GB // 2, GB // 4, GB, 3 * GB)
    check_fits(need, Limit(15 * GB, "the machine"))
    with pytest.raises(UnsupportedError) as caught:
        check_fits(need, Limit(12 * GB, "the machine"))
    for number in ("14.750 GB", "12.000 GB", "10.000 GB", "0.500 GB", "0.250 GB", "3.000 GB", "--expert-gb"):
        assert number in str(caught.value)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_dense_bytes_are_those_in_memory(bits: int) -> None:
    source = snapshot("tiny_s1", bits)
    for name in source.tensor_names():
        tensor = source.read_tensor(name)
        held = tensor.data.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)
        assert source.dense(name).resident_bytes == held


def cache_bytes(free_bytes: float, expert_bytes: int | None) -> int:
    settings = ModelSettings(snapshot=(VECTORS / "tiny_s1",), expert_bytes=expert_bytes)
    found = open_model_files(settings)
    plan = plan_memory(
        found, settings, Limit(free_bytes, "a test"),
        capacity=64, chunk=8, every_logit=False,
    )  # fmt: skip
    plan.check()
    return plan.cache_bytes


def test_a_cache_of_given_size_is_taken_or_refused() -> None:
    assert cache_bytes(1e9, 123456) == 123456
    assert cache_bytes(1e9, 0) == 0
    with pytest.raises(UnsupportedError, match=r"a test leaves 1\.000 GB"):
        cache_bytes(1e9, GB)


def test_a_cache_of_no_given_size_takes_what_is_left() -> None:
    everything = cache_bytes(1e12, None)
    some = cache_bytes(2.4e6, None)
    assert 0 < some < everything < 10_000_000
    with pytest.raises(UnsupportedError):
        cache_bytes(1e6, None)
