"""Holds up: stored bytes mean exactly the numbers that docs/numerics.md says, and compared bytes are compared."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import reference
from tests.support.arrays import Array, Everyway, SameBits

MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def test_every_bfloat16_is_widened_exactly(everyway: Everyway) -> None:
    patterns = np.arange(65536, dtype=np.uint16).reshape(64, 1024)
    (wide,) = everyway(lambda: kernels.widen_bf16(patterns))
    np.testing.assert_array_equal(wide.view(np.uint32), patterns.astype(np.uint32) << 16)
    assert kernels.widen_bf16(np.zeros((2, 0, 3), np.uint16)).shape == (2, 0, 3)


def test_every_float16_is_widened_exactly(everyway: Everyway, same_bits: SameBits) -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(64, 1024)
    (wide,) = everyway(lambda: kernels.widen_f16(values))
    same_bits(wide, values.astype(np.float32))
    same_bits(reference.widen_f16(values), values.astype(np.float32))
    assert kernels.widen_f16(np.zeros((2, 0, 3), np.float16)).shape == (2, 0, 3)
    assert kernels.widen(values).shape == values.shape
    single = np.ones((2, 3), np.float32)
    assert kernels.widen(single) is single


def test_every_nibble_under_every_scale(everyway: Everyway, same_bits: SameBits) -> None:
    """16 nibbles in both halves of a byte times 255 scale bytes, against exact arithmetic."""
    low = np.arange(16, dtype=np.uint8)
    packed = np.tile(low | (15 - low) << 4, (255, 1))
    scale = np.arange(255, dtype=np.uint8)[:, None]
    (have,) = everyway(lambda: kernels.dequantize_mxfp4(packed, scale))
    for s in range(255):
        for b in range(16):
            for column, nibble in ((2 * b, b), (2 * b + 1, 15 - b)):
                exact = math.ldexp(MAGNITUDES[nibble & 7], s - 127) * (-1.0 if nibble & 8 else 1.0)
                want = exact if abs(exact) < 2.0**128 else math.copysign(math.inf, exact)
                assert have[s, column] == want
                assert np.signbit(have[s, column]) == bool(nibble & 8)
    assert have[0, 3] != 0
    same_bits(have, reference.dequantize_mxfp4(packed, scale))


def test_the_example_in_the_document() -> None:
    packed = np.zeros((1, 16), np.uint8)
    packed[0, :4] = [0x21, 0xF7, 0x9A, 0x08]
    have = kernels.dequantize_mxfp4(packed, np.array([[120]], np.uint8))[0] * 128
    assert have[:8].tolist() == [0.5, 1, 6, -6, -1, -0.5, 0, 0]
    assert np.signbit(have[6])


@settings(deadline=None)
@given(rows=st.integers(1, 4), groups=st.integers(1, 5), place=st.integers(0))
def test_scale_byte_255_is_refused_by_its_place(rows: int, groups: int, place: int) -> None:
    packed, scale = np.zeros((rows, groups * 16), np.uint8), np.full((rows, groups), 120, np.uint8)
    row, group = divmod(place % (rows * groups), groups)
    scale[row, group] = 255
    scale[-1, -1] = 255
    with pytest.raises(kernels.ReservedScaleError, match=f"row {row}, group {group}") as caught:
        kernels.dequantize_mxfp4(packed, scale)
    assert (caught.value.row, caught.value.group) == (row, group)


@settings(deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), columns=st.integers(1, 150))
def test_int8_and_int4_equal_the_definition(
    everyway: Everyway, same_bits: SameBits, data: st.DataObject, rows: int, columns: int
) -> None:
    scales = st.floats(2.0**-66, 2.0**66, width=32)
    q = data.draw(hnp.arrays(np.uint8, (rows, columns)))
    row_scales = data.draw(hnp.arrays(np.float32, rows, elements=scales))
    same_bits(
        everyway(lambda: kernels.dequantize_int8(q, row_scales))[0], reference.dequantize_int8(q, row_scales)
    )
    q = q[:, : -(-columns // 2)].copy()
    group_scales = data.draw(hnp.arrays(np.float32, (rows, -(-columns // 64)), elements=scales))
    same_bits(
        everyway(lambda: kernels.dequantize_int4(q, group_scales, columns))[0],
        reference.dequantize_int4(q, group_scales, columns),
    )


@settings(deadline=None)
@given(w=hnp.arrays(np.float32, (3, 131), elements=st.floats(-1e6, 1e6, width=32)))
def test_quantized_weights_are_half_a_step_away_at_most(w: Array) -> None:
    q, scales = kernels.quantize_int8(w)
    slack = 1 + 1e-6
    assert (np.abs(kernels.dequantize_int8(q, scales) - w) <= scales[:, None] * (0.5 * slack + 127e-6)).all()
    q, scales = kernels.quantize_int4(w)
    steps = np.repeat(scales, 64, axis=1)[:, :131]
    assert (np.abs(kernels.dequantize_int4(q, scales, 131) - w) <= steps * (0.5 * slack + 8e-6)).all()


@settings(deadline=None)
@given(size=st.integers(0, 200_000), places=st.lists(st.integers(0), max_size=3))
def test_first_difference(size: int, places: list[int]) -> None:
    a = np.arange(size, dtype=np.uint32).astype(np.uint8)
    b = a.copy()
    differing = sorted({place % size for place in places}) if size else []
    b[differing] ^= 0x80
    assert kernels.first_difference(a, b) == (differing[0] if differing else -1)
    a.flags.writeable = False
    assert kernels.first_difference(a, a) == -1


def test_first_difference_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="shape"):
        kernels.first_difference(np.zeros(3, np.uint8), np.zeros(4, np.uint8))
