"""Definition of the stored encodings: the bytes of a quantized matrix, and the numbers that bytes stand for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3.kernels.arrays import Bytes, Floats, Weights
from k3.kernels.kernel_errors import NonFiniteError, ReservedScaleError

_FLOOR = np.float32(1e-20)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def widen_bf16(patterns: npt.NDArray[np.uint16]) -> Floats:
    """Return the float32 of the same value: a bfloat16 is its upper half."""
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def widen_f16(values: npt.NDArray[np.float16]) -> Floats:
    """Return the float32 of the same value: every float16 has one, the subnormal ones too."""
    return values.astype(np.float32)


def quantize_int8(w: Weights) -> tuple[Bytes, Floats]:
    """Quantize to int8 with one scale per row."""
    values = _finite(w)
    absmax = np.max(np.abs(values), axis=1, initial=np.float32(0))
    scales = np.maximum(absmax / np.float32(127), _FLOOR)
    q = np.clip(np.round(values / scales[:, None]), -127, 127)
    return q.astype(np.int8).view(np.uint8), scales


def quantize_int4(w: Weights) -> tuple[Bytes, Floats]:
    """Quantize to int4 with one scale per row and 64 columns; the last group of a row may be short."""
    values = _finite(w)
    rows, columns = values.shape
    groups = -(-columns // 64)
    padded = np.zeros((rows, groups * 64), np.float32)
    padded[:, :columns] = values
    grouped = padded.reshape(rows, groups, 64)
    scales = np.maximum(np.max(np.abs(grouped), axis=2, initial=np.float32(0)) / np.float32(7), _FLOOR)
    q = np.clip(np.round(grouped / scales[:, :, None]), -8, 7).astype(np.int8).reshape(rows, groups * 64)
    nibbles = (q + 8).astype(np.uint8)[:, : 2 * -(-columns // 2)]
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales


def dequantize_int8(q: Bytes, scales: Floats) -> Floats:
    """Return q * scale, rounded once."""
    return q.view(np.int8).astype(np.float32) * scales[:, None]


def dequantize_int4(q: Bytes, scales: Floats, columns: int) -> Floats:
    """Return (nibble - 8) * scale, rounded once."""
    return unpack_int4(q, columns).astype(np.float32) * np.repeat(scales, 64, axis=1)[:, :columns]


def dequantize_mxfp4(packed: Bytes, scale: Bytes) -> Floats:
    """Return E2M1 values times 2^(scale - 127).

    Both factors and, inside the range of float32, the product are exact.
    """
    reserved = np.argwhere(scale == 255)
    if len(reserved):
        raise ReservedScaleError("", int(reserved[0][0]), int(reserved[0][1]))
    factors = np.ldexp(np.float32(1), scale.astype(np.int32) - 127).astype(np.float32)
    with np.errstate(over="ignore"):
        nibbles = _nibbles(packed)
        values = np.copysign(_E2M1[nibbles & 7], np.where(nibbles & 8, np.float32(-1), np.float32(1)))
        weights: Floats = values * np.repeat(factors, 32, axis=1)
    return weights


def unpack_int4(q: Bytes, columns: int) -> npt.NDArray[np.int8]:
    """Return weights from -8 to 7 as int8 [R, columns]."""
    return _nibbles(q)[:, :columns].astype(np.int8) - np.int8(8)


def unpack_mxfp4(packed: Bytes) -> npt.NDArray[np.int8]:
    """Return doubled E2M1 values (integers from -12 to 12, no sign of zero) as int8 [R, K]."""
    nibbles = _nibbles(packed)
    doubled = (_E2M1[nibbles & 7] * 2).astype(np.int8)
    signed: npt.NDArray[np.int8] = np.where(nibbles & 8, -doubled, doubled)
    return signed


def _nibbles(packed: Bytes) -> Bytes:
    out = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    out[:, 0::2] = packed & 15
    out[:, 1::2] = packed >> 4
    return out


def _finite(w: Weights) -> Floats:
    if w.dtype == np.float16:
        values = widen_f16(w.view(np.float16))
    else:
        values = widen_bf16(w.view(np.uint16)) if w.dtype == np.uint16 else w.view(np.float32)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = int(bad[0][0]), int(bad[0][1])
        raise NonFiniteError(row, column, float(values[row, column]))
    return values
