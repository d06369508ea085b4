"""Holds up that tokens are chosen as asked, the same for the same seed, and never from broken logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from k3.base.errors import SourceError
from k3.engine.definition.settings import SamplerOptions
from k3.engine.run.sampler import Sampler, kept_shares

LOGITS = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-50, 50, width=32))
Logits = npt.NDArray[np.float32]


@given(LOGITS)
def test_greedy_takes_the_lowest_of_the_largest(logits: Logits) -> None:
    token = Sampler(SamplerOptions()).choose(logits)
    assert token == min(np.flatnonzero(logits == logits.max()))


@given(LOGITS, st.floats(0.05, 4), st.floats(0.01, 1), st.integers(0, 99))
def test_draws_repeat_and_stay_in_the_set(logits: Logits, temperature: float, top_p: float, seed: int) -> None:
    options = SamplerOptions(temperature, top_p, seed)
    first, second = Sampler(options), Sampler(options)
    tokens = [first.choose(logits) for _ in range(5)]
    assert tokens == [second.choose(logits) for _ in range(5)]
    assert set(tokens) <= set(kept_shares(logits, temperature, top_p)[0].tolist())


@given(LOGITS, st.floats(0.05, 4), st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits: Logits, temperature: float, top_p: float) -> None:
    everything, all_shares = kept_shares(logits, temperature, 1.0)
    tokens, shares = kept_shares(logits, temperature, top_p)
    assert len(everything) == len(logits)
    assert tokens.tolist() == everything[: len(tokens)].tolist()
    assert len(tokens) == len(everything) or shares[-1] >= top_p
    assert len(tokens) == 1 or all_shares[len(tokens) - 2] < top_p


def test_frequencies_follow_the_probabilities() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    sampler = Sampler(SamplerOptions(temperature=1.0, seed=7))
    counts = np.bincount([sampler.choose(logits) for _ in range(4000)], minlength=3) / 4000
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.03


def test_a_high_temperature_flattens() -> None:
    logits = np.array([0, 4], np.float32)
    assert kept_shares(logits, 100.0, 1.0)[1][0] < 0.52
    assert kept_shares(logits, 0.1, 1.0)[1][0] > 0.999999


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(value: float, temperature: float) -> None:
    logits = np.array([1, 2, value, 3], np.float32)
    with pytest.raises(SourceError, match="token 2"):
        Sampler(SamplerOptions(temperature)).choose(logits)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": np.nan}, {"top_p": 0}, {"top_p": 1.5}, {"seed": -1}]
)
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="is"):
        SamplerOptions(**bad)  # type: ignore[arg-type]
