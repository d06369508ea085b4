"""Checks of a snapshot's tensors against config.json, one function each.

Functions without state, called while a snapshot is opened, by one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from k3.base.errors import ConfigError, ExpertError, SourceError
from k3.base.regular_file import RegularFile
from k3.base.safe_text import shown
from k3.checkpoint.shard import SourceTensor
from k3.model.tensor_recipe import canonical_name, is_matrix, is_quantizable

COUNT_MAX = 1 << 20
"""Largest number of layers or experts that is accepted; a larger one is a damaged config.json."""

_READ_BYTES = 1 << 20


def count(config: Mapping[str, Any], key: str, path: Path) -> int | None:
    """Return a count of the text model's configuration, None where it has none.

    Raises ConfigError for a value that is not a whole number from 0 to COUNT_MAX.
    """
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise ConfigError(f"{key} is {shown(value)}, not a count", path=path, advice="Correct config.json")
    return value


def check_padding(file: RegularFile, tensor: SourceTensor, config: Mapping[str, Any]) -> None:
    """Check that A_log has one number per head, and only zeros after them.

    Raises SourceError when it is shorter, or when its padding is not zero.
    """
    if not tensor.name.endswith(".self_attn.A_log") or len(tensor.shape) != 1:
        return
    linear = config.get("linear_attn_config")
    heads = linear.get("num_heads") if isinstance(linear, Mapping) else None
    if type(heads) is not int:
        return
    numbers = tensor.shape[0]
    if not 0 < heads <= numbers:
        raise SourceError(
            f"there are {numbers} numbers for {shown(heads)} heads",
            path=file.path,
            tensor=tensor.name,
            offset=tensor.offset,
            advice="config.json or the shard belongs to another model",
        )
    for offset in range(tensor.offset + tensor.nbytes // numbers * heads, tensor.end, _READ_BYTES):
        padding = file.read(offset, min(_READ_BYTES, tensor.end - offset))
        if any(padding):
            raise SourceError(
                f"the padding behind the {heads} heads is not zero",
                path=file.path,
                tensor=tensor.name,
                offset=offset + len(padding) - len(padding.lstrip(b"\0")),
                advice="The number of heads in config.json is wrong, or the shard is damaged",
            )


def check_layers(
    present: Collection[int], chosen: Collection[int] | None, config: Mapping[str, Any], path: Path
) -> Iterator[str]:
    """Check that every layer that config.json names, or the caller chose, has tensors.

    Yields a warning when there are layers beyond config.json's number. Raises SourceError for a layer without
    tensors.
    """
    promised = count(config, "num_hidden_layers", path)
    expected = range(promised or 0) if chosen is None else chosen
    for layer in sorted(set(expected) - set(present)):
        raise SourceError(
            "the layer has no tensors" if chosen is None else "there is no such layer to choose",
            path=path,
            layer=layer,
            advice=f"The shards hold the layers {shown(sorted(present))}"
            if chosen is None or promised is None
            else f"The model has the layers 0 to {promised - 1}",
        )
    extra = sorted(layer for layer in present if promised is not None and layer >= promised)
    if extra:
        yield f"layers {shown(extra)} are beyond the {promised} of {path}"


def check_expert_layers(
    present: Collection[int], with_experts: Collection[int], config: Mapping[str, Any], path: Path
) -> None:
    """Raise ExpertError for a layer that has no routed experts although config.json says that it has some."""
    experts = count(config, "num_experts", path)
    first, every = count(config, "first_k_dense_replace", path), count(config, "moe_layer_freq", path)
    if not experts or first is None or not every:
        return
    for layer in sorted(present):
        if layer >= first and layer % every == 0 and layer not in with_experts:
            raise ExpertError(
                f"the layer has none of its {experts} experts",
                path=path,
                layer=layer,
                advice="Fetch the shards and the index again",
            )


def same_tensor_twice(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two names of one dense tensor (with and without prefix), None when there are no such two."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(canonical_name(name), name)
        if other != name:
            return other, name
    return None


def odd_matrices(tensors: Iterable[SourceTensor]) -> Iterator[str]:
    """Yield a warning for each known matrix that no recipe can change, so that it keeps its bytes."""
    for tensor in tensors:
        if is_matrix(tensor.name) and not is_quantizable(tensor.name, tensor.dtype, tensor.shape):
            yield f"{tensor.name} is {tensor.dtype} {tensor.shape} and is kept as it is"
