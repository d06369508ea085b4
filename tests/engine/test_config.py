"""Holds up that every configuration key that changes a result is read, or refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from k3.base.errors import ConfigError, UnsupportedError
from k3.model.architecture import ModelConfig, parse_layers
from tests.support.engines import VECTORS

PATH = Path("config.json")
RAW = json.loads((VECTORS / "tiny_s0" / "config.json").read_text())


def with_key(dotted: str, value: Any) -> dict[str, Any]:
    """Return the golden configuration with one key of the text model changed, or removed for `...`."""
    raw: dict[str, Any] = copy.deepcopy(RAW)
    *tables, key = dotted.split(".")
    table = raw["text_config"]
    for name in tables:
        table = table[name]
    if value is ...:
        del table[key]
        raw.pop(key, None)
    else:
        table[key] = value
        if not tables and key in raw:
            raw[key] = value
    return raw


def test_golden_shape() -> None:
    config = ModelConfig.from_raw(RAW, PATH)
    assert (config.hidden, config.vocab, config.layer_count, config.residual_block) == (128, 512, 5, 2)
    assert config.kda_layers == {0, 1, 2}
    assert config.moe_layers == {1, 2, 3, 4}
    assert (config.moe.experts, config.moe.top_k, config.kda.heads, config.mla.heads) == (16, 4, 4, 6)
    assert config.mla.scale == pytest.approx(48**-0.5)
    assert (config.mla.eps, config.eps, config.eos_ids) == (1e-6, 1e-5, (258,))
    assert config.unknown_keys == ()


def test_flat_config_is_the_same() -> None:
    assert ModelConfig.from_raw(RAW["text_config"], PATH) == ModelConfig.from_raw(RAW, PATH)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("model_type", "kimi_k4"),
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("linear_attn_config.use_full_rank_gate", False),
        ("moe_router_activation_func", "softmax"),
        ("latent_moe_use_norm", False),
        ("num_expert_group", 8),
        ("topk_method", "greedy"),
        ("tie_word_embeddings", True),
        ("num_nextn_predict_layers", 1),
        ("rope_scaling", {"type": "yarn"}),
        ("rope_theta", 10000.0),
        ("sliding_window", 4096),
        ("num_key_value_heads", 2),
        ("quantization_config.format", "nvfp4-pack-quantized"),
        ("linear_attn_config.short_conv_kernel_size", 17),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=key.replace(".", r"\.")):
        ModelConfig.from_raw(with_key(key, value), PATH)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", ...),
        ("hidden_size", "128"),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("nan")),
        ("activation_situ_beta", ...),
        ("attn_res_block_size", 0),
        ("linear_attn_config.gate_lower_bound", ...),
        ("linear_attn_config.gate_lower_bound", 5.0),
        ("linear_attn_config.kda_layers", [1, 2]),
        ("linear_attn_config.kda_layers", [1, 2, 3, 4]),
        ("linear_attn_config.kda_layers", [1, 2, 3, 9]),
        ("linear_attn_config.kda_layers", [1, 2, 3, 3]),
        ("linear_attn_config.kda_layers", "all"),
        ("moe_renormalize", 1),
        ("num_experts_per_token", 17),
        ("eos_token_id", -1),
    ],
)
def test_contradictions_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key.split(".")[0]):
        ModelConfig.from_raw(with_key(key, value), PATH)


def test_too_many_blocks_are_refused() -> None:
    raw = with_key("num_hidden_layers", 64)
    raw["text_config"]["linear_attn_config"] |= {"kda_layers": list(range(1, 65)), "full_attn_layers": []}
    raw["text_config"]["attn_res_block_size"] = 1
    with pytest.raises(UnsupportedError, match="attn_res_block_size"):
        ModelConfig.from_raw(raw, PATH)


def test_unknown_keys_are_collected() -> None:
    raw = with_key("attn_logit_softcapping", 30.0)
    raw["text_config"]["linear_attn_config"]["gate_rank"] = 4
    raw["text_config"]["harmless_null"] = None
    config = ModelConfig.from_raw(raw, PATH)
    assert config.unknown_keys == ("attn_logit_softcapping", "linear_attn_config.gate_rank")


@pytest.mark.parametrize(("text", "layers"), [("4", range(4)), (" 2-4 ", range(2, 5)), ("0-0", range(1))])
def test_layers(text: str, layers: range) -> None:
    assert parse_layers(text) == layers
    assert ModelConfig.from_raw(RAW, PATH).truncated(text).layers == layers


@pytest.mark.parametrize("text", ["", "0", "x", "-1", "3-2", "1,2", "1-", "2-5", "6"])
def test_layers_that_do_not_exist(text: str) -> None:
    with pytest.raises(ValueError, match="layer"):
        ModelConfig.from_raw(RAW, PATH).truncated(text)
