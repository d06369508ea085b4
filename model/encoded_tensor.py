"""Bytes of a container as arrays: how each encoding is seen through NumPy. Copies nothing; any thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3.model.keys import Encoding
from k3.model.model_source import EncodedTensor

NUMPY_DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "F8_E5M2": np.uint8, "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8, "U16": np.uint16, "I16": np.int16, "F16": np.float16, "BF16": np.uint16,
    "U32": np.uint32, "I32": np.int32, "F32": np.float32, "U64": np.uint64, "I64": np.int64, "F64": np.float64,
}  # fmt: skip
"""The NumPy dtype that carries each safetensors dtype; those NumPy lacks travel as unsigned bit patterns."""


def encoded_tensor(
    name: str,
    encoding: Encoding,
    dtype: str,
    shape: tuple[int, ...],
    weights: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.uint8] | None,
) -> EncodedTensor:
    """A dense tensor over the payload bytes that a container holds for it, without copying them."""
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
