"""The elementary functions of K3 and the meaning of its stored numbers, in NumPy.

Float32 in, float32 out unless said otherwise. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from k3.base.errors import UnsupportedError
from k3.model.keys import Encoding
from k3.model.model_source import EncodedTensor

Array = npt.NDArray[np.float32]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
"""The numbers that MXFP4 nibbles stand for: three bits of magnitude, the sign on top."""

MXFP4_GROUP = 32
INT4_GROUP = 64
"""Columns of a row that share one scale."""


def linear(x: Array, weight: Array) -> Array:
    """`weight` [R, K] applied to each row of `x` [N, K]: [N, R]. K3 has no biases."""
    out: Array = x @ weight.T
    return out


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """`x` [..., D] over its root mean square, times `weight` [D] if there is one."""
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
    normalised: Array = x / np.sqrt(mean_square + np.float32(eps))
    return normalised if weight is None else normalised * weight


def l2_norm(x: Array, eps: float) -> Array:
    """`x` [..., D] over its length; the epsilon is inside the root."""
    squares = np.sum(np.square(x), axis=-1, keepdims=True)
    unit: Array = x / np.sqrt(squares + np.float32(eps))
    return unit


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), in a form that cannot overflow."""
    half = np.float32(0.5)
    out: Array = half + half * np.tanh(half * x)
    return out


def silu(x: Array) -> Array:
    """Return x times its sigmoid."""
    return x * sigmoid(x)


def softmax(x: Array, axis: int = -1) -> Array:
    """Exponentials over their sum along `axis`. Entries of -inf become zero."""
    powers = np.exp(x - np.max(x, axis=axis, keepdims=True))
    shares: Array = powers / np.sum(powers, axis=axis, keepdims=True)
    return shares


def situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    """SiTU-GLU: a gated unit with both factors bounded, its magnitude below beta * linear_beta."""
    b, lb = np.float32(beta), np.float32(linear_beta)
    bounded_gate: Array = b * np.tanh(gate / b) * sigmoid(gate)
    bounded_up: Array = lb * np.tanh(up / lb)
    return bounded_gate * bounded_up


def causal_conv(inputs: Array, taps: Array) -> Array:
    """Depthwise convolution over time: `inputs` [n + T - 1, P] and `taps` [P, 1, T] to [n, P].

    The first T - 1 rows of `inputs` are history; the last tap multiplies the newest input.
    """
    count = taps.shape[-1]
    steps = len(inputs) - (count - 1)
    out = np.zeros((steps, inputs.shape[1]), dtype=np.float32)
    for tap in range(count):
        out += taps[:, 0, tap] * inputs[tap : tap + steps]
    return out


def widen_bf16(bits: npt.NDArray[np.uint16]) -> Array:
    """bfloat16 bit patterns as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def dequantize_mxfp4(packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> Array:
    """MXFP4 `packed` [R, K/2] (low nibble first), `scales` [R, K/32] to float32 [R, K], exactly.

    ValueError for the scale byte 255, which stands for no number.
    """
    if (scales == 255).any():
        row, group = np.argwhere(scales == 255)[0]
        raise ValueError(f"MXFP4 scale of row {row}, group {group} is 255, not a number")
    rows = len(packed)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1, MXFP4_GROUP)
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    values: Array = (E2M1[nibbles] * factors[..., None]).reshape(rows, -1)
    return values


def dequantize(tensor: EncodedTensor) -> Array:
    """Return a dense tensor's numbers as float32, in its source's shape. UnsupportedError for an odd dtype."""
    if tensor.encoding is Encoding.RAW:
        return _widen(tensor.dtype, tensor.data, tensor.name).reshape(tensor.shape)
    if tensor.encoding is Encoding.F32:
        return tensor.data.astype(np.float32, copy=False).reshape(tensor.shape)
    assert tensor.scales is not None, f"{tensor.name} is quantized but has no scales"
    rows, columns = tensor.shape
    if tensor.encoding is Encoding.INT8:
        return tensor.data.view(np.int8).astype(np.float32) * tensor.scales[:, None]
    biased = np.stack([tensor.data & 15, tensor.data >> 4], axis=-1).reshape(rows, -1)[:, :columns]
    factors = np.repeat(tensor.scales, INT4_GROUP, axis=1)[:, :columns]
    return (biased.astype(np.float32) - np.float32(8)) * factors


def _widen(dtype: str, data: npt.NDArray[Any], name: str) -> Array:
    if dtype == "BF16":
        return widen_bf16(data)
    if dtype in ("F32", "F16"):
        return data.astype(np.float32, copy=False)
    raise UnsupportedError(f"no meaning is known for a dense tensor of dtype {dtype}", tensor=name)
