"""The order in which the forward pass reads K3's dense tensors, and the encoding that each is stored in.

Both are derived from the table in `k3_tensors`. The repacker writes by them and a snapshot is read by them, so
both give an engine the same bytes. Tensors that are not in the table keep their bytes (RAW).

Values and pure functions; safe to use from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from k3.model.k3_tensors import AFTER_LAYERS, BEFORE_LAYERS, IN_LAYER, MLA_MARK, PREFIX, REAL_DTYPES
from k3.model.keys import Encoding, is_vision, layer_of

MATRIX_ENCODINGS: dict[int, Encoding] = {
    4: Encoding.INT4,
    8: Encoding.INT8,
    16: Encoding.RAW,
    32: Encoding.F32,
}
"""The encoding of a matrix for each number of bits per weight that can be requested."""

_DECODER = re.compile(r"^model\.layers\.([0-9]+)\.(.+)$")
_BEFORE = {tensor.name: rank for rank, tensor in enumerate(BEFORE_LAYERS)}
_AFTER = {tensor.name: rank for rank, tensor in enumerate(AFTER_LAYERS)}
_RANK = {tensor.name: rank for rank, tensor in enumerate(IN_LAYER)}
_MATRICES = frozenset(tensor.name for tensor in IN_LAYER if tensor.recipe)
_HEADS = frozenset(tensor.name for tensor in AFTER_LAYERS if tensor.recipe)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bits per weight of a container's matrices.

    `mla_bits` applies to the attention matrices of full-attention layers, `head_bits` to lm_head, `bits` to every
    other matrix. Each is 4, 8, 16 (as stored) or 32. Raises ValueError otherwise.
    """

    bits: int = 8
    mla_bits: int = 8
    head_bits: int = 8

    def __post_init__(self) -> None:
        for field in ("bits", "mla_bits", "head_bits"):
            value = getattr(self, field)
            if type(value) is not int or value not in MATRIX_ENCODINGS:
                allowed = ", ".join(str(bits) for bits in MATRIX_ENCODINGS)
                raise ValueError(f"{field} is {value!r}; it can be {allowed}")

    def encoding(self, name: str, dtype: str, shape: tuple[int, ...], is_mla_layer: bool) -> Encoding:
        """Return the encoding of the dense tensor `name`, whose source has `dtype` and `shape`.

        Only the known matrices in BF16, F16 or F32 change. Everything else is RAW: norms, biases, convolutions,
        the router, embeddings, unknown tensors, and matrices in another dtype or not in two dimensions.
        """
        if not is_quantizable(name, dtype, shape):
            return Encoding.RAW
        layer, suffix = _split(name)
        if layer is None:
            bits = self.head_bits
        elif is_mla_layer and suffix.startswith("self_attn."):
            bits = self.mla_bits
        else:
            bits = self.bits
        encoding = MATRIX_ENCODINGS[bits]
        if encoding is Encoding.F32 and dtype == "F32":
            return Encoding.RAW  # the bytes are equal, and RAW says that they are the source's
        return encoding


def is_matrix(name: str) -> bool:
    """Return True if a tensor is one of the known matrices that a recipe may store in fewer bits."""
    layer, suffix = _split(name)
    return suffix in (_HEADS if layer is None else _MATRICES)


def is_quantizable(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Return True if a recipe applies to a tensor: a known matrix with two axes, not empty, BF16, F16 or F32."""
    return is_matrix(name) and dtype in REAL_DTYPES and len(shape) == 2 and 0 not in shape


def is_known(name: str) -> bool:
    """Return True if a dense tensor is one of K3's (with or without the `language_model.` prefix)."""
    layer, suffix = _split(name)
    return suffix in _RANK if layer is not None else suffix in _BEFORE or suffix in _AFTER


def canonical_name(name: str) -> str:
    """Return the one name for all spellings of a tensor: no prefix, no leading zeros in the layer number."""
    layer, suffix = _split(name)
    return suffix if layer is None else f"model.layers.{layer}.{suffix}"


def mla_layers(names: Iterable[str]) -> frozenset[int]:
    """Return the 0-based layers with full attention (MLA), recognised by their tensors; all others are KDA."""
    marked = (_split(name) for name in names)
    return frozenset(layer for layer, suffix in marked if layer is not None and suffix == MLA_MARK)


def execution_order(names: Iterable[str]) -> list[str]:
    """Return dense tensor names in the order in which the forward pass reads them.

    Embeddings, then the layers ascending, then the output mix, the last norm and lm_head. Unknown tensors come at
    the end of their layer, or at the very end, sorted by name.
    """
    return sorted(names, key=_order)


def _order(name: str) -> tuple[int, int, int, str]:
    layer, suffix = _split(name)
    if layer is None and not is_vision(name):
        layer = layer_of(name)  # an unknown tensor of a layer that is named in another way
    if layer is not None:
        return (1, layer, _RANK.get(suffix, len(IN_LAYER)), name)
    if suffix in _BEFORE:
        return (0, 0, _BEFORE[suffix], name)
    if suffix in _AFTER:
        return (2, 0, _AFTER[suffix], name)
    return (3, 0, 0, name)


def _split(name: str) -> tuple[int | None, str]:
    """Return a decoder layer's number and the name after it, or None and the whole name; both without prefix."""
    plain = name.removeprefix(PREFIX)
    match = _DECODER.match(plain)
    return (None, plain) if match is None else (int(match[1]), match[2])
