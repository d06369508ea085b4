"""Attacks on what the tensors mean: experts, padded parameters, names, weights."""

from __future__ import annotations

from pathlib import Path

from k3.base.errors import ExpertError, QuantizeError, SourceError
from tests.attacks.builders import (
    A_LOG_1,
    CONFIG,
    EXPERTS_1,
    LAYER_1,
    NORM_1,
    SHARD,
    attack,
    drop,
    offset_of,
    replace,
    reshard,
)


@attack(ExpertError, "the expert is missing; the layer has 3 of 4", tensor=f"{EXPERTS_1}2")
def expert_missing(directory: Path) -> None:
    """Index and shard agree, but one expert is not there: found now, not when it is routed to."""
    reshard(directory, lambda tensors: drop(tensors, f"{EXPERTS_1}2."))


@attack(ExpertError, "5 of 6 tensors; w2.weight_scale is missing", tensor=f"{EXPERTS_1}3.w2.weight_scale")
def expert_tensor_missing(directory: Path) -> None:
    """One scale of one expert is not there; a warning and zeros would change tokens in silence."""
    reshard(directory, lambda tensors: drop(tensors, f"{EXPERTS_1}3.w2.weight_scale"))


@attack(ExpertError, "that the others do not have, w9.bias", tensor=f"{EXPERTS_1}1.w9.bias")
def expert_tensor_extra(directory: Path) -> None:
    """One expert has a tensor more than its neighbours: it is computed in another way, or damaged."""
    reshard(directory, lambda tensors: tensors.append((f"{EXPERTS_1}1.w9.bias", "U8", [4], bytes(4))))


@attack(ExpertError, "but U8 (32, 16) in most experts", tensor=f"{EXPERTS_1}0.w1.weight_packed")
def expert_shape_odd(directory: Path) -> None:
    """One expert of another shape with as many bytes: read like its neighbours it is nonsense."""
    name = f"{EXPERTS_1}0.w1.weight_packed"
    reshard(directory, lambda tensors: replace(tensors, name, name, "U8", [16, 32], bytes(512)))


@attack(ExpertError, "the tensor is I8 (32, 16), but U8 (32, 16)", tensor=f"{EXPERTS_1}0.w1.weight_packed")
def expert_dtype_odd(directory: Path) -> None:
    """One expert of another dtype."""
    name = f"{EXPERTS_1}0.w1.weight_packed"
    reshard(directory, lambda tensors: replace(tensors, name, name, "I8", [32, 16], bytes(512)))


@attack(ExpertError, "not a plain expert number", tensor=f"{EXPERTS_1}02.w9")
def expert_number_padded(directory: Path) -> None:
    """02 and 2 are one number and two names."""
    reshard(directory, lambda tensors: tensors.append((f"{EXPERTS_1}02.w9", "U8", [4], bytes(4))))


@attack(ExpertError, "not a plain expert number", tensor=f"{EXPERTS_1}٣.w9")
def expert_number_arabic(directory: Path) -> None:
    """Digits of another alphabet are digits for many programs."""
    reshard(directory, lambda tensors: tensors.append((f"{EXPERTS_1}٣.w9", "U8", [4], bytes(4))))


@attack(ExpertError, "not a plain expert number below", tensor=f"{EXPERTS_1}{10**30}.w9")
def expert_number_enormous(directory: Path) -> None:
    """A table sized by the largest number would take all memory."""
    reshard(directory, lambda tensors: tensors.append((f"{EXPERTS_1}{10**30}.w9", "U8", [4], bytes(4))))


@attack(ExpertError, "two groups of experts", tensor="model.layers.1.mlp.experts.0.w1")
def two_groups_of_experts(directory: Path) -> None:
    """Experts of one layer under two prefixes: a reader would mix them by their numbers."""
    extra = ("model.layers.1.mlp.experts.0.w1", "U8", [4], bytes(4))
    reshard(directory, lambda tensors: tensors.append(extra))


@attack(ExpertError, "none of its 4 experts", file=CONFIG)
def layer_without_experts(directory: Path) -> None:
    """All experts of one layer are gone from shard and index alike."""
    reshard(directory, lambda tensors: drop(tensors, EXPERTS_1))


@attack(SourceError, "the padding behind the 2 heads is not zero", tensor=A_LOG_1, offset=True)
def padding_in_use(directory: Path) -> None:
    """A number where only padding should be: the head count is wrong, or the bytes are."""
    at = offset_of(directory, A_LOG_1) + 4 * 100 + 3
    with (directory / SHARD).open("r+b") as file:
        file.seek(at)
        file.write(b"\x01")


@attack(SourceError, "is the same tensor as", tensor=True)
def tensor_with_and_without_prefix(directory: Path) -> None:
    """One tensor under both of its spellings, with other bytes."""
    other = (NORM_1.removeprefix("language_model."), "BF16", [32], bytes(64))
    reshard(directory, lambda tensors: tensors.append(other))


def _poison(directory: Path, tensor: str, place: int, bits: bytes) -> None:
    at = offset_of(directory, tensor) + 2 * place
    with (directory / SHARD).open("r+b") as file:
        file.seek(at)
        file.write(bits)


@attack(
    QuantizeError, "row 1, column 3 is nan", tensor=f"{LAYER_1}self_attn.q_proj.weight", offset=True, stage="read"
)
def weight_not_a_number(directory: Path) -> None:
    """One NaN makes the scale of its row NaN, and every token after it."""
    _poison(directory, f"{LAYER_1}self_attn.q_proj.weight", 32 + 3, b"\xc0\x7f")


@attack(
    QuantizeError,
    "row 0, column 31 is -inf",
    tensor=f"{LAYER_1}self_attn.o_proj.weight",
    offset=True,
    stage="read",
)
def weight_infinite(directory: Path) -> None:
    """An infinite weight flattens its row to zeros when it is quantized."""
    _poison(directory, f"{LAYER_1}self_attn.o_proj.weight", 31, b"\x80\xff")
