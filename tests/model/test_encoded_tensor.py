"""Holds up that the one rule of how a dense tensor is stored agrees with the kernels that store it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3 import kernels
from k3.model import k3_tensors
from k3.model.encoded_tensor import NUMPY_DTYPES, bytes_of, encoded_tensor, is_stored_in, stored_arrays
from k3.model.keys import DTYPE_BITS, Encoding

ROWS = st.integers(1, 5)
COLUMNS = st.integers(1, 200)


def made(encoding: Encoding, rows: int, columns: int) -> list[npt.NDArray[Any]]:
    """Return a matrix of bfloat16 zeros as the kernels encode it."""
    matrix = np.zeros((rows, columns), np.uint16)
    if encoding is Encoding.RAW:
        return [matrix]
    if encoding is Encoding.F32:
        return [kernels.widen(matrix)]
    return list((kernels.quantize_int8 if encoding is Encoding.INT8 else kernels.quantize_int4)(matrix))


@pytest.mark.parametrize("encoding", Encoding)
@given(rows=ROWS, columns=COLUMNS)
def test_the_rule_is_what_the_kernels_do(encoding: Encoding, rows: int, columns: int) -> None:
    arrays = made(encoding, rows, columns)
    rule = stored_arrays(encoding, "BF16", (rows, columns))
    assert [(array.dtype, array.shape) for array in arrays] == [
        (np.dtype(NUMPY_DTYPES[name]), shape) for name, shape in rule
    ]
    assert bytes_of(encoding, "BF16", (rows, columns)) == sum(array.nbytes for array in arrays)
    flat = [array.reshape(-1).view(np.uint8) for array in arrays]
    seen = encoded_tensor("a", encoding, "BF16", (rows, columns), flat[0], flat[1] if len(flat) > 1 else None)
    assert seen.data.tobytes() == arrays[0].tobytes()
    assert (seen.scales is None) == (len(arrays) == 1)


@pytest.mark.parametrize("shape", [(), (7,), (3, 1, 4)])
def test_other_than_matrices_stay_as_they_are(shape: tuple[int, ...]) -> None:
    assert stored_arrays(Encoding.RAW, "F16", shape) == [("F16", shape)]
    for encoding in (Encoding.INT8, Encoding.INT4):
        with pytest.raises(ValueError, match="unpack"):
            stored_arrays(encoding, "BF16", shape)


def test_constants_of_the_kernels_and_of_the_table_agree() -> None:
    assert k3_tensors.MX_GROUP == kernels.MX_GROUP
    assert NUMPY_DTYPES.keys() == DTYPE_BITS.keys()
    assert all(np.dtype(NUMPY_DTYPES[name]).itemsize * 8 == bits for name, bits in DTYPE_BITS.items())


def test_the_bytes_of_each_encoding() -> None:
    assert is_stored_in([24], Encoding.RAW, "BF16", (3, 4))
    assert is_stored_in([48], Encoding.F32, "BF16", (3, 4))
    assert is_stored_in([12, 12], Encoding.INT8, "BF16", (3, 4))
    for sizes in ([], [24], [12, 13], [12, 12, 1]):
        assert not is_stored_in(sizes, Encoding.INT8, "BF16", (3, 4))
    assert not is_stored_in([12, 12], Encoding.INT8, "BF16", (12,)), "it is no matrix"
