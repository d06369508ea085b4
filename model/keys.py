"""Names of tensors and experts, and the extents that hold their bytes.

Everything here is an immutable value or a pure function. Safe to use from any thread.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass
from pathlib import Path

EXPERTS_MAX = 1 << 20
"""Limit of a layer's experts; a larger number in a name or a record is forged or damaged."""

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
"""Bits per element of every safetensors dtype that is accepted. Any other dtype is refused."""

_EXPERT = re.compile(r"^(?P<prefix>.*\blayers\.(?P<layer>\d+)\..*?\bexperts)\.(?P<expert>\d+)\.(?P<part>.+)$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Encoding(enum.Enum):
    """The form in which a dense tensor's numbers are stored."""

    RAW = "raw"  # the source's bytes and dtype, unchanged
    F32 = "f32"  # widened to float32
    INT8 = "int8"  # one signed byte per weight, one float32 scale per row
    INT4 = "int4"  # two biased nibbles per byte (low first), one float32 scale per group of 64 columns


@dataclass(frozen=True, slots=True, order=True)
class ExpertKey:
    """The layer and the number of one routed expert; `layer` counts from 0, as in tensor names."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class ExpertName:
    """The components of a routed expert's tensor name, `{prefix}.{expert}.{part}`."""

    prefix: str
    key: ExpertKey
    part: str


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in one file.

    A reader reads `stored_bytes` from `offset`; the first `payload_bytes` of them are content, the rest is zero
    padding up to a page. `digest` is the xxh3-128 of all `stored_bytes`, or None where none is known (in a
    snapshot).
    """

    path: Path
    offset: int
    payload_bytes: int
    stored_bytes: int
    digest: bytes | None = None

    @property
    def end(self) -> int:
        """The first offset after the extent."""
        return self.offset + self.stored_bytes


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One tensor of an expert, and its place inside the expert's payload in bytes."""

    name: str  # e.g. "w1.weight_packed"
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The layout of the payload of every expert of one layer: its parts in order, without gaps."""

    prefix: str  # of the names, up to and including ".experts"
    parts: tuple[ExpertPart, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes of one expert without padding."""
        return sum(part.nbytes for part in self.parts)

    def part(self, name: str) -> ExpertPart:
        """Return the part called `name`. Raises KeyError when the layer's experts have none."""
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)


def parse_expert_name(name: str) -> ExpertName | None:
    """Return the components of a routed expert's tensor name; None for any other, also of shared experts."""
    match = _EXPERT.match(name)
    if match is None:
        return None
    key = ExpertKey(int(match["layer"]), int(match["expert"]))
    return ExpertName(match["prefix"], key, match["part"])


def layer_of(name: str) -> int | None:
    """Return the 0-based decoder layer that a tensor belongs to, None for tensors outside the layers."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def is_vision(name: str) -> bool:
    """Return True if a tensor belongs to the vision tower or the multimodal projector."""
    return name.startswith(("vision_tower.", "mm_projector.", "multi_modal_projector."))


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. Raises KeyError for a dtype that is not in DTYPE_BITS."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8
