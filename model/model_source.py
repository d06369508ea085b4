"""What an engine or a verifier may ask of a model on disk, whether it is a container or a raw snapshot.

`ModelSource` is the contract; `reader.Container` and `snapshot.Snapshot` fulfil it. Nothing above this room
knows an offset: it is given `Extent`s and `EncodedTensor`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from k3.model.identity import ModelIdentity
from k3.model.keys import Encoding, ExpertLayout, Extent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A dense tensor in memory, as stored.

    `shape` and `dtype` are the source's. `data` holds, by encoding:
    RAW   the source's dtype (BF16 as uint16 bit patterns, F16 as float16), shape `shape`
    F32   float32, shape `shape`
    INT8  uint8 (two's complement), [rows, columns]; `scales` float32 [rows]
    INT4  uint8, [rows, ceil(columns / 2)]; `scales` float32 [rows, ceil(columns / 64)]
    """

    name: str
    encoding: Encoding
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]
    scales: npt.NDArray[np.float32] | None = None


class ModelSource(Protocol):
    """A model on disk: configuration, dense tensors, and where each expert lies."""

    @property
    def identity(self) -> ModelIdentity:
        """A name for exactly these weights, in this form and run with this configuration and vocabulary."""

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json as parsed, untouched."""

    def text_file(self, name: str) -> Path | None:
        """Path of a small file that came with the model (tiktoken.model, generation_config.json), or None."""

    def tensor_names(self) -> Sequence[str]:
        """Dense tensors in execution order, vision and experts excluded."""

    def read_tensor(self, name: str) -> EncodedTensor:
        """One dense tensor. KeyError when there is none; K3Error when it cannot be read as it should be."""

    def expert_layers(self) -> Sequence[int]:
        """0-based layers that have routed experts, ascending."""

    def expert_count(self, layer: int) -> int:
        """Number of routed experts of a layer; ids run from 0."""

    def expert_layout(self, layer: int) -> ExpertLayout:
        """How the payload of the layer's experts is built."""

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Where an expert lies: its payload is the payloads of these extents, one after the other."""
