"""Holds up the recipe: every K3 tensor is known, stored in the bits that were asked for, and read in order."""

from __future__ import annotations

import random

import pytest

from k3.model.keys import Encoding, is_vision, parse_expert_name
from k3.model.tensor_recipe import (
    Recipe,
    canonical_name,
    execution_order,
    is_known,
    is_matrix,
    is_quantizable,
    mla_layers,
)
from k3.verify.synthetic.snapshot_writer import SyntheticModel, TensorSpec, shard_plans

K3 = SyntheticModel.k3(experts=16)
TENSORS: dict[str, TensorSpec] = {
    tensor.name: tensor
    for plan in shard_plans(K3)
    for tensor in plan.tensors
    if parse_expert_name(tensor.name) is None and not is_vision(tensor.name)
}
LAYER = "language_model.model.layers.{}."


def encoding(recipe: Recipe, name: str, mla: bool = False) -> Encoding:
    return recipe.encoding(name, "BF16", (64, 64), mla)


def test_every_dense_tensor_of_k3_is_known_with_and_without_prefix() -> None:
    assert len(TENSORS) == 2460
    for name in TENSORS:
        assert is_known(name)
        assert is_known(name.removeprefix("language_model."))


def test_the_quantizable_matrices_are_the_published_sizes() -> None:
    elements = {
        name: tensor.shape[0] * tensor.shape[1]
        for name, tensor in TENSORS.items()
        if is_quantizable(name, tensor.dtype, tensor.shape)
    }
    assert sum(elements.values()) == 54_743_531_520
    not_in = ("gate.weight", "f_a_proj", "f_b_proj", ".b_proj", "res_proj", "norm", "embed_tokens", "conv1d")
    assert not [name for name in elements if any(part in name for part in not_in)]
    per_kind = {LAYER.format(0): 8, LAYER.format(1): 10, LAYER.format(3): 11}
    for prefix, count in per_kind.items():
        assert sum(name.startswith(prefix) for name in elements) == count
    assert len(elements) == 8 + 68 * 10 + 24 * 11 + 1


@pytest.mark.parametrize(
    ("bits", "stored"), [(4, Encoding.INT4), (8, Encoding.INT8), (16, Encoding.RAW), (32, Encoding.F32)]
)
def test_each_number_of_bits_reaches_its_own_matrices_only(bits: int, stored: Encoding) -> None:
    attention = LAYER.format(3) + "self_attn.o_proj.weight"
    shared = LAYER.format(3) + "block_sparse_moe.shared_experts.up_proj.weight"
    head = "language_model.lm_head.weight"
    other = Recipe(bits=8 if bits != 8 else 4).bits
    rest = Encoding.INT8 if bits != 8 else Encoding.INT4
    plain = Recipe(bits=bits, mla_bits=other, head_bits=other)
    assert encoding(plain, attention) is stored  # a KDA layer's
    assert encoding(plain, shared, mla=True) is stored
    assert encoding(plain, attention, mla=True) is rest
    assert encoding(plain, head) is rest
    mla = Recipe(bits=other, mla_bits=bits, head_bits=other)
    assert encoding(mla, attention, mla=True) is stored
    assert encoding(mla, attention) is rest
    assert encoding(mla, shared, mla=True) is rest
    last = Recipe(bits=other, mla_bits=other, head_bits=bits)
    assert encoding(last, head) is stored
    assert encoding(last, head.removeprefix("language_model.")) is stored
    assert encoding(last, attention, mla=True) is rest


def test_what_is_no_matrix_keeps_its_bytes() -> None:
    recipe = Recipe(bits=4, mla_bits=4, head_bits=4)
    for name, tensor in TENSORS.items():
        stored = recipe.encoding(name, tensor.dtype, tensor.shape, False)
        assert (stored is Encoding.INT4) == is_quantizable(name, tensor.dtype, tensor.shape)
        assert stored in (Encoding.INT4, Encoding.RAW)
    unknown = LAYER.format(0) + "self_attn.z_proj.weight"
    assert encoding(recipe, unknown) is Encoding.RAW
    assert not is_known(unknown)
    for name in (
        "self_attn.q_proj.weight",
        "other.layers.3.self_attn.q_proj.weight",
        "vision_tower.lm_head.weight",
    ):
        assert encoding(recipe, name) is Encoding.RAW
        assert not is_known(name)


