"""Array types of this room and the checks that all wrappers share.

Arrays go to the native code as they are: row-major, of exactly the expected type. Activations that are strided
are copied first; weights and outputs never are, since a caller should know when one would be needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.float16] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KdaVectors:
    """The small weights of a KDA layer, float32, and its constants.

    conv [3 (q, k, v), taps, H * d], the last tap meets the newest input, 1 to 16 taps; a_log [H] (slice off the
    padding of the checkpoint's tensor); dt_bias [H * d]; norm [d].
    """

    conv: Floats
    a_log: Floats
    dt_bias: Floats
    norm: Floats
    lower_bound: float
    l2_eps: float
    norm_eps: float


def activations(name: str, array: npt.NDArray[Any], ndim: int | None = None) -> Floats:
    """Return `array` as row-major float32: itself if it is that already, else a copy.

    Raises TypeError for another dtype, ValueError for a number of axes other than `ndim`.
    """
    if array.dtype != np.float32:
        raise TypeError(f"{name} must be float32, not {array.dtype}")
    if ndim is not None and array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} axes, not shape {array.shape}")
    return np.ascontiguousarray(array)


def stored(name: str, array: npt.NDArray[Any], *dtypes: type[Any]) -> npt.NDArray[Any]:
    """Return `array` itself. Raises TypeError unless it has one of `dtypes`, ValueError unless it is row-major."""
    if array.dtype not in [np.dtype(dtype) for dtype in dtypes]:
        allowed = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{name} must be {allowed}, not {array.dtype}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} must be row-major and without gaps")
    return array


def output(name: str, array: npt.NDArray[Any], dtype: type[Any]) -> npt.NDArray[Any]:
    """Return `array` itself. Raises what `stored` raises, and ValueError when it is read-only."""
    stored(name, array, dtype)
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only")
    return array
