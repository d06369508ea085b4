"""What one timeline remembers between tokens, sized up front.

A KDA layer keeps one matrix per head and the last inputs of its three convolutions: a fixed size. An MLA
layer keeps, for every token so far, the normalised latent and the shared "rope" columns, both float32;
rows for `capacity` tokens are reserved at once, so a timeline never grows and never moves. Owned by one
session and written by one thread.

A state file (docs/state_file.md) sees none of this layout: it asks `state_parts` what there is, and moves rows
with `rows` and `put_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.engine.config import ModelConfig

Array = npt.NDArray[np.float32]

LATENT_DTYPE = "F32"
"""What the latent cache holds, as safetensors calls it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a layer's state as a state file has it: rows along the first axis."""

    layer: int
    name: str  # "memory" and "windows" of KDA, "rows" of MLA
    dtype: str
    shape: tuple[int, ...]


_LINE = 16
"""Floats in a cache line."""


def _zeros(*shape: int) -> Array:
    """Zeros whose first number begins a cache line, in pages that are not touched before they are used."""
    count = math.prod(shape)
    memory = np.zeros(count + _LINE, np.float32)
    start = -memory.ctypes.data // memory.itemsize % _LINE
    return memory[start : start + count].reshape(shape)


@dataclass(slots=True)
class KdaState:
    """`memory` [heads, key, value]; `windows` [3 (q, k, v), taps - 1, width], oldest input first."""

    memory: Array
    windows: Array

    @classmethod
    def create(cls, config: ModelConfig) -> KdaState:
        kda = config.kda
        return cls(
            _zeros(kda.heads, kda.head_dim, kda.head_dim),
            _zeros(3, kda.conv_taps - 1, kda.width),
        )

    def rows(self, part: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of `memory` or `windows`."""
        return (self.memory if part == "memory" else self.windows)[start:stop]

    def put_rows(self, part: str, start: int, rows: Array) -> None:
        """Set rows from `start` on."""
        (self.memory if part == "memory" else self.windows)[start : start + len(rows)] = rows

    @staticmethod
    def nbytes(config: ModelConfig) -> int:
        kda = config.kda
        return 4 * (kda.width * kda.head_dim + 3 * (kda.conv_taps - 1) * kda.width)


@dataclass(slots=True)
class MlaState:
    """`latent` [capacity, latent], `rope` [capacity, rope]; rows before the timeline's position are filled."""

    latent: Array
    rope: Array

    @classmethod
    def create(cls, config: ModelConfig, capacity: int) -> MlaState:
        mla = config.mla
        return cls(_zeros(capacity, mla.latent), _zeros(capacity, mla.rope))

    def rows(self, part: str, start: int, stop: int) -> Array:
        """Of tokens [start, stop) the latent, then the rope columns, [tokens, latent + rope]. A copy."""
        assert part == "rows"
        return np.concatenate((self.latent[start:stop], self.rope[start:stop]), axis=1)

    def put_rows(self, part: str, start: int, rows: Array) -> None:
        """Set what `rows` gives, from token `start` on."""
        assert part == "rows"
        stop, latent = start + len(rows), self.latent.shape[1]
        self.latent[start:stop], self.rope[start:stop] = rows[:, :latent], rows[:, latent:]

    @staticmethod
    def nbytes(config: ModelConfig, capacity: int) -> int:
        return 4 * capacity * (config.mla.latent + config.mla.rope)


class State:
    """The state of all layers that are run. `position` tokens have been taken in so far."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.capacity = capacity
        self.position = 0
        self.layers: dict[int, KdaState | MlaState] = {
            layer: KdaState.create(config) if layer in config.kda_layers else MlaState.create(config, capacity)
            for layer in config.layers
        }


def state_bytes(config: ModelConfig, capacity: int) -> int:
    """Memory that `State(config, capacity)` takes."""
    return sum(
        KdaState.nbytes(config) if layer in config.kda_layers else MlaState.nbytes(config, capacity)
        for layer in config.layers
    )


def state_parts(config: ModelConfig, tokens: int) -> Iterator[Part]:
    """Every array of a state after `tokens` tokens, layers ascending."""
    kda, mla = config.kda, config.mla
    for layer in config.layers:
        if layer in config.kda_layers:
            yield Part(layer, "memory", "F32", (kda.heads, kda.head_dim, kda.head_dim))
            yield Part(layer, "windows", "F32", (3, kda.conv_taps - 1, kda.width))
        else:
            yield Part(layer, "rows", LATENT_DTYPE, (tokens, mla.latent + mla.rope))
