"""What one timeline remembers between tokens, sized up front.

A KDA layer keeps one matrix per head and the last inputs of its three convolutions: a fixed size. An MLA
layer keeps, for every token so far, the normalised latent and the shared "rope" columns, in the type that the
run's configuration names (latent_cache.py); rows for `capacity` tokens are reserved at once, so a timeline never
grows and never moves. Owned by one session and written by one thread.

A state file (docs/state_file.md) sees none of this layout: it asks `state_parts` what there is, and moves rows
with `rows` and `put_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.engine.definition.latent_cache import FORMS, narrowed
from k3.model.architecture import ModelConfig

Array = npt.NDArray[np.float32]

Numbers = npt.NDArray[Any]  # of a latent cache, in its type

_LINE_BYTES = 64
"""A cache line. Rows of the model's arrays are whole lines, so that no register is loaded from two."""


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a layer's state as a state file has it: rows along the first axis."""

    layer: int
    name: str  # "memory" and "windows" of KDA, "rows" of MLA
    dtype: str
    shape: tuple[int, ...]


def _zeros(*shape: int, dtype: npt.DTypeLike = np.float32) -> Numbers:
    """Zeros whose first number begins a cache line, in pages that are not touched before they are used."""
    count = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(count + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + count].view(dtype).reshape(shape)


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


@dataclass(slots=True)
class MlaState:
    """`latent` [capacity, latent], `rope` [capacity, rope]; rows before the timeline's position are filled."""

    latent: Numbers
    rope: Numbers

    @classmethod
    def create(cls, config: ModelConfig, capacity: int) -> MlaState:
        mla, dtype = config.mla, FORMS[config.mla.cache].dtype
        return cls(_zeros(capacity, mla.latent, dtype=dtype), _zeros(capacity, mla.rope, dtype=dtype))

    def keep(self, position: int, latent: Array, rope: Array) -> None:
        """Set the rows of tokens from `position` on, float32 [S, latent] and [S, rope], in the cache's type.

        UnsupportedError for a number that it cannot hold.
        """
        stop = position + len(latent)
        self.latent[position:stop] = narrowed(latent, self.latent.dtype)
        self.rope[position:stop] = narrowed(rope, self.rope.dtype)

    def rows(self, part: str, start: int, stop: int) -> Numbers:
        """Of tokens [start, stop) the latent, then the rope columns, [tokens, latent + rope]. A copy."""
        assert part == "rows"
        return np.concatenate((self.latent[start:stop], self.rope[start:stop]), axis=1)

    def put_rows(self, part: str, start: int, rows: Numbers) -> None:
        """Set what `rows` gives, from token `start` on."""
        assert part == "rows"
        stop, latent = start + len(rows), self.latent.shape[1]
        self.latent[start:stop], self.rope[start:stop] = rows[:, :latent], rows[:, latent:]


class State:
    """The state of all layers that are run. `position` tokens have been taken in so far."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.capacity = capacity
        self.position = 0
        self.layers: dict[int, KdaState | MlaState] = {
            layer: KdaState.create(config) if layer in config.kda_layers else MlaState.create(config, capacity)
            for layer in config.layers
        }


def state_parts(config: ModelConfig, tokens: int) -> Iterator[Part]:
    """Every array of a state after `tokens` tokens, layers ascending."""
    kda, mla = config.kda, config.mla
    for layer in config.layers:
        if layer in config.kda_layers:
            yield Part(layer, "memory", "F32", (kda.heads, kda.head_dim, kda.head_dim))
            yield Part(layer, "windows", "F32", (3, kda.conv_taps - 1, kda.width))
        else:
            yield Part(layer, "rows", FORMS[mla.cache].tensor_dtype, (tokens, mla.latent + mla.rope))
