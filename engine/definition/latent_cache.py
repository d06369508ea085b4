"""The types of number that MLA's latent cache can hold: float32, or bfloat16 or float16 at half the memory.

A cached number is rounded once, when its token is taken in, to the nearest number of the type (ties to even), and
widened exactly whenever it is read; docs/numerics.md says what that does to results. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.base.errors import UnsupportedError
from k3.model.architecture import LatentType

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LatentForm:
    """A type of number in the cache.

    `tensor_dtype` is its safetensors name, `dtype` that of the arrays: bfloat16 travels as uint16 bit patterns.
    """

    tensor_dtype: str
    dtype: np.dtype[Any]


FORMS: dict[LatentType, LatentForm] = {
    "f32": LatentForm("F32", np.dtype(np.float32)),
    "bf16": LatentForm("BF16", np.dtype(np.uint16)),
    "f16": LatentForm("F16", np.dtype(np.float16)),
}


def round_to_cache_type(values: Array, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return `values` rounded to `dtype`. UnsupportedError for a finite number that this type cannot hold."""
    if dtype == np.float32:
        return values
    with np.errstate(over="ignore"):
        held = values.astype(np.float16) if dtype == np.float16 else _bfloat16(values)
    magnitude = held.view(np.uint16) & 0x7FFF
    lost = (magnitude == (0x7C00 if dtype == np.float16 else 0x7F80)) & np.isfinite(values)
    if lost.any():
        name = "float16" if dtype == np.float16 else "bfloat16"
        raise UnsupportedError(
            f"the latent cache cannot hold {values[lost][0]} as {name}", advice="Use --latent-dtype f32"
        )
    return held


def _bfloat16(values: Array) -> npt.NDArray[np.uint16]:
    """Return bfloat16 bit patterns of float32 values: nearest, ties to even; NaN becomes the quiet NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
