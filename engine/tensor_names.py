"""Which dense tensors a model must have: the table of names and shapes that follows from a configuration.

Before a byte of weights is read, the source's names are held against it: a missing tensor is an error, and so is
one that this engine does not know, since a model with more tensors computes something else. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from k3.container.errors import SourceError, UnsupportedError
from k3.container.keys import layer_of
from k3.engine.config import ModelConfig

Shape = tuple[int, ...]

ALL_TEXT_PREFIXES = ("language_model.", "")
"""Where the text model's names may begin: inside the multimodal checkpoint, or alone."""

_LISTED = 5  # names shown in an error before "and N more"


def text_prefix(names: Iterable[str]) -> str:
    """What the text model's tensor names begin with. SourceError when there are no embeddings at all."""
    present = set(names)
    for prefix in ALL_TEXT_PREFIXES:
        if f"{prefix}model.embed_tokens.weight" in present:
            return prefix
    raise SourceError("tensor is missing from the model", tensor="language_model.model.embed_tokens.weight")


def check_shape(name: str, shape: Sequence[int], expected: Shape) -> None:
    """SourceError unless the shapes agree; A_log may be padded beyond its heads."""
    fits = tuple(shape) == expected
    if name.endswith(".A_log"):
        fits = len(shape) == 1 and shape[0] >= expected[0]
    if not fits:
        raise SourceError(
            f"shape {list(shape)} does not fit the configuration, which gives {list(expected)}", tensor=name
        )


def check_shapes(shapes: Mapping[str, Sequence[int]], config: ModelConfig) -> None:
    """Check tensors by full name, before anything is read. SourceError names the first that does not fit."""
    prefix = text_prefix(shapes)
    expected = expected_tensors(config, config.layers)
    for name, shape in shapes.items():
        check_shape(name, shape, expected[name.removeprefix(prefix)])


def expected_tensors(config: ModelConfig, layers: Iterable[int]) -> dict[str, Shape]:
    """Every dense tensor that these layers and the model around them have: name without prefix -> shape."""
    hidden, vocab = config.hidden, config.vocab
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.output_attn_res_norm.weight": (hidden,),
        "model.output_attn_res_proj.weight": (1, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in layers:
        kda, moe = layer in config.kda_layers, layer in config.moe_layers
        own = _mix_and_norm_shapes(config)
        own |= _kda_shapes(config) if kda else _mla_shapes(config)
        own |= _moe_shapes(config) if moe else _dense_mlp_shapes(config)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _mix_and_norm_shapes(config: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        f"{norm}.weight": (config.hidden,) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for mix in ("self_attention_res", "mlp_res"):
        shapes[f"{mix}_norm.weight"] = (config.hidden,)
        shapes[f"{mix}_proj.weight"] = (1, config.hidden)
    return shapes


def _kda_shapes(config: ModelConfig) -> dict[str, Shape]:
    kda, hidden = config.kda, config.hidden
    shapes: dict[str, Shape] = {
        "f_a_proj.weight": (kda.head_dim, hidden),
        "f_b_proj.weight": (kda.width, kda.head_dim),
        "b_proj.weight": (kda.heads, hidden),
        "g_proj.weight": (kda.width, hidden),
        "o_proj.weight": (hidden, kda.width),
        "o_norm.weight": (kda.head_dim,),
        "A_log": (kda.heads,),
        "dt_bias": (kda.width,),
    }
    for stream in "qkv":
        shapes[f"{stream}_proj.weight"] = (kda.width, hidden)
        shapes[f"{stream}_conv1d.weight"] = (kda.width, 1, kda.conv_taps)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _mla_shapes(config: ModelConfig) -> dict[str, Shape]:
    mla, hidden = config.mla, config.hidden
    shapes: dict[str, Shape] = {
        "q_a_proj.weight": (mla.q_rank, hidden),
        "q_a_layernorm.weight": (mla.q_rank,),
        "q_b_proj.weight": (mla.heads * (mla.nope + mla.rope), mla.q_rank),
        "kv_a_proj_with_mqa.weight": (mla.latent + mla.rope, hidden),
        "kv_a_layernorm.weight": (mla.latent,),
        "kv_b_proj.weight": (mla.heads * (mla.nope + mla.value), mla.latent),
        "g_proj.weight": (mla.heads * mla.value, hidden),
        "o_proj.weight": (hidden, mla.heads * mla.value),
    }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _glu_shapes(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _dense_mlp_shapes(config: ModelConfig) -> dict[str, Shape]:
    return _glu_shapes("mlp", config.hidden, config.dense_inner)


def _moe_shapes(config: ModelConfig) -> dict[str, Shape]:
    moe, hidden = config.moe, config.hidden
    shapes: dict[str, Shape] = {
        "block_sparse_moe.gate.weight": (moe.experts, hidden),
        "block_sparse_moe.gate.e_score_correction_bias": (moe.experts,),
        "block_sparse_moe.routed_expert_down_proj.weight": (moe.latent, hidden),
        "block_sparse_moe.routed_expert_norm.weight": (moe.latent,),
        "block_sparse_moe.routed_expert_up_proj.weight": (hidden, moe.latent),
    }
    if moe.shared_experts:
        inner = moe.shared_experts * moe.inner
        shapes |= _glu_shapes("block_sparse_moe.shared_experts", hidden, inner)
    return shapes


def needed_names(names: Iterable[str], config: ModelConfig) -> list[str]:
    """Full names of the tensors that a run of `config.layers` reads, out of all that a source has, in its order.

    Compares names only. SourceError for what is missing; UnsupportedError for tensors that the whole model
    would not have.
    """
    names = list(names)
    prefix = text_prefix(names)
    needed = {prefix + name for name in expected_tensors(config, config.layers)}
    present = set(names)
    known = expected_tensors(config, range(config.layer_count))
    unknown = [name for name in present if name.removeprefix(prefix) not in known or not name.startswith(prefix)]
    if unknown:
        raise UnsupportedError(
            f"this engine does not know {_listing(unknown)}",
            tensor=min(unknown),
            advice="The model is a later revision or not a Kimi K3; leaving tensors out would change its text",
        )
    missing = [name for name in needed if name not in present]
    if missing:
        layers = sorted({layer for name in missing if (layer := layer_of(name)) is not None})
        raise SourceError(
            f"the model lacks {_listing(missing)}",
            tensor=min(missing),
            layer=layers[0] if layers else None,
            advice="If only some layers were repacked or downloaded, run just those with --layers",
        )
    return [name for name in names if name in needed]


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    more = len(names) - _LISTED
    plural = "tensor" if len(names) == 1 else "tensors"
    return f"{plural} {shown}" + (f" and {more} more" if more > 0 else "")
