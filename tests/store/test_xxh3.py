"""Holds up: our xxh3-128 is the published one, at every length and with every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.store._store import set_xxh3_variant, xxh3_128, xxh3_128_in_steps, xxh3_variant

VARIANTS = ["portable", "avx2", "avx512"]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    before = xxh3_variant()
    if not set_xxh3_variant(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    set_xxh3_variant(before)


def test_every_length_up_to_three_blocks(variant: str) -> None:
    data = np.random.default_rng(1).bytes(3 * 1024 + 130)
    for length in range(len(data) + 1):
        assert xxh3_128(data[:length]) == xxhash.xxh3_128_digest(data[:length]), length


def test_large_and_unaligned(variant: str) -> None:
    data = memoryview(np.random.default_rng(2).bytes(5_000_000))
    for begin in (0, 1, 7, 63, 4095):
        for length in (4096, 17_547, 1 << 20, (1 << 22) + 1, len(data) - begin):
            part = data[begin : begin + length]
            assert xxh3_128(part) == xxhash.xxh3_128_digest(part), (begin, length)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes(data: bytes) -> None:
    assert xxh3_128(data) == xxhash.xxh3_128_digest(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=5000), st.lists(st.integers(0, 6000), max_size=8))
def test_bytes_that_arrive_in_steps(data: bytes, steps: list[int]) -> None:
    assert xxh3_128_in_steps(data, sorted(steps)) == xxhash.xxh3_128_digest(data)


def test_steps_at_and_around_every_border(variant: str) -> None:
    data = np.random.default_rng(3).bytes(4 * 1024 + 77)
    for length in (0, 16, 240, 241, 1024, 1025, 2048, 3 * 1024 + 1, len(data)):
        for step in (1, 63, 64, 65, 1023, 1024, 1025):
            assert xxh3_128_in_steps(data[:length], range(0, length, step)) == xxhash.xxh3_128_digest(
                data[:length]
            )


def test_an_unknown_variant_is_refused() -> None:
    assert not set_xxh3_variant("abacus")
    assert xxh3_variant() in VARIANTS


def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises((BufferError, ValueError)):
        xxh3_128(memoryview(bytes(64))[::2])
