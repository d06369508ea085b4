"""Holds up: quantizers give exactly the bytes that docs/numerics.md defines, or refuse the value by its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import reference
from tests.support.arrays import Array, Everyway, SameBits

Quantize = Callable[[Array], tuple[Array, Array]]

BF16_MAX = 0x7F7F
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 150))

# What is likely to go wrong: zeros of both signs, subnormals, the largest, powers of two; and anything finite.
PATTERNS = st.one_of(
    st.sampled_from([0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, BF16_MAX, 0x8000 | BF16_MAX, 0x3F80]),
    st.integers(0x3F00, 0x4000),
    st.integers(0, 0xFFFF).filter(lambda p: p & 0x7F80 != 0x7F80),
)


def bf16_matrices() -> st.SearchStrategy[Array]:
    return SHAPES.flatmap(lambda shape: hnp.arrays(np.uint16, shape, elements=PATTERNS, fill=st.just(0)))


def f16_matrices() -> st.SearchStrategy[Array]:
    """All finite float16, subnormal and largest ones often."""
    edges = st.sampled_from([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00])
    patterns = st.one_of(edges, st.integers(0, 0xFFFF).filter(lambda p: p & 0x7C00 != 0x7C00))
    halves = SHAPES.flatmap(lambda shape: hnp.arrays(np.uint16, shape, elements=patterns, fill=st.just(0)))
    return halves.map(lambda w: w.view(np.float16))


def float_matrices() -> st.SearchStrategy[Array]:
    values = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return SHAPES.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=values))


def tie_matrices() -> st.SearchStrategy[Array]:
    """Rows whose scale is a power of two and whose values are odd multiples of half of it: every one a tie."""
    odd = st.integers(-120, 119).map(lambda n: n + 0.5)

    def build(shape: tuple[int, int]) -> st.SearchStrategy[Array]:
        return st.tuples(hnp.arrays(np.float32, shape, elements=odd), st.integers(-60, 60)).map(
            lambda pair: np.ldexp(_with_limits(pair[0]), pair[1]).astype(np.float32)
        )

    return SHAPES.flatmap(build)


def _with_limits(w: Array) -> Array:
    w = w.copy()
    w[:, 0] = 127.0  # int8: scale is the power of two itself
    return w


@settings(max_examples=150, deadline=None)
@given(w=st.one_of(bf16_matrices(), f16_matrices(), float_matrices(), tie_matrices()))
@example(w=np.zeros((2, 1), np.uint16))
@example(w=np.full((1, 65), BF16_MAX, np.uint16))
@example(w=np.full((3, 63), 0x8000, np.uint16))
@example(w=np.full((1, 129), 1, np.uint16))
def test_int8_and_int4_equal_the_definition(everyway: Everyway, same_bits: SameBits, w: Array) -> None:
    q, scales = everyway(lambda: kernels.quantize_int8(w))
    for have, want in zip((q, scales), reference.quantize_int8(w), strict=True):
        same_bits(have, want)
    q, scales = everyway(lambda: kernels.quantize_int4(w))
    for have, want in zip((q, scales), reference.quantize_int4(w), strict=True):
        same_bits(have, want)


def test_every_bfloat16_under_every_scale(everyway: Everyway, same_bits: SameBits) -> None:
    """All 128 significands as the largest of a row (group), met by everything from it down to a 512th of it."""
    rest = 63 * 19  # 1197 patterns, in groups of 63 behind the group's largest
    w = np.empty((128, 19, 64), np.uint16)
    for row, top in enumerate(range(0x3F80, 0x4000)):
        w[row, :, 0] = top
        w[row, :, 1:] = np.arange(top - rest + 1, top + 1).reshape(19, 63)
    w[:, :, 2::2] |= 0x8000
    rows = w.reshape(128, -1)
    for quantize, define in (
        (kernels.quantize_int8, reference.quantize_int8),
        (kernels.quantize_int4, reference.quantize_int4),
    ):
        for have, want in zip(everyway(partial(quantize, rows)), define(rows), strict=True):
            same_bits(have, want)


def test_float32_values_beside_every_tie(everyway: Everyway, same_bits: SameBits) -> None:
    """Where a reciprocal, a wider or a narrower division would round to the other side."""
    rng = np.random.default_rng(8)
    top = rng.uniform(1, 2, (100, 1)).astype(np.float32)
    ties = np.arange(-126.5, 127.0, 1.0)
    beside = (ties * (top / np.float32(127)).astype(np.float64)).astype(np.float32)
    w = np.concatenate([top, beside, np.nextafter(beside, np.float32(9)), np.nextafter(beside, np.float32(-9))], 1)
    for have, want in zip(everyway(lambda: kernels.quantize_int8(w)), reference.quantize_int8(w), strict=True):
        same_bits(have, want)
    groups = np.empty((100, 14, 64), np.float32)
    groups[:, :, 0] = top
    near = (np.arange(-6.5, 7.0, 1.0) * (top / np.float32(7)).astype(np.float64)).astype(np.float32)
    steps = np.linspace(-4e-7, 4e-7, 63, dtype=np.float32)
    groups[:, :, 1:] = near[:, :, None] * (1 + steps)
    w = groups.reshape(100, -1)
    for have, want in zip(everyway(lambda: kernels.quantize_int4(w)), reference.quantize_int4(w), strict=True):
        same_bits(have, want)


def test_halves_go_to_the_even_integer() -> None:
    row = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]], np.float32)
    q, scales = kernels.quantize_int8(row)
    assert scales.tolist() == [1.0]
    assert q.view(np.int8).tolist() == [[127, 0, 2, 2, 0, -2, -2, 4]]
    row = np.array([[7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5]], np.float32)
    q, scales = kernels.quantize_int4(row)
    assert scales.tolist() == [[1.0]]
    assert q.tolist() == [[0x8F, 0xAA, 0x68, 0xC6]]


def test_the_example_in_the_document() -> None:
    row = np.array([[0.5, -1.27, 0.035, 0.0, 1.0]], np.float32)
    q8, s8 = kernels.quantize_int8(row)
    assert (s8.view(np.uint32).tolist(), q8.tobytes().hex()) == ([0x3C23D70A], "3281040064")
    q4, s4 = kernels.quantize_int4(row)
    assert (s4.view(np.uint32).tolist(), q4.tobytes().hex()) == ([[0x3E39C869]], "1b888e")


def test_bf16_and_its_widened_form_agree() -> None:
    w = np.random.default_rng(1).integers(0, 0x7F80, (7, 200)).astype(np.uint16)
    for quantize in (kernels.quantize_int8, kernels.quantize_int4):
        for a, b in zip(quantize(w), quantize(kernels.widen_bf16(w)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_float16_and_its_widened_form_agree(everyway: Everyway, same_bits: SameBits) -> None:
    every = np.arange(1 << 16).astype(np.uint16).view(np.float16)
    w = np.where(np.isfinite(every), every, np.float16(1)).reshape(256, 256)
    for quantize in (kernels.quantize_int8, kernels.quantize_int4):
        narrow = everyway(partial(quantize, w))
        for a, b in zip(narrow, quantize(w.astype(np.float32)), strict=True):
            same_bits(a, b)


def test_a_row_of_zeros_has_the_smallest_scale() -> None:
    q, scales = kernels.quantize_int8(np.zeros((1, 3), np.float32))
    assert not q.any()
    assert scales[0] == np.float32(1e-20)
    q, scales = kernels.quantize_int4(np.zeros((1, 3), np.float32))
    assert q.tolist() == [[0x88, 0x88]]
    assert scales[0, 0] == np.float32(1e-20)


@settings(deadline=None)
@given(
    shape=SHAPES,
    bad=st.sampled_from([np.inf, -np.inf, np.nan]),
    kind=st.sampled_from(["bfloat16", "float16", "float32"]),
    where=st.tuples(st.integers(0), st.integers(0)),
)
def test_the_first_value_that_is_not_finite_is_named(
    everyway: Everyway, shape: tuple[int, int], bad: float, kind: str, where: tuple[int, int]
) -> None:
    row, column = where[0] % shape[0], where[1] % shape[1]
    w = np.ones(shape, np.float32)
    w[row, column] = bad
    w[-1, -1] = np.nan if (row, column) != (shape[0] - 1, shape[1] - 1) else bad
    stored = (w.view(np.uint32) >> 16).astype(np.uint16) if kind == "bfloat16" else w.astype(kind)
    for quantize in (kernels.quantize_int8, kernels.quantize_int4):

        def place(quantize: Quantize = quantize) -> Array:
            with pytest.raises(kernels.NonFiniteError) as caught:
                quantize(stored)
            np.testing.assert_equal(caught.value.value, float(w[row, column]))
            return np.array([caught.value.row, caught.value.column])

        assert everyway(place)[0].tolist() == [row, column]


def test_into_writes_where_it_is_told_and_nowhere_else() -> None:
    w = np.random.default_rng(2).standard_normal((5, 77), np.float32)
    for rows in (slice(0, 2), slice(2, 5)):
        for quantize, into in (
            (kernels.quantize_int8, kernels.quantize_int8_into),
            (kernels.quantize_int4, kernels.quantize_int4_into),
        ):
            want_q, want_scales = quantize(w)
            q, scales = np.full_like(want_q, 0x55), np.full_like(want_scales, 3)
            into(w[rows], q[rows], scales[rows])
            np.testing.assert_array_equal(q[rows], want_q[rows])
            np.testing.assert_array_equal(scales[rows], want_scales[rows])
            untouched = np.ones(5, bool)
            untouched[rows] = False
            assert (q[untouched] == 0x55).all()
            assert (scales[untouched] == 3).all()


def test_matrices_without_rows_or_columns() -> None:
    assert kernels.quantize_int8(np.zeros((0, 5), np.uint16))[0].shape == (0, 5)
    q, scales = kernels.quantize_int4(np.zeros((2, 0), np.float32))
    assert (q.shape, scales.shape) == ((2, 0), (2, 0))
