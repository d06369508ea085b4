"""The tensors that a configuration requires, compared with those of a model: names, shapes and dtypes.

A missing tensor is an error, and so is an unknown one, since a model with more tensors computes something else.
Checked before any weights are read: by the engine, and by the repacker through `model_check`. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from k3.base.errors import ExpertError, SourceError, UnsupportedError
from k3.model.architecture import ModelConfig
from k3.model.k3_tensors import (
    AFTER_LAYERS,
    BEFORE_LAYERS,
    EXPERT_DTYPES,
    EXPERT_MATRICES,
    IN_LAYER,
    MX_GROUP,
    PREFIX,
    REAL_DTYPES,
    KnownTensor,
    Use,
)
from k3.model.keys import ExpertLayout, ExpertPart, layer_of

Shape = tuple[int, ...]

ALL_TEXT_PREFIXES = (PREFIX, "")
"""Possible prefixes of the text model's names: inside the multimodal checkpoint, and alone."""

_LISTED = 5  # names shown in an error before "and N more"

_OUTSIDE_USES = {tensor.name: tensor.use for tensor in (*BEFORE_LAYERS, *AFTER_LAYERS)}
_KDA_USES = {tensor.name: tensor.use for tensor in IN_LAYER if tensor.layers != "mla"}
_MLA_USES = {tensor.name: tensor.use for tensor in IN_LAYER if tensor.layers != "kda"}


def text_prefix(names: Iterable[str], path: Path | None = None) -> str:
    """Return the prefix of the text model's tensor names. Raises SourceError when there are no embeddings."""
    present = set(names)
    for prefix in ALL_TEXT_PREFIXES:
        if f"{prefix}model.embed_tokens.weight" in present:
            return prefix
    raise SourceError(
        "tensor is missing from the model",
        path=path,
        tensor="language_model.model.embed_tokens.weight",
        advice="Fetch the shards and the index again",
    )


def check_shape(name: str, shape: Sequence[int], expected: Shape, path: Path | None = None) -> None:
    """Raise SourceError unless the shapes are equal; A_log may be padded beyond its heads."""
    fits = tuple(shape) == expected
    if name.endswith(".A_log"):
        fits = len(shape) == 1 and shape[0] >= expected[0]
    if not fits:
        raise SourceError(
            f"shape {list(shape)} does not fit the configuration, which gives {list(expected)}",
            path=path,
            tensor=name,
            advice="config.json or the shard belongs to another model",
        )


def check_dtype(name: str, dtype: str, path: Path | None = None) -> None:
    """Raise SourceError unless a dense tensor has one of `REAL_DTYPES`."""
    if dtype not in REAL_DTYPES:
        raise SourceError(
            f"its numbers are {dtype}, and weights of this kind are read as {' or '.join(REAL_DTYPES)}",
            path=path,
            tensor=name,
            advice="Name the published snapshot, or convert the tensor to one of these",
        )


def check_tensors(tensors: Mapping[str, tuple[str, Sequence[int]]], config: ModelConfig) -> None:
    """Raise SourceError for the first needed tensor, by full name, whose (dtype, shape) does not fit `config`."""
    prefix = text_prefix(tensors)
    expected = expected_tensors(config, config.layers)
    for name, (dtype, shape) in tensors.items():
        check_dtype(name, dtype)
        check_shape(name, shape, expected[name.removeprefix(prefix)])


def expected_tensors(config: ModelConfig, layers: Iterable[int]) -> dict[str, Shape]:
    """Return every dense tensor of these layers and of the model around them: name without prefix -> shape."""
    dimensions = _dimensions(config)
    shapes = {tensor.name: _shape(tensor, dimensions) for tensor in (*BEFORE_LAYERS, *AFTER_LAYERS)}
    for layer in layers:
        kinds = _layer_kinds(layer, config)
        for tensor in IN_LAYER:
            if tensor.layers in kinds:
                shapes[f"model.layers.{layer}.{tensor.name}"] = _shape(tensor, dimensions)
    return shapes


def _layer_kinds(layer: int, config: ModelConfig) -> set[str]:
    """Return the values of `KnownTensor.layers` that apply to a layer."""
    kinds = {"all", "kda" if layer in config.kda_layers else "mla"}
    if layer not in config.moe_layers:
        return kinds | {"dense"}
    return kinds | ({"moe", "shared"} if config.moe.shared_experts else {"moe"})


def _shape(tensor: KnownTensor, dimensions: Mapping[str, int]) -> Shape:
    return tuple(dimensions[name] for name in tensor.dimensions)


def _dimensions(config: ModelConfig) -> dict[str, int]:
    """Return the extents that shapes are made of, by the names in the table of tensors."""
    kda, mla, moe = config.kda, config.mla, config.moe
    return {
        "one": 1,
        "vocab": config.vocab,
        "hidden": config.hidden,
        "dense_inner": config.dense_inner,
        "kda_width": kda.width,
        "kda_heads": kda.heads,
        "kda_head": kda.head_dim,
        "conv_taps": kda.conv_taps,
        "q_rank": mla.q_rank,
        "mla_queries": mla.heads * (mla.nope + mla.rope),
        "kv_latent": mla.latent,
        "kv_latent_rope": mla.latent + mla.rope,
        "mla_keys_values": mla.heads * (mla.nope + mla.value),
        "mla_values": mla.heads * mla.value,
        "experts": moe.experts,
        "moe_latent": moe.latent,
        "shared_inner": moe.shared_experts * moe.inner,
    }


