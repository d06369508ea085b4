"""What must hold between config.json and the tensors of a snapshot, each as one small check.

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
"""No model has more layers or experts; a larger number is a damaged config.json."""

_READ_BYTES = 1 << 20


def count(config: Mapping[str, Any], key: str, path: Path) -> int | None:
    """A count from the text model's configuration, None where it has none. ConfigError when it is no count."""
    value = config.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise ConfigError(f"{key} is {shown(value)}, not a count", path=path, advice="Correct config.json")
    return value


def check_padding(file: RegularFile, tensor: SourceTensor, config: Mapping[str, Any]) -> None:
    """A_log has one number per head and may be longer, but only by zeros.

    SourceError when it is shorter, or when what follows the heads' numbers is not zero.
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
    """Every layer that config.json promises, or the caller chose, has tensors. SourceError otherwise.

    Yields a warning when there are layers that config.json does not know.
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
    """Every layer that should have routed experts, by config.json, has some. ExpertError otherwise."""
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
    """Two names of one dense tensor (with and without prefix), None when there are no such two."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(canonical_name(name), name)
        if other != name:
            return other, name
    return None


def odd_matrices(tensors: Iterable[SourceTensor]) -> Iterator[str]:
    """A warning for each known matrix that no recipe can change, so that it keeps its bytes."""
    for tensor in tensors:
        if is_matrix(tensor.name) and not is_quantizable(tensor.name, tensor.dtype, tensor.shape):
            yield f"{tensor.name} is {tensor.dtype} {tensor.shape} and is kept as it is"
