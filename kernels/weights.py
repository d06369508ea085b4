"""Weight matrices: quantized, decoded, compared, multiplied.

Definitions are in docs/numerics.md and, as NumPy, in `reference`; these functions agree with it bit for bit,
whatever the number of threads and of rows. Safe to call from any thread; the interpreter's lock is dropped.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from k3.kernels import _kernels
from k3.kernels.arrays import Bytes, Floats, Weights, activations, output, stored
from k3.kernels.errors import NonFiniteError, ReservedScaleError

INT4_GROUP = 64
"""Columns that share one scale in INT4."""

MX_GROUP = 32
"""Columns that share one scale byte in MXFP4."""


class EncodedMatrix(Protocol):
    """A weight matrix in memory. `encoding` is "raw", "f32", "int8" or "int4", or an enum with such a value."""

    @property
    def encoding(self) -> Any: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def data(self) -> npt.NDArray[Any]: ...
    @property
    def scales(self) -> Floats | None: ...


def quantize_int8(w: Weights) -> tuple[Bytes, Floats]:
    """`w` [R, K] as (q uint8 [R, K] in two's complement, scales float32 [R]).

    `w` is uint16 (bfloat16 bit patterns), float16 or float32. Raises NonFiniteError.
    """
    rows, columns = _matrix_shape(w)
    q = np.empty((rows, columns), np.uint8)
    scales = np.empty(rows, np.float32)
    quantize_int8_into(w, q, scales)
    return q, scales


def quantize_int8_into(w: Weights, q: Bytes, scales: Floats) -> None:
    """The same into arrays of the caller. Their content is undefined after NonFiniteError."""
    stored("w", w, np.uint16, np.float16, np.float32)
    place = _kernels.quantize_int8(w, output("q", q, np.uint8), output("scales", scales, np.float32))
    if place is not None:
        raise NonFiniteError(*place)


def quantize_int4(w: Weights) -> tuple[Bytes, Floats]:
    """`w` [R, K] as (q uint8 [R, ceil(K / 2)], biased nibbles, low first; scales float32 [R, ceil(K / 64)]).

    Raises NonFiniteError.
    """
    rows, columns = _matrix_shape(w)
    q = np.empty((rows, -(-columns // 2)), np.uint8)
    scales = np.empty((rows, -(-columns // INT4_GROUP)), np.float32)
    quantize_int4_into(w, q, scales)
    return q, scales


def quantize_int4_into(w: Weights, q: Bytes, scales: Floats) -> None:
    """The same into arrays of the caller. Their content is undefined after NonFiniteError."""
    stored("w", w, np.uint16, np.float16, np.float32)
    place = _kernels.quantize_int4(w, output("q", q, np.uint8), output("scales", scales, np.float32))
    if place is not None:
        raise NonFiniteError(*place)


def dequantize_int8(q: Bytes, scales: Floats) -> Floats:
    """float32 [R, K] = q * scale of the row, each product rounded once."""
    out = np.empty(_matrix_shape(q), np.float32)
    _kernels.decode("int8", stored("q", q, np.uint8), stored("scales", scales, np.float32), out)
    return out


def dequantize_int4(q: Bytes, scales: Floats, columns: int) -> Floats:
    """float32 [R, columns] = (nibble - 8) * scale of the group, each product rounded once."""
    out = np.empty((_matrix_shape(q)[0], columns), np.float32)
    _kernels.decode("int4", stored("q", q, np.uint8), stored("scales", scales, np.float32), out)
    return out


def dequantize_mxfp4(packed: Bytes, scale: Bytes) -> Floats:
    """float32 [R, K] from packed uint8 [R, K / 2] and scale bytes uint8 [R, K / 32].

    A scale byte s stands for 2^(s - 127), 0 included (a subnormal number); values past the largest float32 become
    infinite, as IEEE rounding has it. 255 raises ReservedScaleError.
    """
    rows, half = _matrix_shape(packed)
    out = np.empty((rows, 2 * half), np.float32)
    reserved = _kernels.decode("mxfp4", stored("packed", packed, np.uint8), stored("scale", scale, np.uint8), out)
    if reserved >= 0:
        raise ReservedScaleError("", *divmod(reserved, scale.shape[1]))
    return out


def widen_bf16(patterns: npt.NDArray[np.uint16]) -> Floats:
    """bfloat16 bit patterns of any shape as float32, exactly."""
    flat = np.ascontiguousarray(stored("patterns", patterns, np.uint16).reshape(1, -1))
    out = np.empty(flat.shape, np.float32)
    _kernels.decode("bf16", flat, None, out)
    return out.reshape(patterns.shape)


def widen_f16(values: npt.NDArray[np.float16]) -> Floats:
    """float16 numbers of any shape as float32, exactly."""
    flat = np.ascontiguousarray(stored("values", values, np.float16).reshape(1, -1))
    out = np.empty(flat.shape, np.float32)
    _kernels.decode("f16", flat, None, out)
    return out.reshape(values.shape)


def widen(w: Weights) -> Floats:
    """Weights as float32, exactly: bfloat16 patterns (uint16) and float16 widened, float32 as it is."""
    if w.dtype == np.float16:
        return widen_f16(w.view(np.float16))
    return widen_bf16(w.view(np.uint16)) if w.dtype == np.uint16 else stored("w", w, np.float32)


def first_difference(a: Bytes, b: Bytes) -> int:
    """Index of the first byte in which two equally long uint8 vectors differ, -1 when they are equal."""
    return _kernels.first_difference(stored("a", a, np.uint8), stored("b", b, np.uint8))


def matmul(x: Floats, w: EncodedMatrix, exact: bool = True) -> Floats:
    """x [S, K] times w [R, K] transposed: float32 [S, R].

    exact: float32 products and sums in the fixed order of docs/numerics.md, with the weights as the dequantizers
    give them. Not exact: INT8 and INT4 weights meet activations rounded to int8 (one scale per row and 64 columns;
    raises NonFiniteError for an infinite or NaN activation); RAW and F32 weights are always exact. Row s of the
    result depends on row s of x alone.
    """
    return matmul_encoded(x, w.data, w.scales, encoding_of(w), exact)


def encoding_of(w: EncodedMatrix) -> str:
    """What the native code calls the encoding of `w`: "bf16", "f16", "f32", "int8" or "int4"."""
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
    """`matmul` with the weights given as arrays; `encoding` is "bf16", "f16", "f32", "int8" or "int4"."""
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
