"""The numbers in a synthetic snapshot: made at the speed of memory, each tensor from (seed, name) alone.

Random numbers are drawn once into pools of half a million values. A stretch of a tensor is a stretch of a pool,
with some bits flipped by a stretch of random bits; the two places are a hash of seed, name and stretch. So no
two tensors hold the same bytes, a tensor does not depend on what else is in the model, and a gigabyte costs a
few memory copies. Pools depend on nothing but their distribution and are shared by all models.

`TensorValues` owns one buffer and serves one thread; the pools are read-only.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.verify.synthetic.tensors import Fill, TensorSpec

POOL = 1 << 19
STRETCH = 1 << 18
"""Elements of a pool from which a stretch may start, and most elements of one stretch."""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Magnitudes that the low three bits of an MXFP4 nibble stand for."""

NIBBLE_SIGMA = 2.5
"""Standard deviation of the bell curve that expert weights are rounded from, in units of their scale."""


@dataclass(frozen=True)
class _Pool:
    """Values, and which of their bits may be flipped without changing the distribution."""

    values: npt.NDArray[Any]
    flips: npt.NDArray[Any]


class TensorValues:
    """The bytes of tensors, stretch by stretch."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._buffer = np.empty(STRETCH * 4, dtype=np.uint8)

    def stretches(self, tensor: TensorSpec) -> Iterator[npt.NDArray[Any]]:
        """Return the tensor's elements front to back as flat arrays (BF16 as uint16). Valid until the next one."""
        count = math.prod(tensor.shape)
        if tensor.fill.kind in ("conv", "a_log"):
            yield self._shaped(tensor, count)
            return
        pool = _pool(tensor.dtype, tensor.fill)
        for number, start in enumerate(range(0, count, STRETCH)):
            yield self._stretch(pool, f"{tensor.name} {number}", min(STRETCH, count - start))

    def _stretch(self, pool: _Pool, place: str, count: int) -> npt.NDArray[Any]:
        digest = hashlib.blake2b(f"{self._seed} {place}".encode(), digest_size=16).digest()
        at = int.from_bytes(digest[:8], "little") % POOL
        flips_at = int.from_bytes(digest[8:], "little") % POOL
        out = self._buffer.view(pool.values.dtype)[:count]
        np.bitwise_xor(pool.values[at : at + count], pool.flips[flips_at : flips_at + count], out=out)
        return out

    def _shaped(self, tensor: TensorSpec, count: int) -> npt.NDArray[np.float32]:
        """Small F32 tensors whose elements are not all alike."""
        fill = tensor.fill
        pool = _pool("F32", Fill("normal", fill.spread))
        if count > STRETCH:
            raise ValueError(f"{tensor.name} has {count} elements, more than the {STRETCH} of one stretch")
        values = self._stretch(pool, tensor.name, count).view(np.float32).copy()
        if fill.kind == "conv":
            values.reshape(tensor.shape)[..., -1] += np.float32(0.8)  # the newest input weighs most
        else:
            values[int(fill.centre) :] = 0.0  # one number per head, then padding
        return values


@functools.cache
def _raw_bits(purpose: int) -> npt.NDArray[np.uint64]:
    """Random 64-bit words; PCG64's raw stream is one that NumPy promises to keep."""
    return np.random.PCG64(purpose).random_raw(POOL + STRETCH)


@functools.cache
def _standard_normal() -> npt.NDArray[np.float64]:
    """Independent draws of a bell curve (Box and Muller)."""
    unit = 2.0**-53
    radius = np.sqrt(-2.0 * np.log(((_raw_bits(1) >> np.uint64(11)) + 0.5) * unit))
    draws: npt.NDArray[np.float64] = radius * np.cos(2.0 * math.pi * unit * (_raw_bits(2) >> np.uint64(11)))
    return draws


@functools.cache
def _pool(dtype: str, fill: Fill) -> _Pool:
    if fill.kind == "normal":
        values = (_standard_normal() * fill.spread + fill.centre).astype(np.float32)
        if dtype == "F32":
            return _Pool(values.view(np.uint32), _flips(np.uint32, 0x8000_0000 if fill.centre == 0 else 0xFF))
        return _Pool(_bf16_bits(values), _flips(np.uint16, 0x8000 if fill.centre == 0 else 0x1))
    if fill.kind == "nibbles":
        return _Pool(_packed_nibbles(), _flips(np.uint8, 0x88))
    if fill.kind == "scales":
        return _Pool(_scale_bytes(fill.spread), _flips(np.uint8, 0x1))
    raise ValueError(f"no such fill: {fill.kind}")


def _flips(dtype: type[np.unsignedinteger[Any]], mask: int) -> npt.NDArray[Any]:
    return np.bitwise_and(_raw_bits(3).astype(dtype), dtype(mask))


def _bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bfloat16 bit patterns of finite values, rounded half to even."""
    bits = values.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def _packed_nibbles() -> npt.NDArray[np.uint8]:
    """Two E2M1 codes a byte, their signs positive: signs are what flips."""
    between = (E2M1[:-1] + E2M1[1:]) / 2
    codes = np.searchsorted(between, np.abs(_standard_normal()) * NIBBLE_SIGMA).astype(np.uint8)
    return codes | (np.roll(codes, POOL // 3) << np.uint8(4))


def _scale_bytes(target: float) -> npt.NDArray[np.uint8]:
    """Even exponent bytes (flips make odd ones) that bring weights to a deviation of about `target`."""
    steps, weights = np.array([-6, -4, -2, 0]), np.array([0.02, 0.13, 0.45, 0.40])
    mean_square = np.sum(weights * (4.0**steps + 4.0 ** (steps + 1)) / 2) * NIBBLE_SIGMA**2
    top = 127 + 2 * round(math.log2(target / math.sqrt(mean_square)) / 2 - 0.5) + 1
    draw = np.searchsorted(np.cumsum(weights)[:-1], (_raw_bits(4) >> np.uint64(11)) * 2.0**-53)
    return (top + steps[draw]).astype(np.uint8)
