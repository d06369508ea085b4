"""The arrays that hold a dense tensor in each encoding: their dtypes, shapes and bytes. Pure; any thread.

Only this module knows the rule (docs/container.md section 2.2): the repacker lays out a container by it, the
verifier checks by it, and a snapshot is loaded by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.kernels import INT4_GROUP
from k3.model.keys import Encoding, ExpertLayout, tensor_bytes
from k3.model.model_source import EncodedTensor

NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "F8_E5M2": np.uint8, "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8, "U16": np.uint16, "I16": np.int16, "F16": np.float16, "BF16": np.uint16,
    "U32": np.uint32, "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64,
}  # fmt: skip
"""The NumPy dtype for each safetensors dtype; a dtype that NumPy lacks becomes unsigned bit patterns."""


def stored_arrays(encoding: Encoding, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return safetensors dtype and shape of the array that holds a tensor, or of weights and then scales.

    `dtype` and `shape` are the published tensor's. Raises ValueError for INT8 or INT4 of a tensor that is not a
    matrix.
    """
    if encoding is Encoding.RAW:
        return [(dtype, shape)]
    if encoding is Encoding.F32:
        return [("F32", shape)]
    rows, columns = shape
    if encoding is Encoding.INT8:
        return [("U8", shape), ("F32", (rows,))]
    return [("U8", (rows, -(-columns // 2))), ("F32", (rows, -(-columns // INT4_GROUP)))]


def bytes_of(encoding: Encoding, dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense tensor in an encoding, with scales and without padding."""
    return sum(tensor_bytes(*array) for array in stored_arrays(encoding, dtype, shape))


def is_stored_in(sizes: Sequence[int], encoding: Encoding, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return True when arrays of `sizes` bytes (weights, then scales) hold the tensor in an encoding.

    Raises KeyError for an unknown dtype.
    """
    try:
        return [tensor_bytes(*array) for array in stored_arrays(encoding, dtype, shape)] == list(sizes)
    except ValueError:
        return False


def encoded_tensor(
    name: str,
    encoding: Encoding,
    dtype: str,
    shape: tuple[int, ...],
    weights: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8] | None,
) -> EncodedTensor:
    """Return a dense tensor over the payload bytes that a container holds for it, without copying them.

    `shape` is the published tensor's; `weights` and `scales` are the stored bytes, uint8 [n]. `scales` is None
    unless the encoding is INT8 or INT4.
    """
    rows = shape[0] if shape else 1
    numbers = None
    if encoding in (Encoding.INT8, Encoding.INT4):
        assert scales is not None
        data: npt.NDArray[Any] = weights.reshape(rows, -1)
        flat = scales.view(np.float32)
        numbers = flat if encoding is Encoding.INT8 else flat.reshape(rows, -1)
    elif encoding is Encoding.F32:
        data = weights.view(np.float32).reshape(shape)
    else:
        data = weights.view(NUMPY_DTYPES[dtype]).reshape(shape)
    return EncodedTensor(name, encoding, dtype, shape, data, numbers)


def expert_arrays(payload: npt.NDArray[np.uint8], layout: ExpertLayout) -> dict[str, npt.NDArray[Any]]:
    """Return the parts of an expert by name, as arrays over `payload` [layout.payload_bytes], which is not copied.

    Each has the shape of its part, and the dtype that `NUMPY_DTYPES` gives: uint8 for packed weights and scales.
    Arrays are read-only if the payload is. Raises ValueError when the payload has another size than the layout.
    """
    if payload.shape != (layout.payload_bytes,):
        raise ValueError(f"a payload of shape {payload.shape} is not the layout's {layout.payload_bytes} bytes")
    return {
        part.name: payload[part.offset : part.offset + part.nbytes]
        .view(NUMPY_DTYPES[part.dtype])
        .reshape(part.shape)
        for part in layout.parts
    }
