"""Holds up: exp, tanh, sigmoid and what is made of them keep their stated error bounds, at the limits too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import hypothesis.extra.numpy as hnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import reference
from tests.support.arrays import Array, Everyway, SameBits

Doubles: TypeAlias = npt.NDArray[np.float64]

NAMES = ("exp", "tanh", "sigmoid", "silu")
BOUNDS_ULP = {"exp": 1.5, "tanh": 2.0, "sigmoid": 3.0, "silu": 3.0}
EXACT: dict[str, Callable[[Doubles], Doubles]] = {
    "exp": np.exp,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}
SMALLEST_NORMAL = 2.0**-126


def inputs() -> Array:
    """Return a million points: dense where the functions bend, sparse everywhere, both sides of each branch."""
    rng = np.random.default_rng(0)
    edge = np.float32(0.625)
    return np.concatenate(
        [
            rng.uniform(-87, 88.7, 400_000),
            rng.uniform(-2, 2, 400_000),
            10.0 ** rng.uniform(-37, 1.9, 100_000),
            -(10.0 ** rng.uniform(-37, 1.9, 100_000)),
            np.nextafter(edge, np.array([0, 1], np.float32)),
            [edge, -edge, 0.0, -0.0],
        ]
    ).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_error_bound(name: str) -> None:
    x = inputs()
    exact = EXACT[name](x.astype(np.float64))
    counts = np.abs(exact) >= SMALLEST_NORMAL
    have = getattr(kernels, name)(x)
    unit = np.spacing(np.abs(exact[counts]).astype(np.float32)).astype(np.float64)
    assert (np.abs(have[counts].astype(np.float64) - exact[counts]) / unit).max() <= BOUNDS_ULP[name]
    assert np.abs(have[~counts]).max(initial=0) <= SMALLEST_NORMAL


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(x=hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32)))
def test_equal_to_the_definition_however_it_runs(
    everyway: Everyway, same_bits: SameBits, name: str, x: Array
) -> None:
    (y,) = everyway(lambda: getattr(kernels, name)(x))
    same_bits(y, getattr(reference, name)(x))


@settings(deadline=None)
@given(
    pair=hnp.arrays(np.float32, st.tuples(st.just(2), st.integers(0, 70)), elements=st.floats(width=32)),
    betas=st.tuples(st.floats(0.5, 30, width=32), st.floats(0.5, 30, width=32)),
)
def test_situ_equals_its_definition(
    everyway: Everyway, same_bits: SameBits, pair: Array, betas: tuple[float, float]
) -> None:
    (y,) = everyway(lambda: kernels.situ(pair[0], pair[1], *betas))
    same_bits(y, reference.situ(pair[0], pair[1], *betas))


def test_situ_against_float64() -> None:
    x = inputs()
    gate, up = x.astype(np.float64), np.roll(x, 1234).astype(np.float64)
    exact = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    have = kernels.situ(x, np.roll(x, 1234))
    assert np.abs(have).max() <= 100
    error = np.abs(have - exact)
    assert (error <= 2.0**-20 * np.abs(exact) + 1e-36).all()


def test_limits() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 88.8, -104.0, -103.5], np.float32)
    e = kernels.exp(x)
    np.testing.assert_array_equal(
        e, np.array([np.nan, np.inf, 0, 1, 1, np.inf, 0, 1.401298464324817e-45], np.float32)
    )
    t = kernels.tanh(x)
    np.testing.assert_array_equal(t, np.array([np.nan, 1, -1, 0, 0, 1, -1, -1], np.float32))
    assert np.signbit(t[4])
    np.testing.assert_array_equal(kernels.sigmoid(x)[:5], np.array([np.nan, 1, 0, 0.5, 0.5], np.float32))


def test_shapes_are_kept() -> None:
    for shape in ((), (0,), (2, 0, 3), (2, 3, 17)):
        assert kernels.exp(np.zeros(shape, np.float32)).shape == shape
        assert kernels.situ(np.zeros(shape, np.float32), np.zeros(shape, np.float32)).shape == shape
