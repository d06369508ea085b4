"""Definition of the operations on rows and single numbers, polynomials included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3.kernels.arrays import Floats
from k3.kernels.reference.lanes import lane_sum

_F = np.float32
_LOG2E = _F(1.44269502)
_LN2_HIGH, _LN2_LOW = _F(0.693359375), _F(-0.000212194442)
_EXP = [_F(c) for c in (0.00138144672, 0.00836878084, 0.0416683927, 0.166665196, 0.49999994)]
_TANH = [_F(c) for c in (-0.00571704237, 0.0206505843, -0.0537434965, 0.133314908, -0.333332837)]


def exp(x: Floats) -> Floats:
    """Return e to the power x.

    It is 2^n times a polynomial for e to the power r, where n = round(x / ln 2) and |r| <= ln(2) / 2.
    """
    x = np.asarray(x, _F)
    with np.errstate(over="ignore", under="ignore"):
        inside = np.minimum(np.maximum(np.where(np.isnan(x), _F(0), x), _F(-105)), _F(90))
        n = np.round(inside * _LOG2E)
        r = (inside - n * _LN2_HIGH) - n * _LN2_LOW
        y = (_polynomial(_EXP, r) * (r * r) + r) + _F(1)
        half = n.astype(np.int32) >> 1
        scaled = (y * _two_to(half)) * _two_to(n.astype(np.int32) - half)
        return np.where(np.isnan(x), x, scaled)


def tanh(x: Floats) -> Floats:
    """Return the hyperbolic tangent.

    It is an odd polynomial of x where |x| < 0.625, else 1 - 2 / (exp(2 |x|) + 1) with the sign of x.
    """
    x = np.asarray(x, _F)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        a = np.abs(x)
        z = a * a
        small = a + a * (z * _polynomial(_TANH, z))
        large = _F(1) - _F(2) / (exp(a + a) + _F(1))
        signed: npt.NDArray[np.float32] = np.copysign(np.where(a < _F(0.625), small, large), x)
        return signed


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    return _F(1) / (_F(1) + exp(-np.asarray(x, _F)))


def silu(x: Floats) -> Floats:
    """Return x / (1 + exp(-x))."""
    with np.errstate(invalid="ignore", under="ignore"):
        return np.asarray(x, _F) / (_F(1) + exp(-np.asarray(x, _F)))


def situ(gate: Floats, up: Floats, beta: float = 4.0, linear_beta: float = 25.0) -> Floats:
    """Return ((beta * tanh(gate / beta)) * sigmoid(gate)) * (linear_beta * tanh(up / linear_beta))."""
    b, c = _F(beta), _F(linear_beta)
    with np.errstate(over="ignore", under="ignore"):
        return ((b * tanh(gate / b)) * sigmoid(gate)) * (c * tanh(up / c))


def rms_norm(x: Floats, w: Floats, eps: float) -> Floats:
    """Return w * (x * f) with f = 1 / sqrt(mean + eps)."""
    y: Floats = w * (x * _inverse_rms(x, eps))
    return y


def l2_normalize(x: Floats, eps: float = 1e-6) -> Floats:
    """Return x * f with f = 1 / sqrt(sum + eps)."""
    factor: Floats = _F(1) / np.sqrt(lane_sum(x * x) + _F(eps))
    return x * factor[..., None]


def softmax(x: Floats) -> Floats:
    """Return exp(x - max) divided by the lane sum of these."""
    with np.errstate(invalid="ignore"):
        e = exp(x - np.max(x, axis=-1, keepdims=True))
    return e / lane_sum(e)[..., None]


def kda_gate(f: Floats, a_log: Floats, dt_bias: Floats, lower_bound: float = -5.0) -> Floats:
    """Return lower_bound * sigmoid(exp(a_log) * (f + dt_bias)) for f [S, H, d]."""
    bias = dt_bias.reshape(f.shape[1:])
    return _F(lower_bound) * sigmoid(exp(a_log)[None, :, None] * (f + bias[None]))


def gated(x: Floats, gate: Floats) -> Floats:
    """Return x * sigmoid(gate)."""
    with np.errstate(invalid="ignore", under="ignore"):
        return x * sigmoid(gate)


def top_k(choice: Floats, k: int) -> npt.NDArray[np.int64]:
    """Return the first k columns of a stable descending sort, in ascending order."""
    return np.sort(np.argsort(-choice, axis=-1, kind="stable")[:, :k], axis=-1)


def residual_mix(entries: Sequence[Floats], weight: Floats, eps: float = 1e-5) -> Floats:
    """Mix entries by the softmax of their scores; maximum, sum and mix are taken in the order of the entries."""
    scores = [lane_sum((v * _inverse_rms(v, eps)) * weight) for v in entries]
    top = np.max(np.stack(scores), axis=0)
    shares = [exp(score - top) for score in scores]
    total = np.zeros_like(top)
    for share in shares:
        total = total + share
    mixed: Floats = (shares[0] / total)[:, None] * entries[0]
    for share, entry in zip(shares[1:], entries[1:], strict=True):
        mixed = mixed + (share / total)[:, None] * entry
    return mixed


def _inverse_rms(x: Floats, eps: float) -> Floats:
    mean = lane_sum(x * x) / _F(x.shape[-1])
    factor: Floats = _F(1) / np.sqrt(mean + _F(eps))
    return factor[..., None]


def _polynomial(coefficients: Sequence[np.float32], x: Floats) -> Floats:
    total: Floats = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _two_to(n: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> Floats:
    return np.ldexp(_F(1), n).astype(_F)
