"""The model's shape and constants: one frozen value, read from config.json once and checked.

Every key of the text configuration that changes a result is either a field here or refused here when it asks for
something that this engine does not compute. Nothing is clamped and nothing has a guessed default: a missing key is
an error that names it. Keys that are not known are collected in `unknown_keys`, so that a later revision of the
model is not run silently as if it were the old one. Immutable; any thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from k3.base.errors import ConfigError, UnsupportedError
from k3.base.safe_text import shown
from k3.model.k3_tensors import MX_GROUP
from k3.model.model_config import text_config

LatentType = Literal["f32", "bf16", "f16"]
"""The dtype in which a run holds latents between tokens."""

MLA_LATENT_EPS = 1e-6
"""Epsilon of the two latent norms inside MLA: the class default of the published model code, which passes none
there. Some other engines use rms_norm_eps; `k3-run --mla-eps` can follow them."""

ROUTER_SUM_EPS = 1e-20
"""Added to the sum of the selected router scores before dividing by it."""

L2_NORM_EPS = 1e-6
"""Added inside the root of the norm that queries and keys of KDA are divided by."""

CONV_TAPS_MAX = 16
"""Largest number of taps of KDA's convolution that the kernels support (the model has 4)."""

COUNT_MAX = 1 << 40
"""Largest count or extent of a model that is accepted; a larger number is a damaged config.json."""

MIX_ENTRIES_MAX = 64
"""Largest number of entries of a residual mixture that the kernels support (the model has 9)."""

_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("kimi_linear", "kimi_k3"),
    "hidden_act": ("situ",),
    "mla_use_nope": (True,),
    "mla_use_output_gate": (True,),
    "linear_attn_config.use_full_rank_gate": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "latent_moe_use_norm": (True,),
    "num_expert_group": (1,),
    "quantization_config.format": ("mxfp4-pack-quantized",),
}
"""Keys with the only values that this forward pass is written for."""

_ABSENT_OR: dict[str, tuple[Any, ...]] = {
    "topk_method": ("noaux_tc",),
    "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (0,),
    "rope_theta": (),
    "rope_scaling": (),
    "rope_parameters": (),
    "sliding_window": (),
    "attention_bias": (False,),
    "q_lora_scaling": (),
}
"""Keys that may be missing or null; any other value must be one of these."""

_SHAPE_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "rms_norm_eps",
    "activation_situ_beta", "activation_situ_linear_beta", "attn_res_block_size", "linear_attn_config",
    "num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "num_experts", "num_experts_per_token", "num_shared_experts",
    "moe_intermediate_size", "routed_expert_hidden_size", "first_k_dense_replace", "moe_layer_freq",
    "moe_renormalize", "routed_scaling_factor", "topk_group", "use_grouped_topk", "bos_token_id",
    "eos_token_id", "pad_token_id", "max_position_embeddings", "quantization_config", "head_dim",
)  # fmt: skip
"""Keys read here in addition to those of the two tables above."""

_NEUTRAL_KEYS = (
    "_name_or_path", "add_cross_attention", "architectures", "auto_map", "bad_words_ids",
    "begin_suppress_tokens", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "torch_dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions", "output_hidden_states",
    "output_scores", "prefix", "problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty",
    "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache", "ignore_index",
    "image_placeholder", "media_placeholder_token_id",
)  # fmt: skip
"""Generation settings and bookkeeping of the file format, which affect no logit."""

_KDA_KEYS = (
    "kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound",
)  # fmt: skip

_LAYERS = re.compile(r"^\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?$")


