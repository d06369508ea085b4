"""Weight matrices: quantized, decoded, compared, multiplied.

Definitions are in docs/numerics.md and, as NumPy, in `reference`; these functions agree with it bit for bit,
whatever the number of threads and of rows. They are safe to call from any thread and release the GIL.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from k3.kernels import _kernels
from k3.kernels.arrays import Bytes, Floats, Weights, activations, output, stored
from k3.kernels.kernel_errors import NonFiniteError, ReservedScaleError

INT4_GROUP = 64
"""Columns that share one scale in INT4."""

MX_GROUP = 32
"""Columns that share one scale byte in MXFP4."""


class EncodedMatrix(Protocol):
    """A weight matrix in memory."""

    @property
    def encoding(self) -> Any:
        """One of "raw", "f32", "int8" and "int4", or an enum with such a value."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns of the matrix, whatever the shape of `data`."""

    @property
    def data(self) -> npt.NDArray[Any]:
        """Stored weights, a row of the matrix in each row."""

    @property
    def scales(self) -> Floats | None:
        """Scales of INT8 [rows] and INT4 [rows, groups], else None."""


def quantize_int8(w: Weights) -> tuple[Bytes, Floats]:
    """Quantize `w` [R, K]; return (q uint8 [R, K] in two's complement, scales float32 [R]).

    `w` is uint16 (bfloat16 bit patterns), float16 or float32. Raises NonFiniteError.
    """
    rows, columns = _matrix_shape(w)
    q = np.empty((rows, columns), np.uint8)
    scales = np.empty(rows, np.float32)
    quantize_int8_into(w, q, scales)
    return q, scales


def quantize_int8_into(w: Weights, q: Bytes, scales: Floats) -> None:
    """Quantize as `quantize_int8` into arrays of the caller. They are undefined after NonFiniteError."""
    stored("w", w, np.uint16, np.float16, np.float32)
    place = _kernels.quantize_int8(w, output("q", q, np.uint8), output("scales", scales, np.float32))
    if place is not None:
        raise NonFiniteError(*place)


