"""Attacks on the model itself: sound files that no engine could run, found before a byte is copied."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3.base.errors import ConfigError, ExpertError, SourceError
from tests.attacks.builders import (
    CONFIG,
    EXPERTS_1,
    LAYER_1,
    MODEL,
    NORM_1,
    ROUTER_1,
    SHARD,
    add,
    attack,
    drop,
    edit_json,
    reshard,
    shard_name,
)

HEADS = shard_name(MODEL.layers + 1)
LM_HEAD = "language_model.lm_head.weight"
Q_PROJ_1 = f"{LAYER_1}self_attn.q_proj.weight"
RANKS, NAMES, GENERATION = "tiktoken.model", "tokenizer_config.json", "generation_config.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2796204\n"


def _reformed(
    name: str, shard: str, dtype: str, shape: Callable[[list[int]], list[int]] = lambda shape: shape
) -> Callable[[Path], None]:
    """Give one tensor another dtype or shape, and as many zeros as that takes."""
    width = {"F64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "BF16": 2}.get(dtype, 1)

    def build(directory: Path) -> None:
        def change(tensors: list[tuple[str, str, list[int], bytes]]) -> None:
            for place, (other, _, old, _) in enumerate(tensors):
                if other == name:
                    new = shape(old)
                    tensors[place] = (name, dtype, new, bytes(width * math.prod(new)))

        reshard(directory, change, shard)

    return build


_MATRIX = "A matrix whose numbers no program reads as weights: it was copied, proven equal, and then not run."
for _name, _tensor, _shard, _dtype, _why in (
    ("head_f64", LM_HEAD, HEADS, "F64", _MATRIX),
    ("head_f8_e4m3", LM_HEAD, HEADS, "F8_E4M3", "Eight bits need scales, which no tensor here holds."),
    ("matrix_f8_e5m2", Q_PROJ_1, SHARD, "F8_E5M2", "Eight bits need scales, which no tensor here holds."),
    ("matrix_i8", Q_PROJ_1, SHARD, "I8", "Integers need scales, which no tensor here holds."),
    ("matrix_u8", Q_PROJ_1, SHARD, "U8", "Integers need scales, which no tensor here holds."),
    ("matrix_u16", Q_PROJ_1, SHARD, "U16", "As wide as bfloat16, and read as such by a careless program."),
    ("router_i16", ROUTER_1, SHARD, "I16", _MATRIX),
    ("router_bool", ROUTER_1, SHARD, "BOOL", _MATRIX),
    ("norm_f64", NORM_1, SHARD, "F64", "A vector is read as float32 too."),
    ("norm_u32", NORM_1, SHARD, "U32", "As wide as float32, and read as such by a careless program."),
):
    add(
        _name,
        _why,
        SourceError,
        f"its numbers are {_dtype}",
        _reformed(_tensor, _shard, _dtype),
        file=_shard,
        tensor=_tensor,
        stage="model",
    )

for _name, _tensor, _shard in (
    ("norm_missing", "language_model.model.norm.weight", HEADS),
    ("head_missing", LM_HEAD, HEADS),
    ("projection_missing", Q_PROJ_1, SHARD),
    ("router_missing", ROUTER_1, SHARD),
    ("embeddings_missing", "language_model.model.embed_tokens.weight", HEADS),
):

    def _without(directory: Path, tensor: str = _tensor, shard: str = _shard) -> None:
        reshard(directory, lambda tensors: drop(tensors, tensor), shard)

    _why = "Shard and index agree that there is no such tensor, and no token can be computed without it."
    _says = "missing from the model" if "embed" in _tensor else f"the model lacks tensor {_tensor}"
    add(_name, _why, SourceError, _says, _without, file=CONFIG, tensor=_tensor, stage="model")

for _name, _tensor, _shard, _shape in (
    ("router_of_fewer_experts", ROUTER_1, SHARD, lambda shape: [shape[0] - 1, shape[1]]),
    ("norm_of_another_width", NORM_1, SHARD, lambda shape: [shape[0] + 1]),
    ("matrix_transposed", f"{LAYER_1}self_attn.f_b_proj.weight", SHARD, lambda shape: [shape[1], shape[0]]),
    ("matrix_without_axes", Q_PROJ_1, SHARD, lambda shape: [math.prod(shape)]),
    ("head_of_another_vocabulary", LM_HEAD, HEADS, lambda shape: [shape[0] - 64, shape[1]]),
):
    add(
        _name,
        "A shape that does not follow from config.json: it belongs to another model.",
        SourceError,
        "does not fit the configuration",
        _reformed(_tensor, _shard, "BF16", _shape),
        file=_shard,
        tensor=_tensor,
        stage="model",
    )


def _all_experts(directory: Path, part: str, dtype: str, shape: list[int] | None = None) -> None:
    def change(tensors: list[tuple[str, str, list[int], bytes]]) -> None:
        for place, (name, _, old, data) in enumerate(tensors):
            if name.startswith(EXPERTS_1) and name.endswith(part):
                tensors[place] = (name, dtype, shape or old, data)

    reshard(directory, change)


@attack(
    ExpertError,
    "I8 [32, 1] where the configuration gives U8 or F8_E8M0 [32, 1]",
    tensor=f"{EXPERTS_1}0.w1.weight_scale",
    stage="model",
)
def scales_signed(directory: Path) -> None:
    """Scale bytes are exponents: as signed numbers they stand for others."""
    _all_experts(directory, "w1.weight_scale", "I8")


@attack(
    ExpertError,
    "U8 [16, 32] where the configuration gives U8 [32, 16]",
    tensor=f"{EXPERTS_1}0.w2.weight_packed",
    stage="model",
)
def experts_transposed(directory: Path) -> None:
    """All experts of a layer agree with each other and not with config.json."""
    _all_experts(directory, "w2.weight_packed", "U8", [16, 32])


@attack(ConfigError, "config key rms_norm_eps is missing", file=CONFIG, stage="model")
def config_without_epsilon(directory: Path) -> None:
    """A number that every layer needs, and that nobody can guess."""
    edit_json(directory / CONFIG, lambda config: config["text_config"].pop("rms_norm_eps"))


for _name, _key, _value, _says in (
    ("config_real_of_400_digits", "rms_norm_eps", 10**400, "not a number that a float can hold"),
    ("config_real_infinite", "activation_situ_beta", math.inf, "not a number that a float can hold"),
    ("config_real_is_text", "routed_scaling_factor", "1.0", "not a number"),
    ("config_extent_of_400_digits", "hidden_size", 10**400, "not a whole number"),
    ("config_more_used_than_there", "num_experts_per_token", 5, "more than the 4 experts there are"),
    ("config_eos_is_text", "eos_token_id", "[EOS]", "not a token id"),
):

    def _numbered(directory: Path, key: str = _key, value: Any = _value) -> None:
        def change(config: dict[str, Any]) -> None:
            config["text_config"][key] = value
            config.pop(key, None)

        edit_json(directory / CONFIG, change)

    _why = "A value from which nothing can be computed, found when the model is to be run."
    add(_name, _why, ConfigError, _says, _numbered, file=CONFIG, stage="model")


def _ranks(directory: Path) -> list[bytes]:
    return (directory / RANKS).read_bytes().splitlines(keepends=True)


for _name, _file, _content, _says, _why in (
    (
        "vocabulary_is_pointer",
        RANKS,
        lambda path: POINTER,
        "git-lfs pointer",
        "A clone without git-lfs: the first text prompt of the finished container would have shown it.",
    ),
    ("vocabulary_is_web_page", RANKS, lambda path: b"<!DOCTYPE html>", "web page", "A download without login."),
    ("vocabulary_empty", RANKS, lambda path: b"", "lacks single bytes", "A download that never began."),
    (
        "vocabulary_cut",
        RANKS,
        lambda path: b"".join(_ranks(path)[:-1]),
        "lacks single bytes",
        "A download that broke off between two lines.",
    ),
    (
        "vocabulary_of_another_model",
        RANKS,
        lambda path: b"".join(_ranks(path)) + base64.b64encode(b"ab") + b" 256\n",
        "do not make the model's vocabulary",
        "One piece more than config.json's vocabulary has: every special token moves.",
    ),
    (
        "vocabulary_not_base64",
        RANKS,
        lambda path: b"".join([*_ranks(path)[:9], b"!! 9\n", *_ranks(path)[10:]]),
        "line 10",
        "A line that is no piece.",
    ),
    ("special_names_are_pointer", NAMES, lambda path: POINTER, "git-lfs pointer", "A clone without git-lfs."),
    (
        "special_names_deep",
        NAMES,
        lambda path: b'{"a":' * 200_000,
        "nested too deeply",
        "Nested until the parser's stack ends.",
    ),
    (
        "special_name_reserved",
        NAMES,
        lambda path: _added({"300": "<|reserved_token_356|>"}),
        "two added tokens are called",
        "The name that the model's code gives to another id.",
    ),
    (
        "special_id_of_5000_digits",
        NAMES,
        lambda path: _added({"9" * 5000: "x"}),
        "is not a named id",
        "Python refuses to make a number of so many digits.",
    ),
    (
        "special_name_half_a_pair",
        NAMES,
        lambda path: _added({"300": "\ud800"}),
        "half of a surrogate pair",
        "A name that no UTF-8 text can hold.",
    ),
    (
        "special_name_twice",
        NAMES,
        lambda path: _added({"300": "x", "301": "x"}),
        "two added tokens",
        "One name of two ids.",
    ),
    (
        "generation_deep",
        GENERATION,
        lambda path: b"[" * 200_000,
        "nested too deeply",
        "Nested until the parser's stack ends.",
    ),
    (
        "generation_key_twice",
        GENERATION,
        lambda path: b'{"eos_token_id": 1, "eos_token_id": 2}',
        "twice",
        "Two answers to where a text ends.",
    ),
    (
        "generation_beyond_vocabulary",
        GENERATION,
        lambda path: b'{"eos_token_id": 999999999}',
        "outside the vocabulary",
        "A token that is never drawn: no text would end.",
    ),
    (
        "generation_is_pointer",
        GENERATION,
        lambda path: POINTER,
        "git-lfs pointer",
        "A clone without git-lfs.",
    ),
):

    def _written(directory: Path, file: str = _file, content: Callable[[Path], bytes] = _content) -> None:
        (directory / file).write_bytes(content(directory))

    add(_name, _why, ConfigError, _says, _written, file=_file, stage="model")


def _added(names: dict[str, str]) -> bytes:
    return json.dumps(
        {"added_tokens_decoder": {token: {"content": name} for token, name in names.items()}}
    ).encode()


@attack(SourceError, "allowed for this file", file=RANKS, stage="model")
def vocabulary_enormous(directory: Path) -> None:
    """Refused by its size, before it is read."""
    os.truncate(directory / RANKS, (64 << 20) + 1)
