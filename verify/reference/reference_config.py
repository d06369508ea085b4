"""The numbers of config.json that the reference model computes with, checked.

An immutable value; any thread. Settings that K3 fixes and that would need other code are refused instead of
ignored: a model that is not K3 must not run as if it were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3.base.errors import ConfigError, UnsupportedError
from k3.base.safe_text import shown
from k3.model.model_config import text_config
from k3.model.model_source import ModelSource

MLA_LATENT_NORM_EPS = 1e-6
"""Epsilon of q_a_layernorm and kv_a_layernorm.

Moonshot's modelling code constructs these two norms without an epsilon, so they have the class's default and
not rms_norm_eps (1e-5). Some engines use 1e-5, perhaps also one that Moonshot serves with.
"""

L2_NORM_EPS = 1e-6
"""Epsilon under the root of the length of KDA's queries and keys."""

MIX_EPS = 1e-5
"""Epsilon of the norm inside the Attention Residual scores, whatever rms_norm_eps says."""

_FIXED: dict[str, Any] = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "tie_word_embeddings": False,
    "linear_attn_config.use_full_rank_gate": True,
}
"""Settings for which there is only one answer that this model can compute."""


@dataclass(frozen=True, slots=True)
class ReferenceConfig:
    """The shape of the network. Layers count from 0 here, while config.json's lists count from 1."""

    layers: int
    rms_norm_eps: float
    mla_latent_norm_eps: float
    residual_block: int  # layers per Attention Residual block

    kda_layers: frozenset[int]
    kda_heads: int
    kda_head: int
    conv_taps: int
    gate_lower_bound: float

    heads: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int

    first_moe_layer: int
    moe_layer_freq: int
    experts_per_token: int
    renormalize: bool
    routed_scaling: float
    situ_beta: float
    situ_linear_beta: float

    @classmethod
    def of(
        cls,
        source: ModelSource,
        *,
        mla_latent_norm_eps: float = MLA_LATENT_NORM_EPS,
        layers: int | None = None,
    ) -> ReferenceConfig:
        """Read the configuration of `source`; with `layers`, of a model cut off after that many.

        ConfigError when a key is missing or contradicts another, UnsupportedError for what K3 does not do.
        """
        keys = _Keys(source)
        for name, answer in _FIXED.items():
            keys.demand(name, answer)
        if 1 < keys.number("num_expert_group") > keys.number("topk_group"):
            raise UnsupportedError("experts are chosen by groups (num_expert_group > topk_group)", path=keys.path)

        present = int(keys.number("num_hidden_layers"))
        count = present if layers is None else layers
        if not 1 <= count <= present:
            raise UnsupportedError(f"asked for {count} layers of a model of {present}", path=keys.path)
        return cls(
            layers=count,
            rms_norm_eps=keys.number("rms_norm_eps"),
            mla_latent_norm_eps=mla_latent_norm_eps,
            residual_block=int(keys.number("attn_res_block_size")),
            kda_layers=_kda_layers(keys, present),
            kda_heads=int(keys.number("linear_attn_config.num_heads")),
            kda_head=int(keys.number("linear_attn_config.head_dim")),
            conv_taps=int(keys.number("linear_attn_config.short_conv_kernel_size")),
            gate_lower_bound=keys.number("linear_attn_config.gate_lower_bound"),
            heads=int(keys.number("num_attention_heads")),
            kv_lora=int(keys.number("kv_lora_rank")),
            qk_nope=int(keys.number("qk_nope_head_dim")),
            qk_rope=int(keys.number("qk_rope_head_dim")),
            v_head=int(keys.number("v_head_dim")),
            first_moe_layer=int(keys.number("first_k_dense_replace")),
            moe_layer_freq=int(keys.number("moe_layer_freq")),
            experts_per_token=int(keys.number("num_experts_per_token")),
            renormalize=bool(keys.value("moe_renormalize")),
            routed_scaling=keys.number("routed_scaling_factor"),
            situ_beta=keys.number("activation_situ_beta"),
            situ_linear_beta=keys.number("activation_situ_linear_beta"),
        )

    def is_kda(self, layer: int) -> bool:
        """Return whether a layer's attention is linear (KDA) and not full (MLA)."""
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer has routed experts and not one dense MLP."""
        return layer >= self.first_moe_layer and layer % self.moe_layer_freq == 0


class _Keys:
    """Keys of the text model's configuration; a dot steps into a table."""

    def __init__(self, source: ModelSource) -> None:
        self.path = source.text_file("config.json") or Path("config.json")
        self._text = text_config(source.config, self.path)

    def value(self, name: str) -> Any:
        found: Any = self._text
        for step in name.split("."):
            if not isinstance(found, Mapping) or step not in found:
                raise ConfigError(f"the key {name} is missing", path=self.path)
            found = found[step]
        return found

    def number(self, name: str) -> float:
        found = self.value(name)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ConfigError(f"{name} is {shown(found)}, not a number", path=self.path)
        return found

    def demand(self, name: str, answer: object) -> None:
        found = self.value(name)
        if found != answer:
            raise UnsupportedError(f"{name} is {shown(found)}; only {answer!r} is known", path=self.path)


def _kda_layers(keys: _Keys, count: int) -> frozenset[int]:
    """0-based KDA layers; ConfigError unless the two lists share out all layers."""
    kda = keys.value("linear_attn_config.kda_layers")
    full = keys.value("linear_attn_config.full_attn_layers")
    if sorted([*kda, *full]) != list(range(1, count + 1)):
        raise ConfigError(
            f"kda_layers and full_attn_layers do not name each of {count} layers once", path=keys.path
        )
    return frozenset(number - 1 for number in kda)
