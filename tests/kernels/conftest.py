"""Runs a kernel in every way it can run: instruction sets, thread counts, rows together and one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest

from k3 import kernels
from tests.support.arrays import Arrays, Everyway, SameBits


def _arrays(result: object) -> Arrays:
    parts = result if isinstance(result, tuple) else (result,)
    return tuple(np.asarray(part) for part in parts)


def _bits(array: npt.NDArray[np.generic]) -> bytes:
    """Bytes of an array; every NaN counts as the same one, since IEEE leaves its payload and sign open."""
    if array.dtype == np.float32:
        array = np.where(np.isnan(array), np.float32(np.nan), array)
    return array.tobytes()


@pytest.fixture(scope="session")
def everyway() -> Iterator[Everyway]:
    """Return a function that makes a call with every variant, on 1 and 3 threads, and returns the one result."""
    first_variant, first_threads = kernels.cpu_variant(), kernels.get_threads()

    def run(call: Callable[[], object]) -> Arrays:
        kept: Arrays | None = None
        for variant in kernels.cpu_variants():
            for threads in (1, 3):
                kernels.set_variant(variant)
                kernels.set_threads(threads)
                result = _arrays(call())
                if kept is None:
                    kept = result
                for have, want in zip(result, kept, strict=True):
                    assert have.shape == want.shape
                    assert _bits(have) == _bits(want), f"{variant} on {threads} threads gives other bits"
        assert kept is not None
        return kept

    yield run
    kernels.set_variant(first_variant)
    kernels.set_threads(first_threads)


@pytest.fixture(scope="session")
def same_bits() -> SameBits:
    """Return a function that asserts equal shape, dtype and bits (any NaN equals any NaN)."""

    def check(have: object, want: object) -> None:
        a, b = np.asarray(have), np.asarray(want)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if _bits(a) != _bits(b):
            np.testing.assert_array_equal(a, b)  # shows where, when the values differ
            raise AssertionError("equal values with different bits (the sign of a zero)")

    return check
