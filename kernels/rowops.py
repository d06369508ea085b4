"""Operations on rows (the last axis) and on single numbers, all float32 in and out.

Every row (number) is computed alone, in the order of docs/numerics.md. The functions are safe to call from any
thread, release the GIL, and return new arrays of the input's shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3.kernels import _kernels
from k3.kernels.arrays import Floats, activations, stored
from k3.kernels.kernel_errors import NonFiniteError


def rms_norm(x: Floats, w: Floats, eps: float) -> Floats:
    """Return w * (x / sqrt(mean(x^2) + eps)) over the last axis; w is float32 [D], bfloat16 weights widened."""
    rows = _rows("x", x)
    out = np.empty_like(rows)
    _kernels.rms_norm(rows, stored("w", w, np.float32), eps, out)
    return out.reshape(x.shape)


def softmax(x: Floats) -> Floats:
    """Return exp(x - max) / sum over the last axis, which may not be empty."""
    rows = _rows("x", x)
    out = np.empty_like(rows)
    _kernels.softmax(rows, out)
    return out.reshape(x.shape)


def exp(x: Floats) -> Floats:
    """Return e to the power x, at most 1.5 units in the last place off."""
    return _elementwise("exp", x)


def tanh(x: Floats) -> Floats:
    """Return the hyperbolic tangent, at most 2 units in the last place off."""
    return _elementwise("tanh", x)


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x)), at most 3 units in the last place off where the result is a normal number."""
    return _elementwise("sigmoid", x)


def silu(x: Floats) -> Floats:
    """Return x / (1 + exp(-x)), at most 3 units in the last place off where the result is a normal number."""
    return _elementwise("silu", x)


def situ(gate: Floats, up: Floats, beta: float = 4.0, linear_beta: float = 25.0) -> Floats:
    """Return SiTU-GLU, beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta)."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {gate.shape} and up {up.shape} differ in shape")
    flat = activations("gate", gate).reshape(-1)
    out = np.empty_like(flat)
    _kernels.situ(flat, activations("up", up).reshape(-1), beta, linear_beta, out)
    return out.reshape(gate.shape)


def gated(x: Floats, gate: Floats) -> Floats:
    """Return x * sigmoid(gate), number by number."""
    if gate.shape != x.shape:
        raise ValueError(f"x {x.shape} and gate {gate.shape} differ in shape")
    flat = activations("x", x).reshape(-1)
    out = np.empty_like(flat)
    _kernels.gated(flat, activations("gate", gate).reshape(-1), out)
    return out.reshape(x.shape)


def top_k(choice: Floats, k: int) -> npt.NDArray[np.int64]:
    """Return the columns of the k greatest numbers of each row of choice [S, N], ascending, as int64 [S, k].

    Of equal numbers those in the lowest columns are taken. Raises ValueError unless 1 <= k <= N, and
    NonFiniteError with row and column for a number that is infinite or NaN.
    """
    choice = activations("choice", choice, 2)
    ids = np.empty((len(choice), k), np.int64)
    place = _kernels.top_k(choice, ids)
    if place >= 0:
        row, column = divmod(place, choice.shape[1])
        raise NonFiniteError(row, column, float(choice[row, column]), what="choice", use="ranked")
    return ids


def residual_mix(entries: Sequence[Floats], weight: Floats, eps: float = 1e-5) -> Floats:
    """Return the attention-residual mix of 1 to 64 entries V_j [S, D] (the stream last), float32 [S, D].

    With s_j = sum over D of (V_j / sqrt(mean(V_j^2) + eps)) * weight, the result is sum_j softmax(s)_j V_j.
    `weight`, float32 [D], is the product of the norm's and the projection's weights.
    """
    rows = [activations("entry", entry, 2) for entry in entries]
    if not rows:
        raise ValueError("a mix needs at least one entry")
    out = np.empty_like(rows[0])
    _kernels.residual_mix(rows, activations("weight", weight, 1), eps, out)
    return out


def _rows(name: str, x: Floats) -> Floats:
    if x.ndim == 0:
        raise ValueError(f"{name} has no axes")
    return activations(name, x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _elementwise(name: str, x: Floats) -> Floats:
    flat = activations("x", x).reshape(-1)
    out = np.empty_like(flat)
    _kernels.elementwise(name, flat, out)
    return out.reshape(x.shape)
