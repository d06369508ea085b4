"""Reads one dense tensor from a shard into memory, in a given encoding.

Quantization is the one definition in `k3.kernels`. Rows are independent of each other, so a large matrix is read
and quantized some rows at a time, and gives the same bytes as in one step.

Functions open and close the file themselves and may be called from any thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.base.errors import QuantizeError, UnsupportedError
from k3.base.regular_file import RegularFile
from k3.checkpoint.shard import SourceTensor
from k3.model.encoded_tensor import NUMPY_DTYPES, stored_arrays
from k3.model.k3_tensors import REAL_DTYPES
from k3.model.keys import Encoding
from k3.model.model_source import EncodedTensor

ROWS_BYTES = 32 << 20
"""Source bytes that are read and quantized at once (at least one row)."""


def read_tensor(path: Path, tensor: SourceTensor, encoding: Encoding) -> EncodedTensor:
    """Read `tensor` from `path` as `encoding`.

    Raises UnsupportedError for an encoding other than RAW unless the tensor has two axes and is BF16, F16 or F32;
    QuantizeError naming the first weight that is not finite; ShardError and DriveError when the bytes cannot be
    read.
    """
    with RegularFile(path) as file:
        if encoding is Encoding.RAW:
            data = np.empty(tensor.shape, NUMPY_DTYPES[tensor.dtype])
            _fill(file, tensor.offset, data)
            return EncodedTensor(tensor.name, encoding, tensor.dtype, tensor.shape, data)
        return _read_encoded(file, tensor, encoding)


def _read_encoded(file: RegularFile, tensor: SourceTensor, encoding: Encoding) -> EncodedTensor:
    if len(tensor.shape) != 2 or tensor.dtype not in REAL_DTYPES:
        raise UnsupportedError(
            f"{tensor.dtype} {tensor.shape} cannot be stored as {encoding.value}",
            path=file.path,
            tensor=tensor.name,
            advice=f"Only matrices in {' or '.join(REAL_DTYPES)} can",
        )
    rows, columns = tensor.shape
    arrays = stored_arrays(encoding, tensor.dtype, tensor.shape)
    data, *more = [np.empty(shape, NUMPY_DTYPES[dtype]) for dtype, shape in arrays]
    scales = more[0] if more else None
    row_bytes = tensor.nbytes // max(rows, 1)
    step = max(1, ROWS_BYTES // max(row_bytes, 1))
    for first in range(0, rows, step):
        weights = np.empty((min(step, rows - first), columns), NUMPY_DTYPES[tensor.dtype])
        _fill(file, tensor.offset + first * row_bytes, weights)
        last = first + len(weights)
        if encoding is Encoding.F32:
            data[first:last] = kernels.widen(weights)
            continue
        assert scales is not None
        data[first:last], scales[first:last] = _quantize(weights, encoding, file.path, tensor, first)
    return EncodedTensor(tensor.name, encoding, tensor.dtype, tensor.shape, data, scales)


def _quantize(
    weights: npt.NDArray[Any], encoding: Encoding, path: Path, tensor: SourceTensor, first_row: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    try:
        if encoding is Encoding.INT8:
            return kernels.quantize_int8(weights)
        return kernels.quantize_int4(weights)
    except kernels.NonFiniteError as error:
        row = first_row + error.row
        raise QuantizeError(
            f"the weight in row {row}, column {error.column} is {error.value}",
            path=path,
            tensor=tensor.name,
            offset=tensor.offset + (row * tensor.shape[1] + error.column) * weights.itemsize,
            advice="The shard is damaged: compare it with its published SHA-256 and fetch it again",
        ) from error


def _fill(file: RegularFile, offset: int, array: npt.NDArray[Any]) -> None:
    """Fill a contiguous array from the file; an empty one needs no read."""
    if array.nbytes:
        file.read_into(offset, array.reshape(-1).view(np.uint8).data)