def quantize_int4(w: Weights) -> tuple[Bytes, Floats]:
    """Quantize `w` [R, K]; return (q uint8 [R, ceil(K / 2)], scales float32 [R, ceil(K / 64)]).

    The nibbles of q are the weights plus 8, the one of the lower column in the low half of its byte. `w` is
    uint16 (bfloat16 bit patterns), float16 or float32. Raises NonFiniteError.
    """
    rows, columns = _matrix_shape(w)
    q = np.empty((rows, -(-columns // 2)), np.uint8)
    scales = np.empty((rows, -(-columns // INT4_GROUP)), np.float32)
    quantize_int4_into(w, q, scales)
    return q, scales


def quantize_int4_into(w: Weights, q: Bytes, scales: Floats) -> None:
    """Quantize as `quantize_int4` into arrays of the caller. They are undefined after NonFiniteError."""
    stored("w", w, np.uint16, np.float16, np.float32)
    place = _kernels.quantize_int4(w, output("q", q, np.uint8), output("scales", scales, np.float32))
    if place is not None:
        raise NonFiniteError(*place)


def dequantize_int8(q: Bytes, scales: Floats) -> Floats:
    """Return float32 [R, K]: q times the scale of its row, each product rounded once."""
    out = np.empty(_matrix_shape(q), np.float32)
    _kernels.decode("int8", stored("q", q, np.uint8), stored("scales", scales, np.float32), out)
    return out


def dequantize_int4(q: Bytes, scales: Floats, columns: int) -> Floats:
    """Return float32 [R, columns]: nibble - 8 times the scale of its group, each product rounded once."""
    out = np.empty((_matrix_shape(q)[0], columns), np.float32)
    _kernels.decode("int4", stored("q", q, np.uint8), stored("scales", scales, np.float32), out)
    return out


def dequantize_mxfp4(packed: Bytes, scale: Bytes) -> Floats:
    """Return float32 [R, K] from packed uint8 [R, K / 2] and scale bytes uint8 [R, K / 32].

    A scale byte s stands for 2^(s - 127), 0 included (a subnormal number); values past the largest float32 become
    infinite, as IEEE rounding defines. 255 raises ReservedScaleError.
    """
    rows, half = _matrix_shape(packed)
    out = np.empty((rows, 2 * half), np.float32)
    reserved = _kernels.decode("mxfp4", stored("packed", packed, np.uint8), stored("scale", scale, np.uint8), out)
    if reserved >= 0:
        raise ReservedScaleError("", *divmod(reserved, scale.shape[1]))
    return out


def widen_bf16(patterns: npt.NDArray[np.uint16]) -> Floats:
    """Return bfloat16 bit patterns (uint16, any shape) as float32 of the same values."""
    flat = np.ascontiguousarray(stored("patterns", patterns, np.uint16).reshape(1, -1))
    out = np.empty(flat.shape, np.float32)
    _kernels.decode("bf16", flat, None, out)
    return out.reshape(patterns.shape)


def widen_f16(values: npt.NDArray[np.float16]) -> Floats:
    """Return float16 numbers (any shape) as float32 of the same values."""
    flat = np.ascontiguousarray(stored("values", values, np.float16).reshape(1, -1))
    out = np.empty(flat.shape, np.float32)
    _kernels.decode("f16", flat, None, out)
    return out.reshape(values.shape)


def widen(w: Weights) -> Floats:
    """Return weights as float32 of the same values: `w` itself, or its bfloat16 patterns or float16 widened."""
    if w.dtype == np.float16:
        return widen_f16(w.view(np.float16))
    return widen_bf16(w.view(np.uint16)) if w.dtype == np.uint16 else stored("w", w, np.float32)


def first_difference(a: Bytes, b: Bytes) -> int:
    """Return the first index at which two equally long uint8 vectors differ, -1 if they are equal."""
    return _kernels.first_difference(stored("a", a, np.uint8), stored("b", b, np.uint8))


def matmul(x: Floats, w: EncodedMatrix, exact: bool = True) -> Floats:
    """Return x [S, K] times w [R, K] transposed, float32 [S, R].

    If `exact`, products and sums are float32 in the fixed order of docs/numerics.md, with the weights as the
    dequantizers return them. Otherwise INT8 and INT4 weights are multiplied with activations rounded to int8, with
    one scale per row and 64 columns; NonFiniteError is raised for an infinite or NaN activation. RAW and F32
    weights are always exact. Row s of the result depends on row s of x alone.
    """
    return matmul_encoded(x, w.data, w.scales, encoding_of(w), exact)


def encoding_of(w: EncodedMatrix) -> str:
    """Return the native code's name for the encoding of `w`: "bf16", "f16", "f32", "int8" or "int4"."""
    name = str(getattr(w.encoding, "value", w.encoding))
    if name != "raw":
        return name
    return {"uint16": "bf16", "float16": "f16"}.get(w.data.dtype.name, "f32")


def matmul_encoded(
    x: Floats,
    data: npt.NDArray[Any],
    scales: Floats | None,
    encoding: str,
    exact: bool = True,
) -> Floats:
    """Multiply as `matmul`, the weights given as arrays in "bf16", "f16", "f32", "int8" or "int4" `encoding`."""
    x = activations("x", x, 2)
    if data.ndim != 2:
        raise ValueError(f"weights must be a matrix, not shape {data.shape}")
    if encoding in ("int8", "int4"):
        if scales is None:
            raise ValueError(f"{encoding} weights need scales")
        stored("scales", scales, np.float32)
    out = np.empty((x.shape[0], data.shape[0]), np.float32)
    place = _kernels.matmul(x, encoding, stored("data", data, data.dtype.type), scales, out, exact)
    if place is not None:
        raise NonFiniteError(*place)
    return out


def _matrix_shape(array: npt.NDArray[Any]) -> tuple[int, int]:
    if array.ndim != 2:
        raise ValueError(f"expected a matrix, not shape {array.shape}")
    return int(array.shape[0]), int(array.shape[1])