def test_a_known_matrix_in_an_unexpected_form_keeps_its_bytes() -> None:
    name = LAYER.format(0) + "mlp.up_proj.weight"
    recipe = Recipe(bits=32)
    assert is_matrix(name)
    assert recipe.encoding(name, "BF16", (4, 4), False) is Encoding.F32
    assert recipe.encoding(name, "F16", (4, 4), False) is Encoding.F32
    assert recipe.encoding(name, "F32", (4, 4), False) is Encoding.RAW
    for dtype, shape in (("F64", (4, 4)), ("U8", (4, 4)), ("BF16", (4, 4, 1)), ("BF16", (16,)), ("BF16", (0, 4))):
        assert recipe.encoding(name, dtype, shape, False) is Encoding.RAW
        assert Recipe(bits=4).encoding(name, dtype, shape, False) is Encoding.RAW


@pytest.mark.parametrize("wrong", [0, 5, 64, -8, True, 8.0, "8", None])
@pytest.mark.parametrize("field", ["bits", "mla_bits", "head_bits"])
def test_other_bits_are_refused(field: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=f"{field} is .*; it can be 4, 8, 16, 32"):
        Recipe(**{field: wrong})  # type: ignore[arg-type]


def test_full_attention_layers_are_told_by_their_tensors() -> None:
    expected = {number - 1 for number in K3.full_attention_layers}
    assert mla_layers(TENSORS) == expected
    assert mla_layers(name.removeprefix("language_model.") for name in TENSORS) == expected
    assert mla_layers(["vision_tower.layers.3.self_attn.kv_b_proj.weight"]) == frozenset()


def test_execution_order_is_that_of_the_forward_pass() -> None:
    names = list(TENSORS)
    random.Random(3).shuffle(names)
    order = execution_order(names)
    assert sorted(order) == sorted(TENSORS)
    assert order[0] == "language_model.model.embed_tokens.weight"
    assert [name.removeprefix("language_model.") for name in order[-4:]] == [
        "model.output_attn_res_norm.weight",
        "model.output_attn_res_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    layers = [int(name.split(".")[3]) for name in order[1:-4]]
    assert layers == sorted(layers)
    within = [name.removeprefix(LAYER.format(3)) for name in order if name.startswith(LAYER.format(3))]
    assert within == [
        "self_attention_res_norm.weight",
        "self_attention_res_proj.weight",
        "input_layernorm.weight",
        "self_attn.q_a_proj.weight",
        "self_attn.q_a_layernorm.weight",
        "self_attn.q_b_proj.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.kv_a_layernorm.weight",
        "self_attn.kv_b_proj.weight",
        "self_attn.g_proj.weight",
        "self_attn.o_proj.weight",
        "mlp_res_norm.weight",
        "mlp_res_proj.weight",
        "post_attention_layernorm.weight",
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.gate.e_score_correction_bias",
        "block_sparse_moe.routed_expert_down_proj.weight",
        "block_sparse_moe.routed_expert_norm.weight",
        "block_sparse_moe.routed_expert_up_proj.weight",
        "block_sparse_moe.shared_experts.gate_proj.weight",
        "block_sparse_moe.shared_experts.up_proj.weight",
        "block_sparse_moe.shared_experts.down_proj.weight",
    ]


def test_unknown_tensors_come_at_the_end_of_their_layer_or_of_all_by_name() -> None:
    names = [
        "zebra",
        "model.layers.10.b_extra",
        "model.layers.10.a_extra",
        "model.layers.10.mlp.down_proj.weight",
        "model.layers.9.mlp.up_proj.weight",
        "lm_head.weight",
        "aardvark",
    ]
    expected = ["model.layers.9.mlp.up_proj.weight", "model.layers.10.mlp.down_proj.weight"]
    expected += ["model.layers.10.a_extra", "model.layers.10.b_extra", "lm_head.weight", "aardvark", "zebra"]
    assert execution_order(names) == expected


def test_two_spellings_of_one_tensor_have_one_canonical_name() -> None:
    same = {"language_model.model.layers.3.mlp_res_norm.weight", "model.layers.03.mlp_res_norm.weight"}
    assert {canonical_name(name) for name in same} == {"model.layers.3.mlp_res_norm.weight"}
    assert canonical_name("language_model.lm_head.weight") == "lm_head.weight"
