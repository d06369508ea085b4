"""The table of K3's tensors: their names in the order of the forward pass, with shapes, dtypes and uses.

Two modules derive from it. `tensor_recipe` derives the order and the encoding of each tensor, by which the
repacker writes and a snapshot is loaded; `tensor_names` derives the names, shapes and uses that a configuration
requires, by which headers are checked and the engine plans. The order and use of a tensor that is not in the table
are never guessed. The reference model and the synthetic snapshots of the verifier list the names independently, in
order to find mistakes in this table.

Values and pure functions; safe to use from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layers = Literal["all", "kda", "mla", "dense", "moe", "shared"]
"""The decoder layers that have a tensor: all, those with KDA or MLA attention, those with a dense MLP or with
routed experts, those with shared experts."""

Use = Literal[
    "embeddings", "KDA attention", "MLA attention", "dense MLP", "shared experts", "latent projections", "routers",
    "head", "norms and other vectors",
]  # fmt: skip
"""The purpose of a dense tensor, as `k3-run --plan` prints it.

The last one is held as float32, all others are matrices that stay in their stored form.
"""

PREFIX = "language_model."
"""The prefix of the text model's tensor names inside the multimodal checkpoint; other checkpoints have none."""

REAL_DTYPES = ("BF16", "F16", "F32")
"""Dtypes that a dense tensor can have: float32 represents each of their numbers exactly."""

EXPERT_DTYPES = {"packed": ("U8",), "scale": ("U8", "F8_E8M0")}
"""Dtypes of an expert's two kinds of tensors. F8_E8M0 is a newer name for the same scale bytes."""

EXPERT_MATRICES = ("w1", "w2", "w3")
"""Matrices of an expert: gate, down and up."""

MX_GROUP = 32
"""Columns of an expert's matrix that share one scale byte."""


@dataclass(frozen=True, slots=True)
class KnownTensor:
    """One dense tensor of K3.

    `dimensions` are the names of its shape's extents; `recipe` is True if a recipe may store it in fewer bits.
    """

    name: str
    dimensions: tuple[str, ...]
    use: Use
    layers: Layers = "all"
    recipe: bool = False


def _norm(name: str, dimension: str, layers: Layers = "all") -> KnownTensor:
    return KnownTensor(f"{name}.weight", (dimension,), "norms and other vectors", layers)


def _mix(name: str) -> tuple[KnownTensor, ...]:
    """Return the two tensors of a mixture of residual streams."""
    vectors: Use = "norms and other vectors"
    return (_norm(f"{name}_norm", "hidden"), KnownTensor(f"{name}_proj.weight", ("one", "hidden"), vectors))


def _kda(name: str, *dimensions: str, recipe: bool = False) -> KnownTensor:
    return KnownTensor(f"self_attn.{name}.weight", dimensions, "KDA attention", "kda", recipe)


def _kda_vector(name: str, *dimensions: str) -> KnownTensor:
    return KnownTensor(f"self_attn.{name}", dimensions, "norms and other vectors", "kda")


def _mla(name: str, *dimensions: str) -> KnownTensor:
    return KnownTensor(f"self_attn.{name}.weight", dimensions, "MLA attention", "mla", recipe=True)


def _glu(name: str, inner: str, use: Use, layers: Layers) -> tuple[KnownTensor, ...]:
    """Return the three matrices of a gated MLP."""
    return (
        KnownTensor(f"{name}.gate_proj.weight", (inner, "hidden"), use, layers, recipe=True),
        KnownTensor(f"{name}.up_proj.weight", (inner, "hidden"), use, layers, recipe=True),
        KnownTensor(f"{name}.down_proj.weight", ("hidden", inner), use, layers, recipe=True),
    )


def _latent(name: str, *dimensions: str) -> KnownTensor:
    return KnownTensor(f"block_sparse_moe.{name}.weight", dimensions, "latent projections", "moe", recipe=True)


BEFORE_LAYERS = (KnownTensor("model.embed_tokens.weight", ("vocab", "hidden"), "embeddings"),)
"""The tensors that are read before the first layer."""

IN_LAYER = (
    *_mix("self_attention_res"),
    _norm("input_layernorm", "hidden"),
    _kda("q_proj", "kda_width", "hidden", recipe=True),
    _kda("k_proj", "kda_width", "hidden", recipe=True),
    _kda("v_proj", "kda_width", "hidden", recipe=True),
    _kda_vector("q_conv1d.weight", "kda_width", "one", "conv_taps"),
    _kda_vector("k_conv1d.weight", "kda_width", "one", "conv_taps"),
    _kda_vector("v_conv1d.weight", "kda_width", "one", "conv_taps"),
    _kda("f_a_proj", "kda_head", "hidden"),
    _kda("f_b_proj", "kda_width", "kda_head"),
    _kda_vector("A_log", "kda_heads"),
    _kda_vector("dt_bias", "kda_width"),
    _kda("b_proj", "kda_heads", "hidden"),
    _kda_vector("o_norm.weight", "kda_head"),
    _mla("q_a_proj", "q_rank", "hidden"),
    _norm("self_attn.q_a_layernorm", "q_rank", "mla"),
    _mla("q_b_proj", "mla_queries", "q_rank"),
    _mla("kv_a_proj_with_mqa", "kv_latent_rope", "hidden"),
    _norm("self_attn.kv_a_layernorm", "kv_latent", "mla"),
    _mla("kv_b_proj", "mla_keys_values", "kv_latent"),
    _kda("g_proj", "kda_width", "hidden", recipe=True),
    _mla("g_proj", "mla_values", "hidden"),
    _kda("o_proj", "hidden", "kda_width", recipe=True),
    _mla("o_proj", "hidden", "mla_values"),
    *_mix("mlp_res"),
    _norm("post_attention_layernorm", "hidden"),
    *_glu("mlp", "dense_inner", "dense MLP", "dense"),
    # latent MoE; the routed experts are read between the down projection and the norm
    KnownTensor("block_sparse_moe.gate.weight", ("experts", "hidden"), "routers", "moe"),
    KnownTensor("block_sparse_moe.gate.e_score_correction_bias", ("experts",), "norms and other vectors", "moe"),
    _latent("routed_expert_down_proj", "moe_latent", "hidden"),
    _norm("block_sparse_moe.routed_expert_norm", "moe_latent", "moe"),
    _latent("routed_expert_up_proj", "hidden", "moe_latent"),
    *_glu("block_sparse_moe.shared_experts", "shared_inner", "shared experts", "shared"),
)
"""The tensors of a layer, by their names after the layer's prefix, in the order of use."""

AFTER_LAYERS = (
    *_mix("model.output_attn_res"),
    _norm("model.norm", "hidden"),
    KnownTensor("lm_head.weight", ("vocab", "hidden"), "head", recipe=True),
)
"""The tensors that are read after the last layer."""

MLA_MARK = "self_attn.kv_b_proj.weight"
"""The tensor that only a layer with full attention (MLA) has."""
