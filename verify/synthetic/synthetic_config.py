"""The JSON files of a synthetic snapshot: config.json with every published key, and generation_config.json.

Pure functions from a `SyntheticModel` to the bytes of a file; any thread. The published config is what
transformers writes: its own generation and task defaults mixed alphabetically with the model's keys. Both
groups are kept apart here and sorted together. With the published dimensions the result has the published
size to the byte.
"""

from __future__ import annotations

import json
from typing import Any

from k3.verify.synthetic.shape import MXFP4_GROUP, SyntheticModel

END_OF_MESSAGE = 2
MEDIA_PAD = 21
PAD = 255
"""Places among the special ids, counted from the first; BOS is the first."""

_UNSET = (
    "bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size", "decoder_start_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "prefix", "problem_type", "sep_token_id", "suppress_tokens", "task_specific_params", "tokenizer_class",
)  # fmt: skip
_OFF = (
    "add_cross_attention", "do_sample", "early_stopping", "is_decoder", "is_encoder_decoder",
    "output_attentions", "output_hidden_states", "output_scores", "remove_invalid_values",
    "return_dict_in_generate", "tf_legacy_loss", "tie_encoder_decoder", "tie_word_embeddings",
    "torchscript", "use_bfloat16",
)  # fmt: skip
_ZERO = ("chunk_size_feed_forward", "encoder_no_repeat_ngram_size", "min_length", "no_repeat_ngram_size")
_ONE = ("num_beam_groups", "num_beams", "num_return_sequences")
_ONE_POINT = ("length_penalty", "repetition_penalty", "temperature", "top_p", "typical_p")

_TRANSFORMERS_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_UNSET),
    **dict.fromkeys(_OFF, False),
    **dict.fromkeys(_ZERO, 0),
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys(_ONE_POINT, 1.0),
    "_name_or_path": "",
    "diversity_penalty": 0.0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "max_length": 20,
    "pruned_heads": {},
    "return_dict": True,
    "top_k": 50,
    "transformers_version": "4.56.2",
    "use_cache": True,
}


def config(model: SyntheticModel) -> dict[str, Any]:
    """config.json as an object: nested in the multimodal model's config, or flat if the model asks for it."""
    text = _text_config(model)
    if model.flat_config:
        return text
    auto_class = "modeling_kimi_k3.KimiK3ForConditionalGeneration"
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": auto_class,
            "AutoModelForCausalLM": auto_class,
        },
        "bos_token_id": model.first_special,
        "dtype": "bfloat16",
        "eos_token_id": model.first_special + END_OF_MESSAGE,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": model.first_special + MEDIA_PAD,
        "model_type": "kimi_k3",
        "pad_token_id": model.first_special + PAD,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": _vision_config(model),
    }


def generation_config(model: SyntheticModel) -> dict[str, Any]:
    """generation_config.json as an object."""
    return {"max_length": 1048576, "eos_token_id": model.first_special + END_OF_MESSAGE}


def json_bytes(value: object) -> bytes:
    """Return a JSON file as published: two spaces of indent, no newline at the end."""
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


def _text_config(model: SyntheticModel) -> dict[str, Any]:
    keys = {
        **_TRANSFORMERS_DEFAULTS,
        **_identity_keys(model),
        **_attention_keys(model),
        **_mlp_keys(model),
        "quantization_config": _quantization_config(),
    }
    return dict(sorted(keys.items()))


def _identity_keys(model: SyntheticModel) -> dict[str, Any]:
    module = "modeling_kimi_linear"
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
            "AutoModel": f"{module}.KimiLinearModel",
            "AutoModelForCausalLM": f"{module}.KimiLinearForCausalLM",
        },
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "attn_res_block_size": model.res_block,
        "bos_token_id": model.first_special,
        "eos_token_id": model.first_special + END_OF_MESSAGE,
        "pad_token_id": model.first_special + PAD,
    }


def _attention_keys(model: SyntheticModel) -> dict[str, Any]:
    return {
        "linear_attn_config": {
            "full_attn_layers": list(model.full_attention_layers),
            "gate_lower_bound": -5.0,
            "head_dim": model.kda_head,
            "kda_layers": list(model.kda_layers),
            "num_heads": model.kda_heads,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "q_lora_rank": model.q_lora,
        "kv_lora_rank": model.kv_lora,
        "qk_nope_head_dim": model.qk_nope,
        "qk_rope_head_dim": model.qk_rope,
        "v_head_dim": model.v_head,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
    }


def _mlp_keys(model: SyntheticModel) -> dict[str, Any]:
    return {
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "intermediate_size": model.dense_inter,
        "first_k_dense_replace": model.dense_layers,
        "moe_layer_freq": 1,
        "num_experts": model.experts,
        model.experts_per_token_key: model.experts_per_token,
        "num_shared_experts": model.shared_experts,
        "moe_intermediate_size": model.moe_inter,
        "routed_expert_hidden_size": model.latent,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": model.routed_scaling,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
    }


def _quantization_config() -> dict[str, Any]:
    packing = "mxfp4-pack-quantized"
    unset = dict.fromkeys(("actorder", "block_structure", "zp_dtype"))
    weights = unset | {
        "type": "float",
        "num_bits": 4,
        "strategy": "group",
        "group_size": MXFP4_GROUP,
        "scale_dtype": "torch.uint8",
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {
        "format": packing,
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": dict(sorted(weights.items())),
    }
    unquantized = ("self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj", "lm_head")
    return {
        "config_groups": {"group_0": group},
        "format": packing,
        "global_compression_ratio": None,
        "ignore": [f"re:.*{name}.*" for name in (*unquantized, "vision_tower", "mm_projector")],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _vision_config(model: SyntheticModel) -> dict[str, Any]:
    shape = model.vision_shape
    keys = {
        "_attn_implementation": "flash_attention_2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "linear_bias": False,
        "norm_type": "rmsnorm",
        "patch_size": shape.patch,
        "patch_embed_proj_bias": False,
        "init_pos_emb_height": shape.positions,
        "init_pos_emb_width": shape.positions,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "vt_hidden_size": shape.hidden,
        "vt_intermediate_size": shape.inter,
        "vt_num_attention_heads": shape.heads,
        "vt_num_hidden_layers": shape.blocks,
        "qkv_hidden_size": shape.qkv,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": shape.hidden,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": model.hidden,
    }
    return dict(sorted(keys.items()))
