"""Holds up: a row of a product is the same bits for any variant, thread count and company, and as defined."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import reference
from tests.support.arrays import Everyway, SameBits

ENCODINGS = ("bf16", "f16", "f32", "int8", "int4")
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 300), st.integers(1, 40))


def weights(encoding: str, rows: int, columns: int, rng: np.random.Generator) -> SimpleNamespace:
    """Return a matrix in an encoding with some rows of zeros; `.dense` is what it stands for."""
    w = rng.standard_normal((rows, columns), np.float32) * np.exp(rng.uniform(-20, 20, (rows, 1))).astype(
        np.float32
    )
    w[rng.random(rows) < 0.1] = 0
    if encoding == "f32":
        return SimpleNamespace(encoding="f32", shape=w.shape, data=w, scales=None, dense=w)
    if encoding == "bf16":
        data = (w.view(np.uint32) >> 16).astype(np.uint16)
        return SimpleNamespace(
            encoding="raw", shape=w.shape, data=data, scales=None, dense=reference.widen_bf16(data)
        )
    if encoding == "f16":
        data = np.clip(w, -65504, 65504).astype(np.float16)
        return SimpleNamespace(
            encoding="raw", shape=w.shape, data=data, scales=None, dense=data.astype(np.float32)
        )
    if encoding == "int8":
        q, scales = reference.quantize_int8(w)
        q[0, 0] = 0x80  # -128 is not written by us, but it is a byte
        dense = reference.dequantize_int8(q, scales)
    else:
        q, scales = reference.quantize_int4(w)
        q[0, 0] = 0x00
        dense = reference.dequantize_int4(q, scales, columns)
    return SimpleNamespace(encoding=encoding, shape=w.shape, data=q, scales=scales, dense=dense)


@settings(max_examples=250, deadline=None)
@given(encoding=st.sampled_from(ENCODINGS), size=SIZES, exact=st.booleans(), seed=st.integers(0, 2**32))
def test_equal_to_the_definition_however_it_runs(
    everyway: Everyway, same_bits: SameBits, encoding: str, size: tuple[int, int, int], exact: bool, seed: int
) -> None:
    rows, columns, out_rows = size
    rng = np.random.default_rng(seed)
    w = weights(encoding, out_rows, columns, rng)
    x = rng.standard_normal((rows, columns), np.float32)
    (together,) = everyway(lambda: kernels.matmul(x, w, exact))
    (alone,) = everyway(lambda: np.concatenate([kernels.matmul(x[s : s + 1], w, exact) for s in range(rows)]))
    same_bits(together, alone)
    if exact or encoding in ("bf16", "f16", "f32"):
        same_bits(together, reference.matmul_exact(x, w.dense))
    elif encoding == "int8":
        same_bits(together, reference.matmul_int8(x, w.data, w.scales))
    else:
        same_bits(together, reference.matmul_int4(x, w.data, w.scales))


@settings(max_examples=150, deadline=None)
@given(encoding=st.sampled_from(ENCODINGS), size=SIZES, seed=st.integers(0, 2**32))
def test_exact_is_within_the_stated_bound(encoding: str, size: tuple[int, int, int], seed: int) -> None:
    """|y - exact| <= (K / 16 + 6) 2^-24 sum |x w|, docs/numerics.md."""
    rows, columns, out_rows = size
    rng = np.random.default_rng(seed)
    w = weights(encoding, out_rows, columns, rng)
    x = rng.standard_normal((rows, columns), np.float32)
    wide_x, wide_w = x.astype(np.float64), w.dense.astype(np.float64)
    bound = (-(-columns // 16) + 6) * 2.0**-24 * (np.abs(wide_x) @ np.abs(wide_w).T)
    assert (np.abs(kernels.matmul(x, w) - wide_x @ wide_w.T) <= bound * 1.01).all()


@settings(max_examples=150, deadline=None)
@given(encoding=st.sampled_from(["int8", "int4"]), size=SIZES, seed=st.integers(0, 2**32))
def test_int8_activations_are_within_the_stated_bound(
    encoding: str, size: tuple[int, int, int], seed: int
) -> None:
    """Half an activation step per column, and float32 rounding."""
    rows, columns, out_rows = size
    rng = np.random.default_rng(seed)
    w = weights(encoding, out_rows, columns, rng)
    x = rng.standard_normal((rows, columns), np.float32)
    _, steps = reference.quantize_activations(x, 64)
    steps = np.repeat(steps, 64, axis=1)[:, :columns].astype(np.float64)
    wide_x, wide_w = x.astype(np.float64), np.abs(w.dense).astype(np.float64)
    rounding = (steps.shape[1] / 64 + 8) * 2.0**-23
    bound = (0.5001 * steps) @ wide_w.T + rounding * ((np.abs(wide_x) + steps) @ wide_w.T)
    have = kernels.matmul(x, w, exact=False)
    assert (np.abs(have - wide_x @ w.dense.astype(np.float64).T) <= bound).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_at_a_size_with_whole_blocks_and_many_rows(everyway: Everyway, same_bits: SameBits, encoding: str) -> None:
    rng = np.random.default_rng(7)
    w = weights(encoding, 70, 1024, rng)
    x = rng.standard_normal((37, 1024), np.float32)
    for exact in (True, False):
        (y,) = everyway(partial(kernels.matmul, x, w, exact))
        same_bits(y[11:12], kernels.matmul(x[11:12], w, exact))
    same_bits(kernels.matmul(x, w), reference.matmul_exact(x, w.dense))


@settings(max_examples=60, deadline=None)
@given(
    encoding=st.sampled_from(["int8", "int4"]),
    out_rows=st.sampled_from([1, 15, 16, 17, 31, 32, 33, 47, 65]),
    columns=st.sampled_from([1, 15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257, 1023]),
    rows=st.sampled_from([1, 2, 8, 39, 40, 63, 64, 65, 130]),
    extreme=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_integer_products_at_the_edges_of_tiles(
    everyway: Everyway,
    same_bits: SameBits,
    encoding: str,
    out_rows: int,
    columns: int,
    rows: int,
    extreme: bool,
    seed: int,
) -> None:
    """Tiles of 16 rows, groups of 64 columns, blocks of 64 rows of x; weights and activations at their limits."""
    rng = np.random.default_rng(seed)
    w = weights(encoding, out_rows, columns, rng)
    x = rng.standard_normal((rows, columns), np.float32)
    if extreme:
        w.data[:] = rng.choice(np.array([0x80, 0x7F, 0x81, 0x00, 0xFF, 0xF0, 0x0F], np.uint8), w.data.shape)
        x = np.sign(x) * np.float32(3)
    (y,) = everyway(lambda: kernels.matmul(x, w, exact=False))
    define = reference.matmul_int8 if encoding == "int8" else reference.matmul_int4
    same_bits(y, define(x, w.data, w.scales))


@pytest.mark.parametrize("encoding", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("byte", [0x00, 0x0F, 0xF0, 0xFF, 0x80, 0x7F])
def test_integer_sums_at_their_limits(
    everyway: Everyway, same_bits: SameBits, encoding: str, rows: int, byte: int
) -> None:
    """Every product of a group is the largest there is, of one sign: no sum in between may run over."""
    w = weights(encoding, 32, 512, np.random.default_rng(8))
    w.data[:] = byte
    for sign in (-1, 1):
        x = np.full((rows, 512), sign, np.float32)
        (y,) = everyway(partial(kernels.matmul, x, w, exact=False))
        define = reference.matmul_int8 if encoding == "int8" else reference.matmul_int4
        same_bits(y, define(x, w.data, w.scales))


def test_the_example_of_the_order_of_a_sum(everyway: Everyway) -> None:
    x = np.array([[1e8, 1, -1e8, 1] + [0] * 13 + [2.0**-20]], np.float32)
    (y,) = everyway(lambda: kernels.matmul_encoded(x, np.ones((1, 18), np.float32), None, "f32"))
    assert y.item() == 2 + 2.0**-20


def test_an_enum_and_a_strided_activation_are_taken() -> None:
    rng = np.random.default_rng(3)
    w = weights("int8", 6, 20, rng)
    x = rng.standard_normal((3, 40), np.float32)[:, ::2]
    named = SimpleNamespace(**{**vars(w), "encoding": SimpleNamespace(value="int8")})
    np.testing.assert_array_equal(kernels.matmul(x, named), kernels.matmul(x.copy(), w))
    np.testing.assert_array_equal(kernels.matmul(x, w), kernels.matmul_encoded(x, w.data, w.scales, "int8"))


def test_activations_that_are_not_finite() -> None:
    rng = np.random.default_rng(4)
    w = weights("int8", 5, 80, rng)
    x = rng.standard_normal((3, 80), np.float32)
    x[1, 70] = np.nan
    with pytest.raises(kernels.NonFiniteError, match="row 1, column 70"):
        kernels.matmul(x, w, exact=False)
    y = kernels.matmul(x, w)
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[[0, 2]]).all()


def test_no_rows_give_no_rows() -> None:
    w = weights("int4", 5, 80, np.random.default_rng(5))
    assert kernels.matmul(np.zeros((0, 80), np.float32), w).shape == (0, 5)
    assert kernels.matmul(np.zeros((0, 80), np.float32), w, exact=False).shape == (0, 5)


def test_arrays_that_do_not_fit_are_refused() -> None:
    w = weights("int8", 5, 80, np.random.default_rng(6))
    x = np.zeros((1, 80), np.float32)
    refused: tuple[Callable[[], object], ...] = (
        lambda: kernels.matmul(x[:, :79], w),
        lambda: kernels.matmul_encoded(x, w.data, w.scales[:4], "int8"),
        lambda: kernels.matmul_encoded(x, w.data, None, "int8"),
        lambda: kernels.matmul_encoded(x, w.data, w.scales, "int5"),
        lambda: kernels.matmul_encoded(x, w.data[:, ::2], w.scales, "int8"),
        lambda: kernels.matmul_encoded(x[0], w.data, w.scales, "int8"),
        lambda: kernels.matmul_encoded(x, w.data[0], w.scales, "int8"),
    )
    for bad in refused:
        with pytest.raises(ValueError, match=r"shape|scales|encoding|row-major|axes|matrix"):
            bad()
    mistyped: tuple[Callable[[], object], ...] = (
        lambda: kernels.matmul(x.astype(np.float64), w),
        lambda: kernels.matmul_encoded(x, w.data.view(np.int8), w.scales, "int8"),
        lambda: kernels.matmul_encoded(x, w.data, w.scales.astype(np.float64), "int8"),
    )
    for wrong in mistyped:
        with pytest.raises(TypeError):
            wrong()
