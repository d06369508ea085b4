"""Which tensors a synthetic snapshot has, in which shard and in which order they lie.

Pure: from a `SyntheticModel` to one `ShardPlan` after the other, so that the plan of the full model (497,220
tensors) never has to be in memory at once. Any thread.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from k3.verify.synthetic.shape import A_LOG_MULTIPLE, MXFP4_GROUP, SyntheticModel

ELEMENT_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
"""Also the storage order of dtypes in a shard: widest first."""


@dataclass(frozen=True, slots=True)
class Fill:
    """The distribution of a tensor's values: a kind that `synthetic_values` knows, and its numbers."""

    kind: str
    spread: float = 0.0
    centre: float = 0.0


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the snapshot and how to fill it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def nbytes(self) -> int:
        """Bytes in the shard."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One safetensors file: its name and its tensors in storage order."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def data_bytes(self) -> int:
        """Bytes after the header."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def header(self) -> bytes:
        """Return the file's first bytes: length, compact JSON without metadata, spaces up to a multiple of 8."""
        entries = []
        end = 0
        for tensor in self.tensors:
            start, end = end, end + tensor.nbytes
            shape = ",".join(map(str, tensor.shape))
            entries.append(
                f'{json.dumps(tensor.name)}:{{"dtype":"{tensor.dtype}","shape":[{shape}],'
                f'"data_offsets":[{start},{end}]}}'
            )
        text = f"{{{','.join(entries)}}}".encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True, slots=True)