@dataclass(frozen=True, slots=True)
class KdaConfig:
    """Kimi Delta Attention: heads of width `head_dim`, after a causal convolution of `conv_taps` taps.

    Comments name the keys of `linear_attn_config` in config.json.
    """

    heads: int  # num_heads
    head_dim: int  # head_dim
    conv_taps: int  # short_conv_kernel_size
    gate_lower_bound: float  # gate_lower_bound

    @property
    def width(self) -> int:
        """Channels of q, k, v and of the output: all heads side by side."""
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Gated multi-head latent attention without positions; the "rope" columns exist but are not rotated.

    Comments name the keys of config.json. It has none for `eps`, the epsilon of the latent norms, and for `cache`,
    the dtype in which a run holds latents.
    """

    heads: int  # num_attention_heads
    q_rank: int  # q_lora_rank
    latent: int  # kv_lora_rank
    nope: int  # qk_nope_head_dim
    rope: int  # qk_rope_head_dim
    value: int  # v_head_dim
    eps: float = MLA_LATENT_EPS
    cache: LatentType = "f32"

    @property
    def scale(self) -> float:
        """Factor on the attention scores."""
        return float((self.nope + self.rope) ** -0.5)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Stable LatentMoE: `experts` routed experts of width `latent` in and out, `inner` inside.

    Comments name the keys of config.json.
    """

    experts: int  # num_experts
    top_k: int  # num_experts_per_token
    latent: int  # routed_expert_hidden_size
    inner: int  # moe_intermediate_size
    shared_experts: int  # num_shared_experts
    renormalize: bool  # moe_renormalize
    scaling_factor: float  # routed_scaling_factor


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the forward pass needs in addition to the weights. Layers are 0-based.

    Comments name the keys of config.json.
    """

    vocab: int  # vocab_size
    hidden: int  # hidden_size
    layer_count: int  # num_hidden_layers
    dense_inner: int  # intermediate_size
    eps: float  # rms_norm_eps
    situ_beta: float  # activation_situ_beta
    situ_linear_beta: float  # activation_situ_linear_beta
    residual_block: int  # attn_res_block_size
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig
    kda_layers: frozenset[int]  # linear_attn_config.kda_layers, which counts from 1
    moe_layers: frozenset[int]  # first_k_dense_replace, moe_layer_freq
    max_positions: int  # max_position_embeddings
    eos_ids: tuple[int, ...]  # eos_token_id
    layers: range  # that are run: a contiguous range, the whole model unless truncated
    unknown_keys: tuple[str, ...] = ()

    @classmethod
    def from_raw(cls, raw: Mapping[str, Any], path: Path) -> ModelConfig:
        """Return the configuration of a parsed config.json, nested or flat; `path` is its file, for messages.

        Raises ConfigError for missing or contradictory keys, UnsupportedError for anything that this engine does
        not compute; both name the key.
        """
        return _build(_Keys(text_config(raw, path), path))

    def truncated(self, layers: str) -> ModelConfig:
        """Return the same model with only some layers: "4" is the first four, "2-5" is layers 2 to 5 inclusive.

        For measuring and for debugging; the text that it generates is meaningless. Raises ValueError for another
        form or for layers that do not exist.
        """
        chosen = parse_layers(layers)
        if chosen.stop > self.layer_count:
            raise ValueError(f"{layers!r} does not name layers of a model of {self.layer_count} layers")
        return replace(self, layers=chosen)

    def with_mla_eps(self, eps: float) -> ModelConfig:
        """Return the same model with another epsilon in MLA's latent norms."""
        return replace(self, mla=replace(self.mla, eps=eps))

    def with_latent_cache(self, cache: LatentType) -> ModelConfig:
        """Return the same model with its latents held in another dtype between tokens."""
        return replace(self, mla=replace(self.mla, cache=cache))


def parse_layers(text: str) -> range:
    """Return the layers meant by "4" (the first four) or "2-5" (2 to 5 inclusive, from 0).

    Raises ValueError for any other text and for an empty range.
    """
    match = _LAYERS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is neither a number of layers (4) nor a range of layers (2-5)")
    chosen = range(int(match[1])) if match[2] is None else range(int(match[1]), int(match[2]) + 1)
    if len(chosen) == 0:
        raise ValueError(f"{text!r} names no layer at all")
    return chosen


