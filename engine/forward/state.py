"""The state of one timeline between tokens, allocated once.

A KDA layer keeps one matrix per head and the last inputs of its three convolutions: a fixed size. An MLA layer
keeps, for every token so far, the normalised latent and the shared "rope" columns, in the type that the run's
configuration gives (latent_cache.py). Rows for `capacity` tokens are allocated at once, so that a timeline never
grows and never moves. One session owns it and one thread writes it.

A state file (docs/state_file.md) depends on none of this layout: `state_tensors` lists the arrays, and `rows` and
`put_rows` move their rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.engine.definition.latent_cache import FORMS, round_to_cache_type
from k3.model.architecture import ModelConfig

Array = npt.NDArray[np.float32]

Numbers = npt.NDArray[Any]  # of a latent cache, in its type

_LINE_BYTES = 64
"""A cache line. Rows of the model's arrays are whole lines, so that no register is loaded from two lines."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One array of a layer's state in the form of a state file: rows along the first axis."""

    layer: int
    name: str  # "memory" and "windows" of KDA, "rows" of MLA
    dtype: str
    shape: tuple[int, ...]


def _zeros(*shape: int, dtype: npt.DTypeLike = np.float32) -> Numbers:
    """Return zeros whose first number begins a cache line, in pages that are not touched before their use."""
    count = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(count + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + count].view(dtype).reshape(shape)


@dataclass(slots=True)
class KdaState:
    """State of a KDA layer.

    `memory` [heads, key, value]; `windows` [3 (q, k, v), taps - 1, width], the oldest input first.
    """

    memory: Array
    windows: Array

    @classmethod
    def create(cls, config: ModelConfig) -> KdaState:
        """Return the state before the first token."""
        kda = config.kda
        return cls(
            _zeros(kda.heads, kda.head_dim, kda.head_dim),
            _zeros(3, kda.conv_taps - 1, kda.width),
        )

    def rows(self, name: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of `memory` or `windows`."""
        return (self.memory if name == "memory" else self.windows)[start:stop]

    def put_rows(self, name: str, start: int, rows: Array) -> None:
        """Set rows from `start` on."""
        (self.memory if name == "memory" else self.windows)[start : start + len(rows)] = rows


@dataclass(slots=True)
class MlaState:
    """State of an MLA layer.

    `latent` [capacity, latent], `rope` [capacity, rope]; rows before the timeline's position are filled.
    """

    latent: Numbers
    rope: Numbers

    @classmethod
    def create(cls, config: ModelConfig, capacity: int) -> MlaState:
        """Return the state before the first token, with room for `capacity`."""
        mla, dtype = config.mla, FORMS[config.mla.cache].dtype
        return cls(_zeros(capacity, mla.latent, dtype=dtype), _zeros(capacity, mla.rope, dtype=dtype))

    def keep(self, position: int, latent: Array, rope: Array) -> None:
        """Set the rows of tokens from `position` on, float32 [S, latent] and [S, rope], in the cache's type.

        UnsupportedError for a number that the type cannot hold.
        """
        stop = position + len(latent)
        self.latent[position:stop] = round_to_cache_type(latent, self.latent.dtype)
        self.rope[position:stop] = round_to_cache_type(rope, self.rope.dtype)

    def rows(self, name: str, start: int, stop: int) -> Numbers:
        """Return latent and rope columns of tokens [start, stop) as [tokens, latent + rope], a copy."""
        assert name == "rows"
        return np.concatenate((self.latent[start:stop], self.rope[start:stop]), axis=1)

    def put_rows(self, name: str, start: int, rows: Numbers) -> None:
        """Set rows that `rows` has returned, from token `start` on."""
        assert name == "rows"
        stop, latent = start + len(rows), self.latent.shape[1]
        self.latent[start:stop], self.rope[start:stop] = rows[:, :latent], rows[:, latent:]


class State:
    """The state of all layers that are run; `position` is the number of tokens taken in."""

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.capacity = capacity
        self.position = 0
        self.layers: dict[int, KdaState | MlaState] = {
            layer: KdaState.create(config) if layer in config.kda_layers else MlaState.create(config, capacity)
            for layer in config.layers
        }


def state_tensors(config: ModelConfig, tokens: int) -> Iterator[StateTensor]:
    """Yield every array of a state after `tokens` tokens, layers ascending."""
    kda, mla = config.kda, config.mla
    for layer in config.layers:
        if layer in config.kda_layers:
            yield StateTensor(layer, "memory", "F32", (kda.heads, kda.head_dim, kda.head_dim))
            yield StateTensor(layer, "windows", "F32", (3, kda.conv_taps - 1, kda.width))
        else:
            yield StateTensor(layer, "rows", FORMS[mla.cache].tensor_dtype, (tokens, mla.latent + mla.rope))