class Census:
    """The tensors of one kind, and their elements. Of experts, `elements` counts packed and scale bytes."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0

    def plus(self, tensor: TensorSpec) -> Census:
        """Return this count with one more tensor."""
        return Census(self.tensors + 1, self.elements + math.prod(tensor.shape), self.nbytes + tensor.nbytes)


def census(model: SyntheticModel) -> dict[str, Census]:
    """Return counts for "routed" experts, "resident" text tensors and "vision", without writing anything."""
    counts = {"routed": Census(), "resident": Census(), "vision": Census()}
    for shard in shard_plans(model):
        for tensor in shard.tensors:
            if not tensor.name.startswith(model.prefix + "model.") and "lm_head" not in tensor.name:
                kind = "vision"
            else:
                kind = "routed" if ".experts." in tensor.name else "resident"
            counts[kind] = counts[kind].plus(tensor)
    return counts


def shard_plans(model: SyntheticModel) -> Iterator[ShardPlan]:
    """Return the shards in published order: decoder layers, embeddings and head, projector, vision tower."""
    pieces = model.shards_per_layer
    total = model.layers * pieces + (3 if model.vision else 1)

    def named(number: int, tensors: list[TensorSpec]) -> ShardPlan:
        name = f"model-{number:05d}-of-{total:06d}.safetensors"
        if model.shard_names == "odd":
            name = f"weights_{zlib.crc32(name.encode()):08x}.v2.safetensors"
        return ShardPlan(name, tuple(tensors))

    number = 0
    for layer in range(model.layers):
        tensors = _in_storage_order(model, layer_tensors(model, layer))
        cuts = [len(tensors) * piece // pieces for piece in range(pieces + 1)]
        for start, end in itertools.pairwise(cuts):
            number += 1
            yield named(number, tensors[start:end])
    rest = [_head_tensors(model)]
    if model.vision:
        rest += [_projector_tensors(model), _tower_tensors(model)]
    for tensors in rest:
        number += 1
        yield named(number, _in_storage_order(model, tensors))


def layer_tensors(model: SyntheticModel, layer: int) -> list[TensorSpec]:
    """Return the tensors of one decoder layer (0-based) in the order in which they are used."""
    place = f"{model.prefix}model.layers.{layer}."
    hidden = model.hidden
    attention = _kda_tensors if layer + 1 in model.kda_layers else _mla_tensors
    mlp = _dense_mlp_tensors if layer < model.dense_layers else _moe_tensors
    return [
        *_mix_tensors(place + "self_attention_res", hidden),
        _norm(place + "input_layernorm", hidden),
        *attention(model, place + "self_attn."),
        *_mix_tensors(place + "mlp_res", hidden),
        _norm(place + "post_attention_layernorm", hidden),
        *mlp(model, place),
    ]


def _linear(name: str, rows: int, columns: int, gain: float = 1.0) -> TensorSpec:
    """Return a matrix that turns unit-variance input into output of standard deviation `gain`."""
    return TensorSpec(f"{name}.weight", "BF16", (rows, columns), Fill("normal", gain / math.sqrt(columns)))


def _norm(name: str, width: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(f"{name}.weight", dtype, (width,), Fill("normal", 0.2, 1.0))


def _mix_tensors(place: str, hidden: int) -> list[TensorSpec]:
    return [_norm(place + "_norm", hidden), _linear(place + "_proj", 1, hidden)]


def _kda_tensors(model: SyntheticModel, place: str) -> list[TensorSpec]:
    hidden, head, heads = model.hidden, model.kda_head, model.kda_heads
    width = heads * head
    padded_heads = -(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE if model.a_log_padded else heads
    tensors = []
    for letter in "qkv":
        tensors.append(_linear(f"{place}{letter}_proj", width, hidden))
        tensors.append(TensorSpec(f"{place}{letter}_conv1d.weight", "F32", (width, 1, 4), Fill("conv", 0.4)))
    return [
        *tensors,
        _linear(place + "f_a_proj", head, hidden),
        _linear(place + "f_b_proj", width, head),
        # exp(A_log) (f + dt_bias) near -3.5 lets a head remember for a few tokens up to a few hundred
        TensorSpec(place + "dt_bias", "F32", (width,), Fill("normal", 1.5, -3.5)),
        TensorSpec(place + "A_log", "F32", (padded_heads,), Fill("a_log", 0.5, heads)),
        _linear(place + "b_proj", heads, hidden),
        _norm(place + "o_norm", head, "F32"),
        _linear(place + "g_proj", width, hidden),
        _linear(place + "o_proj", hidden, width, 1.5),
    ]


def _mla_tensors(model: SyntheticModel, place: str) -> list[TensorSpec]:
    hidden, heads = model.hidden, model.heads
    return [
        _linear(place + "q_a_proj", model.q_lora, hidden),
        _norm(place + "q_a_layernorm", model.q_lora),
        _linear(place + "q_b_proj", heads * (model.qk_nope + model.qk_rope), model.q_lora, 1.5),
        _linear(place + "kv_a_proj_with_mqa", model.kv_lora + model.qk_rope, hidden),
        _norm(place + "kv_a_layernorm", model.kv_lora),
        _linear(place + "kv_b_proj", heads * (model.qk_nope + model.v_head), model.kv_lora, 1.5),
        _linear(place + "g_proj", heads * model.v_head, hidden),
        _linear(place + "o_proj", hidden, heads * model.v_head, 1.5),
    ]


def _glu_tensors(place: str, hidden: int, inner: int) -> list[TensorSpec]:
    return [
        _linear(place + "gate_proj", inner, hidden, 1.25),
        _linear(place + "up_proj", inner, hidden),
        _linear(place + "down_proj", hidden, inner, 1.5),
    ]


def _dense_mlp_tensors(model: SyntheticModel, place: str) -> list[TensorSpec]:
    return _glu_tensors(place + "mlp.", model.hidden, model.dense_inter)


def _moe_tensors(model: SyntheticModel, place: str) -> list[TensorSpec]:
    place += "block_sparse_moe."
    hidden, latent = model.hidden, model.latent
    tensors = [
        _linear(place + "gate", model.experts, hidden, 1.25),
        TensorSpec(place + "gate.e_score_correction_bias", "F32", (model.experts,), Fill("normal", 0.08)),
        _linear(place + "routed_expert_down_proj", latent, hidden),
        _linear(place + "routed_expert_up_proj", hidden, latent),
        _norm(place + "routed_expert_norm", latent),
        *_glu_tensors(place + "shared_experts.", hidden, model.shared_experts * model.moe_inter),
    ]
    parts = [
        (f"{part}.{what}", shape, fill)
        for part, rows, columns in _expert_matrices(model)
        for what, shape, fill in (
            ("weight_packed", (rows, columns // 2), Fill("nibbles")),
            ("weight_scale", (rows, columns // MXFP4_GROUP), Fill("scales", 1.0 / math.sqrt(columns))),
        )
    ]
    for expert in range(model.experts):
        start = f"{place}experts.{expert}."
        tensors += [TensorSpec(start + name, "U8", shape, fill) for name, shape, fill in parts]
    return tensors


def _expert_matrices(model: SyntheticModel) -> tuple[tuple[str, int, int], ...]:
    inner, latent = model.moe_inter, model.latent
    return (("w1", inner, latent), ("w2", latent, inner), ("w3", inner, latent))


def _head_tensors(model: SyntheticModel) -> list[TensorSpec]:
    place = model.prefix + "model."
    embedding = TensorSpec(place + "embed_tokens.weight", "BF16", (model.vocab, model.hidden), Fill("normal", 1.0))
    return [
        embedding,
        *_mix_tensors(place + "output_attn_res", model.hidden),
        _norm(place + "norm", model.hidden),
        _linear(model.prefix + "lm_head", model.vocab, model.hidden, 2.0),
    ]


def _projector_tensors(model: SyntheticModel) -> list[TensorSpec]:
    merged = 4 * model.vision_shape.hidden
    return [
        _linear("mm_projector.proj.0", merged, merged),
        _linear("mm_projector.proj.2", model.hidden, merged),
        _norm("mm_projector.post_norm", model.hidden),
    ]


def _tower_tensors(model: SyntheticModel) -> list[TensorSpec]:
    shape = model.vision_shape
    small = Fill("normal", 0.02)
    embed = "vision_tower.patch_embed."
    kernel = (shape.hidden, 3, shape.patch, shape.patch)
    grid = (shape.positions, shape.positions, shape.hidden)
    tensors = [
        TensorSpec(embed + "proj.weight", "BF16", kernel, small),
        TensorSpec(embed + "pos_emb.weight", "BF16", grid, small),
    ]
    for block in range(shape.blocks):
        place = f"vision_tower.encoder.blocks.{block}."
        tensors += [
            _norm(place + "norm0", shape.hidden),
            _linear(place + "wqkv", 3 * shape.qkv, shape.hidden),
            _linear(place + "wo", shape.hidden, shape.qkv),
            _norm(place + "norm1", shape.hidden),
            _linear(place + "mlp.fc0", shape.inter, shape.hidden),
            _linear(place + "mlp.fc1", shape.hidden, shape.inter),
        ]
    return [*tensors, _norm("vision_tower.encoder.final_layernorm", shape.hidden)]


def _in_storage_order(model: SyntheticModel, tensors: list[TensorSpec]) -> list[TensorSpec]:
    """Wide dtypes first, then by name: experts in *string* order of ids unless the model says otherwise."""

    def key(tensor: TensorSpec) -> tuple[int, object, str]:
        return -ELEMENT_BYTES[tensor.dtype], _expert_place(model, tensor.name), tensor.name

    return sorted(tensors, key=key)


def _expert_place(model: SyntheticModel, name: str) -> str:
    """Return what expert tensors are sorted by before their names; equal for all that stay together."""
    block, found, rest = name.partition(".experts.")
    if not found or model.expert_order == "lexicographic":
        return ""
    expert = rest.partition(".")[0]
    if model.expert_order == "id":
        return expert.zfill(9)
    drawn = name if model.expert_order == "scattered" else f"{block}.{expert}"
    return hashlib.blake2b(f"{model.seed} {drawn}".encode(), digest_size=8).hexdigest()