class _Keys:
    """Typed access to the text configuration; every error names the key and the file."""

    def __init__(self, text: Mapping[str, Any], path: Path) -> None:
        self.text = text
        self.path = path

    def get(self, dotted: str) -> Any:
        """Return the value at a dotted key, None when it is missing or null."""
        value: Any = self.text
        for part in dotted.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return value

    def bad(self, key: str, problem: str) -> ConfigError:
        """Return the ConfigError for a key; `problem` continues the sentence."""
        return ConfigError(f"config key {key} {problem}", path=self.path, advice="Fetch config.json again")

    def need(self, key: str) -> Any:
        """Return the value at a dotted key. Raises ConfigError when it is missing or null."""
        value = self.get(key)
        if value is None:
            raise self.bad(key, "is missing")
        return value

    def count(self, key: str, least: int = 1) -> int:
        """Return a whole number of at least `least`. Raises ConfigError otherwise."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= COUNT_MAX:
            raise self.bad(key, f"is {shown(value)}, not a whole number of at least {least}")
        return value

    def real(self, key: str) -> float:
        """Return a finite number. Raises ConfigError otherwise."""
        value = self.need(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, f"is {shown(value)}, not a number")
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if not math.isfinite(number):
            raise self.bad(key, f"is {shown(value)}, not a number that a float can hold")
        return number

    def positive(self, key: str) -> float:
        """Return a finite number above zero. Raises ConfigError otherwise."""
        value = self.real(key)
        if value <= 0:
            raise self.bad(key, f"is {shown(value)}, not above zero")
        return value

    def flag(self, key: str) -> bool:
        """Return a truth value. Raises ConfigError otherwise."""
        value = self.need(key)
        if not isinstance(value, bool):
            raise self.bad(key, f"is {shown(value)}, neither true nor false")
        return value

    def layer_list(self, key: str) -> frozenset[int]:
        """Return a list of 1-based layer numbers as a set of 0-based ones. Raises ConfigError otherwise."""
        value = self.need(key)
        if not isinstance(value, list) or not all(type(item) is int and item >= 1 for item in value):
            raise self.bad(key, "is not a list of layer numbers from 1")
        if len(set(value)) != len(value):
            raise self.bad(key, "names a layer twice")
        return frozenset(item - 1 for item in value)

    def check_supported(self) -> None:
        """Raise UnsupportedError for a value that this engine has no code for."""
        for key, allowed in _REQUIRED_VALUES.items():
            self._refuse_unless(key, self.need(key), allowed)
        for key, allowed in _ABSENT_OR.items():
            value = self.get(key)
            if value is not None:
                self._refuse_unless(key, value, allowed)
        if self.count("num_key_value_heads") != self.count("num_attention_heads"):
            key = "num_key_value_heads"
            raise self.unsupported(key, self.get(key), "the number of num_attention_heads")

    def _refuse_unless(self, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
            only = " or ".join(repr(item) for item in allowed) or "the key absent"
            raise self.unsupported(key, value, only)

    def unsupported(self, key: str, value: Any, only: str) -> UnsupportedError:
        """Return the UnsupportedError for a key; `only` names the values that are supported."""
        return UnsupportedError(
            f"config key {key} is {shown(value)}, and this engine only computes {only}",
            path=self.path,
            advice="A model that needs it would give wrong text here; use a newer version of this program",
        )

    def unknown(self) -> tuple[str, ...]:
        """Return the keys that are not known and neither null nor false, sorted."""
        known = {*_SHAPE_KEYS, *_NEUTRAL_KEYS, *_REQUIRED_VALUES, *_ABSENT_OR}
        names = [key for key, value in self.text.items() if key not in known and value not in (None, False)]
        known_kda = {*_KDA_KEYS, *(key.partition(".")[2] for key in _REQUIRED_VALUES)}
        kda = self.text["linear_attn_config"]
        names += [f"linear_attn_config.{key}" for key in kda if key not in known_kda]
        return tuple(sorted(names))


def _build(keys: _Keys) -> ModelConfig:
    keys.check_supported()
    layer_count = keys.count("num_hidden_layers")
    layer_ids = range(layer_count)
    kda_layers = _kda_layers(keys, layer_count)
    first_moe, moe_every = keys.count("first_k_dense_replace", 0), keys.count("moe_layer_freq")
    residual_block = keys.count("attn_res_block_size")
    if -(-layer_count // residual_block) + 1 > MIX_ENTRIES_MAX:
        raise keys.unsupported("attn_res_block_size", residual_block, f"up to {MIX_ENTRIES_MAX - 1} blocks")
    top_k, experts = keys.count("num_experts_per_token"), keys.count("num_experts")
    if top_k > experts:
        raise keys.bad("num_experts_per_token", f"is {top_k}, more than the {experts} experts there are")
    for key in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if keys.count(key) % MX_GROUP:
            raise keys.unsupported(key, keys.get(key), f"multiples of {MX_GROUP}, the columns of an MXFP4 scale")
    return ModelConfig(
        vocab=keys.count("vocab_size"),
        hidden=keys.count("hidden_size"),
        layer_count=layer_count,
        dense_inner=keys.count("intermediate_size"),
        eps=keys.positive("rms_norm_eps"),
        situ_beta=keys.positive("activation_situ_beta"),
        situ_linear_beta=keys.positive("activation_situ_linear_beta"),
        residual_block=residual_block,
        kda=_kda(keys),
        mla=_mla(keys),
        moe=MoeConfig(
            experts=experts,
            top_k=top_k,
            latent=keys.count("routed_expert_hidden_size"),
            inner=keys.count("moe_intermediate_size"),
            shared_experts=keys.count("num_shared_experts", 0),
            renormalize=keys.flag("moe_renormalize"),
            scaling_factor=keys.positive("routed_scaling_factor"),
        ),
        kda_layers=kda_layers,
        moe_layers=frozenset(i for i in layer_ids if i >= first_moe and i % moe_every == 0),
        max_positions=keys.count("max_position_embeddings"),
        eos_ids=token_ids(keys.need("eos_token_id"), "eos_token_id", keys.path),
        layers=layer_ids,
        unknown_keys=keys.unknown(),
    )


def _kda(keys: _Keys) -> KdaConfig:
    bound = keys.real("linear_attn_config.gate_lower_bound")
    if bound >= 0:
        raise keys.bad("linear_attn_config.gate_lower_bound", f"is {shown(bound)}, not below zero")
    taps = keys.count("linear_attn_config.short_conv_kernel_size", 2)
    if taps > CONV_TAPS_MAX:
        raise keys.unsupported("linear_attn_config.short_conv_kernel_size", taps, f"up to {CONV_TAPS_MAX} taps")
    return KdaConfig(
        heads=keys.count("linear_attn_config.num_heads"),
        head_dim=keys.count("linear_attn_config.head_dim"),
        conv_taps=taps,
        gate_lower_bound=bound,
    )


def _mla(keys: _Keys) -> MlaConfig:
    return MlaConfig(
        heads=keys.count("num_attention_heads"),
        q_rank=keys.count("q_lora_rank"),
        latent=keys.count("kv_lora_rank"),
        nope=keys.count("qk_nope_head_dim"),
        rope=keys.count("qk_rope_head_dim"),
        value=keys.count("v_head_dim"),
    )


def _kda_layers(keys: _Keys, layer_count: int) -> frozenset[int]:
    """Return the 0-based KDA layers; the two lists together must name every layer once."""
    kda = keys.layer_list("linear_attn_config.kda_layers")
    full = keys.layer_list("linear_attn_config.full_attn_layers")
    for layer in range(layer_count):
        if (layer in kda) == (layer in full):
            where = "both of" if layer in kda else "neither of"
            raise keys.bad(
                "linear_attn_config",
                f"names layer {layer + 1} in {where} kda_layers and full_attn_layers",
            )
    beyond = [layer + 1 for layer in sorted(kda | full) if layer >= layer_count]
    if beyond:
        raise keys.bad("linear_attn_config", f"names layer {beyond[0]} of {layer_count}")
    return kda


def token_ids(value: Any, key: str, path: Path) -> tuple[int, ...]:
    """Return token ids given as one number or as a list of them. Raises ConfigError otherwise."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(type(item) is int and 0 <= item <= COUNT_MAX for item in items):
        raise ConfigError(
            f"config key {key} is {shown(value)}, not a token id", path=path, advice="Fetch the file again"
        )
    return tuple(items)
