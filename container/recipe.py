"""What K3's dense tensors are, in which order the forward pass reads them, and how each is to be stored.

One table of name suffixes, in the order of the forward pass, is the only place that knows K3's tensors. The
repacker writes with it and a raw snapshot is read with it, so both give an engine the same bytes. Tensors
that are not in the table are never guessed at: they keep their bytes (RAW).

Values and pure functions; safe to use from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from k3.container.keys import Encoding, is_vision, layer_of

MATRIX_ENCODINGS: dict[int, Encoding] = {
    4: Encoding.INT4,
    8: Encoding.INT8,
    16: Encoding.RAW,
    32: Encoding.F32,
}
"""Bits per weight that can be asked for, and what they mean for a matrix."""

_PREFIX = "language_model."
_DECODER = re.compile(r"^model\.layers\.([0-9]+)\.(.+)$")
_HEAD = "lm_head.weight"
_BEFORE_LAYERS = ("model.embed_tokens.weight",)
_AFTER_LAYERS = (
    "model.output_attn_res_norm.weight",
    "model.output_attn_res_proj.weight",
    "model.norm.weight",
    _HEAD,
)
_IN_LAYER = (
    "self_attention_res_norm.weight",
    "self_attention_res_proj.weight",
    "input_layernorm.weight",
    # KDA
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.q_conv1d.weight",
    "self_attn.k_conv1d.weight",
    "self_attn.v_conv1d.weight",
    "self_attn.f_a_proj.weight",
    "self_attn.f_b_proj.weight",
    "self_attn.A_log",
    "self_attn.dt_bias",
    "self_attn.b_proj.weight",
    "self_attn.o_norm.weight",
    # MLA
    "self_attn.q_a_proj.weight",
    "self_attn.q_a_layernorm.weight",
    "self_attn.q_b_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight",
    "self_attn.kv_a_layernorm.weight",
    "self_attn.kv_b_proj.weight",
    # both
    "self_attn.g_proj.weight",
    "self_attn.o_proj.weight",
    "mlp_res_norm.weight",
    "mlp_res_proj.weight",
    "post_attention_layernorm.weight",
    # dense MLP
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    # latent MoE; the routed experts are read between the down projection and the norm
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.gate.e_score_correction_bias",
    "block_sparse_moe.routed_expert_down_proj.weight",
    "block_sparse_moe.routed_expert_norm.weight",
    "block_sparse_moe.routed_expert_up_proj.weight",
    "block_sparse_moe.shared_experts.gate_proj.weight",
    "block_sparse_moe.shared_experts.up_proj.weight",
    "block_sparse_moe.shared_experts.down_proj.weight",
)
_MATRICES = frozenset(
    (
        *(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "g", "o", "q_a", "q_b", "kv_b")),
        "self_attn.kv_a_proj_with_mqa.weight",
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        *(f"block_sparse_moe.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")),
        "block_sparse_moe.routed_expert_down_proj.weight",
        "block_sparse_moe.routed_expert_up_proj.weight",
    )
)
_MLA_MARK = "self_attn.kv_b_proj.weight"
_RANK = {suffix: rank for rank, suffix in enumerate(_IN_LAYER)}
_QUANTIZED_FROM = frozenset(("BF16", "F32"))


@dataclass(frozen=True, slots=True)
class Recipe:
    """Bits per weight: `mla_bits` for attention matrices of full-attention layers, `head_bits` for lm_head,
    `bits` for every other matrix. Each is 4, 8, 16 (as stored) or 32; ValueError otherwise.
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
        """How to store the dense tensor `name`, whose source has `dtype` and `shape`.

        Only the known matrices in BF16 or F32 change; everything else is RAW: norms, biases, convolutions, the
        router, embeddings, unknown tensors, and matrices that come in another dtype or not in two dimensions.
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
            return Encoding.RAW  # the same bytes, and says that nothing was done
        return encoding


def is_matrix(name: str) -> bool:
    """Whether a tensor is one of the known matrices that a recipe may store in fewer bits."""
    layer, suffix = _split(name)
    return suffix == _HEAD if layer is None else suffix in _MATRICES


def is_quantizable(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a recipe applies to this tensor: a known matrix, two-dimensional, not empty, BF16 or F32."""
    return is_matrix(name) and dtype in _QUANTIZED_FROM and len(shape) == 2 and 0 not in shape


def is_known(name: str) -> bool:
    """Whether a dense tensor is one of K3's (with or without the `language_model.` prefix)."""
    layer, suffix = _split(name)
    return suffix in _RANK if layer is not None else suffix in _BEFORE_LAYERS or suffix in _AFTER_LAYERS


def canonical_name(name: str) -> str:
    """One spelling for all names of the same tensor: without prefix, layer number without leading zeros."""
    layer, suffix = _split(name)
    return suffix if layer is None else f"model.layers.{layer}.{suffix}"


def mla_layers(names: Iterable[str]) -> frozenset[int]:
    """0-based layers with full attention (MLA), told by their tensors; every other layer is KDA."""
    marked = (_split(name) for name in names)
    return frozenset(layer for layer, suffix in marked if layer is not None and suffix == _MLA_MARK)


def execution_order(names: Iterable[str]) -> list[str]:
    """Dense tensor names in the order the forward pass reads them.

    Embeddings, then the layers ascending, then the output mix, the last norm and lm_head. Unknown tensors
    come at the end of their layer, or at the very end, by name.
    """
    return sorted(names, key=_order)


def _order(name: str) -> tuple[int, int, int, str]:
    layer, suffix = _split(name)
    if layer is None and not is_vision(name):
        layer = layer_of(name)  # an unknown tensor of a layer that is named in another way
    if layer is not None:
        return (1, layer, _RANK.get(suffix, len(_RANK)), name)
    if suffix in _BEFORE_LAYERS:
        return (0, 0, _BEFORE_LAYERS.index(suffix), name)
    if suffix in _AFTER_LAYERS:
        return (2, 0, _AFTER_LAYERS.index(suffix), name)
    return (3, 0, 0, name)


def _split(name: str) -> tuple[int | None, str]:
    """A decoder layer's number and what follows it, or None and the whole name; both without prefix."""
    plain = name.removeprefix(_PREFIX)
    match = _DECODER.match(plain)
    return (None, plain) if match is None else (int(match[1]), match[2])