def tensor_use(name: str, config: ModelConfig) -> Use:
    """Return the purpose of a dense tensor of the model. Raises KeyError for one that K3 does not have."""
    plain = name.removeprefix(PREFIX)
    layer = layer_of(plain)
    if layer is None:
        return _OUTSIDE_USES[plain]
    uses = _KDA_USES if layer in config.kda_layers else _MLA_USES
    return uses[plain.removeprefix(f"model.layers.{layer}.")]


def needed_names(names: Iterable[str], config: ModelConfig) -> list[str]:
    """Return the full names of the tensors that a run of `config.layers` reads, in the order of `names`.

    `names` are all dense tensors of a source. Compares names only. Raises SourceError for missing tensors,
    UnsupportedError for tensors that the whole model does not have by its configuration.
    """
    names = list(names)
    unknown = unknown_names(names, config)
    if unknown:
        raise UnsupportedError(
            f"this engine does not know {listing(unknown)}",
            tensor=min(unknown),
            advice="The model is a later revision or not a Kimi K3; leaving tensors out would change its text",
        )
    return present_names(names, config, config.layers)


def unknown_names(names: Sequence[str], config: ModelConfig) -> list[str]:
    """Return those of a source's dense tensors that the whole model does not have by its configuration."""
    prefix = text_prefix(names)
    known = expected_tensors(config, range(config.layer_count))
    return [name for name in names if name.removeprefix(prefix) not in known or not name.startswith(prefix)]


def present_names(
    names: Sequence[str], config: ModelConfig, layers: Iterable[int], path: Path | None = None
) -> list[str]:
    """Return the full names of the dense tensors of `layers` and of the model around them, ordered as `names`.

    Raises SourceError when any is missing.
    """
    prefix = text_prefix(names, path)
    needed = {prefix + name for name in expected_tensors(config, layers)}
    missing = sorted(needed - set(names))
    if missing:
        found = sorted({layer for name in missing if (layer := layer_of(name)) is not None})
        raise SourceError(
            f"the model lacks {listing(missing)}",
            path=path,
            tensor=missing[0],
            layer=found[0] if found else None,
            advice="If only some layers were repacked or downloaded, run just those with --layers",
        )
    return [name for name in names if name in needed]


def listing(names: Sequence[str]) -> str:
    """Return the first few names in order, and the number of the others."""
    shown = ", ".join(sorted(names)[:_LISTED])
    more = len(names) - _LISTED
    plural = "tensor" if len(names) == 1 else "tensors"
    return f"{plural} {shown}" + (f" and {more} more" if more > 0 else "")


def check_expert_layers(layers: Iterable[int], config: ModelConfig) -> None:
    """Raise UnsupportedError for routed experts in a layer that has none by the configuration."""
    extra = sorted(set(layers) - config.moe_layers)
    if extra:
        raise UnsupportedError(
            "the layer has routed experts, and by the configuration it has none",
            layer=extra[0],
            advice="The model is a later revision or not a Kimi K3; leaving tensors out would change its text",
        )


def check_experts(layout: ExpertLayout, config: ModelConfig, layer: int, path: Path | None = None) -> None:
    """Check the parts of a layer's experts against the configuration.

    Raises UnsupportedError for experts of other parts than MXFP4's, ExpertError for a dtype or shape that does not
    follow from the configuration.
    """
    wanted = expected_parts(config)
    names = [part.name for part in layout.parts]
    if sorted(names) != sorted(wanted):
        raise UnsupportedError(
            f"experts are made of {', '.join(names)}; this engine computes with {', '.join(wanted)}", layer=layer
        )
    for part in layout.parts:
        _check_part(part, wanted[part.name], layout, layer, path)


def expected_parts(config: ModelConfig) -> dict[str, Shape]:
    """Return the tensors of one expert: name -> shape."""
    latent, inner = config.moe.latent, config.moe.inner
    shapes = dict(zip(EXPERT_MATRICES, ((inner, latent), (latent, inner), (inner, latent)), strict=True))
    parts: dict[str, Shape] = {}
    for matrix, (rows, columns) in shapes.items():
        parts[f"{matrix}.weight_packed"] = (rows, columns // 2)
        parts[f"{matrix}.weight_scale"] = (rows, columns // MX_GROUP)
    return parts


def _check_part(part: ExpertPart, shape: Shape, layout: ExpertLayout, layer: int, path: Path | None) -> None:
    dtypes = EXPERT_DTYPES[part.name.rpartition("_")[2]]
    if part.shape != shape or part.dtype not in dtypes:
        raise ExpertError(
            f"expert tensor is {part.dtype} {list(part.shape)} where the configuration gives "
            f"{' or '.join(dtypes)} {list(shape)}",
            path=path,
            tensor=f"{layout.prefix}.0.{part.name}",
            layer=layer,
            advice="config.json or the shard belongs to another model",
        )
