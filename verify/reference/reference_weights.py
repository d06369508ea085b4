"""Weights of a model on disk as float32 arrays: dense tensors by name, experts by layer and id.

Reads any `ModelSource` with plain file reads. Everything that has been read stays in memory unless told
otherwise, so this is for small models, or for slices on large machines. One thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3.base import checksum
from k3.base.errors import DamageError, DriveError, ExpertError, SourceError, UnsupportedError
from k3.model.keys import ExpertLayout, Extent
from k3.model.model_source import ModelSource
from k3.verify.reference.arithmetic import Array, dequantize, dequantize_mxfp4

_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Expert:
    """The three matrices of a routed expert: gate w1 [F, L], down w2 [L, F], up w3 [F, L]."""

    w1: Array
    w2: Array
    w3: Array


class ReferenceWeights:
    """The weights of a model as a forward pass asks for them, dequantized."""

    def __init__(self, source: ModelSource, *, keep: bool = True) -> None:
        """`keep` holds everything in memory once it was read. SourceError when there is no text model."""
        self._source = source
        self._keep = keep
        self._dense: dict[str, Array] = {}
        self._experts: dict[tuple[int, int], Expert] = {}
        places = [name for name in source.tensor_names() if name.endswith(_EMBEDDING)]
        if len(places) != 1:
            raise SourceError(f"expected one {_EMBEDDING}, found {len(places)}")
        self._prefix = places[0].removesuffix(_EMBEDDING)

    def dense(self, name: str) -> Array:
        """Return the tensor called `name` after the text model's prefix, float32 in its source's shape.

        KeyError when there is none.
        """
        if name in self._dense:
            return self._dense[name]
        tensor = dequantize(self._source.read_tensor(self._prefix + name))
        if self._keep:
            self._dense[name] = tensor
        return tensor

    def layer(self, number: int) -> LayerWeights:
        """Return the dense tensors of one layer, by the rest of their names."""
        return LayerWeights(self, f"model.layers.{number}.")

    def expert(self, layer: int, number: int) -> Expert:
        """One routed expert. ExpertError, DriveError or DamageError when it is not there as it should be."""
        key = (layer, number)
        if key in self._experts:
            return self._experts[key]
        layout = self._source.expert_layout(layer)
        payload = _read_payload(self._source.expert_extents(layer, number), layer, number)
        if len(payload) != layout.payload_bytes:
            problem = f"the expert has {len(payload)} bytes, its layout {layout.payload_bytes}"
            raise ExpertError(problem, layer=layer, expert=number)
        expert = Expert(*(_matrix(payload, layout, name, layer, number) for name in ("w1", "w2", "w3")))
        if self._keep:
            self._experts[key] = expert
        return expert


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`weights["self_attn.q_proj"]` is the tensor of that name (with `.weight`, if it has one) in one layer."""

    weights: ReferenceWeights
    place: str

    def __getitem__(self, name: str) -> Array:
        bare = name.rpartition(".")[2] in ("A_log", "dt_bias", "e_score_correction_bias")
        return self.weights.dense(self.place + (name if bare else name + ".weight"))

    def below(self, part: str) -> LayerWeights:
        """Return the weights of a part of the layer: `below("self_attn")["q_proj"]`."""
        return LayerWeights(self.weights, f"{self.place}{part}.")


def _matrix(payload: npt.NDArray[np.uint8], layout: ExpertLayout, name: str, layer: int, expert: int) -> Array:
    try:
        packed, scale = layout.part(f"{name}.weight_packed"), layout.part(f"{name}.weight_scale")
    except KeyError as missing:
        raise UnsupportedError(f"the experts have no {missing.args[0]}: not MXFP4", layer=layer) from None
    if packed.dtype != "U8" or scale.dtype not in ("U8", "F8_E8M0") or packed.shape[1] != 16 * scale.shape[1]:
        raise UnsupportedError(f"{name} is not packed as MXFP4 is", layer=layer)
    codes, scales = (
        payload[part.offset : part.offset + part.nbytes].reshape(part.shape) for part in (packed, scale)
    )
    try:
        return dequantize_mxfp4(codes, scales)
    except ValueError as error:
        raise ExpertError(str(error), layer=layer, expert=expert, tensor=scale.name) from None


def _read_payload(extents: tuple[Extent, ...], layer: int, expert: int) -> npt.NDArray[np.uint8]:
    """Return the payloads of the extents, one after the other, each compared with its digest if it has one."""
    pieces = []
    for extent in extents:
        stored = _read(extent.path, extent.offset, extent.stored_bytes, layer, expert)
        if extent.digest is not None and checksum.digest(stored) != extent.digest:
            raise DamageError(
                "the expert's bytes differ from their digest",
                path=extent.path,
                offset=extent.offset,
                layer=layer,
                expert=expert,
            )
        pieces.append(stored[: extent.payload_bytes])
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def _read(path: Path, offset: int, length: int, layer: int, expert: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
    except OSError as error:
        raise DriveError(
            f"cannot read: {error.strerror}", path=path, offset=offset, layer=layer, expert=expert
        ) from error
    if len(data) != length:
        problem = f"the file ends {length - len(data)} bytes too early"
        raise DriveError(problem, path=path, offset=offset, layer=layer, expert=expert)
    return data
