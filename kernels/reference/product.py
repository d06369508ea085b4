"""Definition of the products: the order of additions, and the arithmetic with int8 activations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3.kernels.arrays import Bytes, Floats
from k3.kernels.kernel_errors import NonFiniteError
from k3.kernels.reference.functions import situ
from k3.kernels.reference.lanes import lane_sum
from k3.kernels.reference.quantize import dequantize_mxfp4, unpack_int4, unpack_mxfp4

Integers = npt.NDArray[np.int8]


def matmul_exact(x: Floats, w: Floats) -> Floats:
    """Return x [S, K] times w [R, K] transposed: each product rounded, then summed by `lane_sum`."""
    out = np.empty((x.shape[0], w.shape[0]), np.float32)
    for row, activations in enumerate(x):
        out[row] = lane_sum(activations[None, :] * w)
    return out


def quantize_activations(x: Floats, group: int) -> tuple[Integers, Floats]:
    """Quantize x [S, K] to int8; return (q int8 [S, G * group] with zeros past K, scales float32 [S, G])."""
    bad = np.argwhere(~np.isfinite(x))
    if len(bad):
        row, column = int(bad[0][0]), int(bad[0][1])
        raise NonFiniteError(row, column, float(x[row, column]))
    rows, columns = x.shape
    groups = -(-columns // group)
    padded = np.zeros((rows, groups, group), np.float32)
    padded.reshape(rows, -1)[:, :columns] = x
    absmax = np.max(np.abs(padded), axis=2, initial=np.float32(0))
    scales = np.maximum(absmax / np.float32(127), np.float32(1e-20))
    q = np.clip(np.round(padded / scales[:, :, None]), -127, 127).astype(np.int8)
    return q.reshape(rows, -1), scales


def matmul_int8(x: Floats, q: Bytes, scales: Floats) -> Floats:
    """Multiply int8 weights [R, K] with int8 activations by groups of 64."""
    qx, ax = quantize_activations(x, 64)
    weights = q.view(np.int8)
    return _by_groups(qx, weights, 64, np.repeat(ax[:, None, :], len(q), axis=1)) * scales


def matmul_int4(x: Floats, q: Bytes, scales: Floats) -> Floats:
    """Multiply int4 weights [R, K] with int8 activations by groups of 64."""
    qx, ax = quantize_activations(x, 64)
    return _by_groups(qx, unpack_int4(q, x.shape[1]), 64, ax[:, None, :] * scales)


def matmul_mxfp4(x: Floats, packed: Bytes, scale: Bytes) -> Floats:
    """Multiply MXFP4 weights [R, K] with int8 activations by groups of 32."""
    qx, ax = quantize_activations(x, 32)
    halves = np.ldexp(np.float32(1), scale.astype(np.int32) - 128).astype(np.float32)
    return _by_groups(qx, unpack_mxfp4(packed), 32, ax[:, None, :] * halves)


def expert_forward(
    z: Floats,
    w1: tuple[Bytes, Bytes],
    w2: tuple[Bytes, Bytes],
    w3: tuple[Bytes, Bytes],
    *,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    exact: bool = True,
) -> Floats:
    """Return W2 situ(W1 z, W3 z), each matrix given as (packed, scale)."""

    def times(x: Floats, w: tuple[Bytes, Bytes]) -> Floats:
        return matmul_exact(x, dequantize_mxfp4(*w)) if exact else matmul_mxfp4(x, *w)

    return times(situ(times(z, w1), times(z, w3), beta, linear_beta), w2)


def _by_groups(qx: Integers, qw: Integers, group: int, factors: Floats) -> Floats:
    """Return the sum over groups g, in order, of float32(integer dot of group g) * factors[s, r, g]."""
    rows, columns = qw.shape
    groups = qx.shape[1] // group
    weights = np.zeros((rows, groups * group), np.int32)
    weights[:, :columns] = qw
    out = np.zeros((qx.shape[0], rows), np.float32)
    for g in range(groups):
        part = slice(g * group, (g + 1) * group)
        dots = qx[:, part].astype(np.int32) @ weights[:, part].T
        out = out + dots.astype(np.float32) * factors[:, :, g]
    return out
