"""What a run will hold in memory, from headers and configuration alone, before any weight is read.

`k3-run` and its `--plan` ask the same function, so what is printed is what is run, but for what a text's
vocabulary takes (up to 0.1 GB): a run that reads it beside the weights leaves that out of its cache. Pure; any
thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, get_args

from k3.base.memory_limit import Limit
from k3.container.reader import Container
from k3.engine.definition.settings import ModelSettings
from k3.engine.definition.state_size import scores_bytes, state_bytes
from k3.engine.launch.memory_need import CHUNK_COPIES, Need, check_fits
from k3.engine.launch.read_ahead import READ_AHEAD
from k3.model.architecture import ModelConfig
from k3.model.k3_tensors import AFTER_LAYERS, BEFORE_LAYERS, IN_LAYER, Use
from k3.model.keys import Encoding, layer_of, tensor_bytes
from k3.store.client.daemon_model import DaemonModel
from k3.store.local.fetch import buffer_bytes
from k3.store.local.file_source import WORKING_SLOTS

if TYPE_CHECKING:
    from k3.checkpoint.snapshot import Snapshot

AUTO_CACHE_SHARE = 0.8
"""Part of the memory left over that an expert cache of no given size takes; the rest is for the page cache."""

Source: TypeAlias = "Container | Snapshot | DaemonModel"

DENSE_PARTS: tuple[Use, ...] = get_args(Use)
"""What dense weights are for, in the order in which they are printed."""

_VECTORS: Use = "norms and other vectors"
_OUTSIDE = {tensor.name: tensor.use for tensor in (*BEFORE_LAYERS, *AFTER_LAYERS)}
_KDA = {tensor.name: tensor.use for tensor in IN_LAYER if tensor.layers != "mla"}
_MLA = {tensor.name: tensor.use for tensor in IN_LAYER if tensor.layers != "kda"}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The need of a run, the limit it has to keep to, and where the bytes go.

    `parts` is the need's `dense_bytes` by what they are for; `cached_experts` are how many the cache holds, of
    `experts` in all; `prefetch` are those that may be read on a guess.
    """

    need: Need
    limit: Limit
    parts: Mapping[str, int]
    capacity: int
    slot_bytes: int
    experts: int
    expert_bytes: int  # of the largest
    prefetch: int

    @property
    def cache_bytes(self) -> int:
        """What the run's own expert cache gets."""
        return self.need.cache_bytes

    @property
    def cached_experts(self) -> int:
        """Experts that the run's own cache holds once it is full."""
        return min(self.experts, self.cache_bytes // self.slot_bytes) if self.slot_bytes else 0

    @property
    def fits(self) -> bool:
        """Whether the need keeps to the limit."""
        return self.need.total_bytes <= self.limit.free_bytes

    def check(self) -> None:
        """UnsupportedError with all numbers when the need exceeds the limit."""
        check_fits(self.need, self.limit)


def plan_memory(
    source: Source,
    config: ModelConfig,
    names: Sequence[str],
    settings: ModelSettings,
    limit: Limit,
    *,
    capacity: int,
    chunk: int,
    every_logit: bool,
) -> MemoryPlan:
    """What a run of `capacity` tokens needs that reads the dense tensors `names`.

    Unless the settings say how many, as many experts as a token uses may be read on a guess, so long as this
    process reads experts at all, and does not come to have all of them in memory.
    """
    layers = [layer for layer in config.layers if layer in config.moe_layers]
    own_cache = settings.store is None or settings.fallback == "file"  # else the daemon has it
    slot_bytes = max((buffer_bytes(source.expert_layout(layer)) for layer in layers), default=0)
    prefetch = settings.prefetch
    if prefetch is None:
        prefetch = config.moe.top_k if layers and settings.store is None else 0
    parts: dict[str, int] = dict.fromkeys(DENSE_PARTS, 0)
    for name in names:
        parts[dense_part(name, config)] += dense_bytes(source, name) + widened_bytes(source, name, config)
    need = Need(
        dense_bytes=sum(parts.values()),
        load_bytes=sum(sorted(source_bytes(source, name) for name in names)[-READ_AHEAD:]),
        state_bytes=state_bytes(config, capacity),
        activation_bytes=activation_bytes(config, min(chunk, capacity), every_logit=every_logit)
        + scores_bytes(config, capacity, min(chunk, capacity)),
        working_bytes=slot_bytes * (WORKING_SLOTS + prefetch) if layers and own_cache else 0,
        cache_bytes=settings.expert_bytes or 0,
    )
    experts = sum(source.expert_count(layer) for layer in layers)
    if settings.expert_bytes is None and settings.store is None:
        left_bytes = max(0, limit.free_bytes - need.total_bytes)
        need = replace(need, cache_bytes=int(min(slot_bytes * experts, left_bytes * AUTO_CACHE_SHARE)))
    if settings.prefetch is None and need.cache_bytes >= slot_bytes * experts:
        need, prefetch = replace(need, working_bytes=need.working_bytes - slot_bytes * prefetch), 0
    largest_bytes = max((source.expert_layout(layer).payload_bytes for layer in layers), default=0)
    return MemoryPlan(need, limit, parts, capacity, slot_bytes, experts, largest_bytes, prefetch)


def dense_part(name: str, config: ModelConfig) -> Use:
    """Which of `DENSE_PARTS` a dense tensor belongs to."""
    _, _, rest = name.rpartition("language_model.")
    layer = layer_of(rest)
    if layer is None:
        return _OUTSIDE[rest]
    inner = rest.removeprefix(f"model.layers.{layer}.")
    return (_KDA if layer in config.kda_layers else _MLA)[inner]


def dense_bytes(source: Source, name: str) -> int:
    """Memory that a dense tensor takes as the engine holds it, without reading it. None for a daemon's: shared."""
    if isinstance(source, DaemonModel):
        return 0
    if isinstance(source, Container):
        entry = source.tensor(name)
        return entry.weights.stored_bytes + (0 if entry.scales is None else entry.scales.stored_bytes)
    tensor, encoding = source.tensors[name], source.encoding(name)
    if encoding is Encoding.RAW:
        return tensor.nbytes
    rows, columns = tensor.shape
    if encoding is Encoding.INT8:
        return rows * (columns + 4)
    if encoding is Encoding.INT4:
        return rows * (-(-columns // 2) + 4 * -(-columns // 64))
    return 4 * rows * columns


def touched_bytes(source: Source, name: str) -> int:
    """Memory of a dense tensor whoever holds it: also what a daemon shares."""
    if not isinstance(source, DaemonModel):
        return dense_bytes(source, name)
    tensor = source.tensor(name)
    return tensor.weights.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)


def widened_bytes(source: Source, name: str, config: ModelConfig) -> int:
    """Memory of the float32 copy that is made of a vector stored in bfloat16 or float16, on top of `dense_bytes`.

    Of a snapshot only the copy stays, so the stored form is taken off.
    """
    if dense_part(name, config) != _VECTORS:
        return 0
    dtype, shape = dtype_and_shape(source, name)
    if dtype == "F32":
        return 0
    return (4 if isinstance(source, Container | DaemonModel) else 2) * math.prod(shape)


def dtype_and_shape(source: Source, name: str) -> tuple[str, tuple[int, ...]]:
    """What a dense tensor is in the source that the model was published in."""
    entry = source.tensor(name) if isinstance(source, Container | DaemonModel) else source.tensors[name]
    return entry.dtype, entry.shape


def source_bytes(source: Source, name: str) -> int:
    """Bytes of a dense tensor in its source's own dtype: what quantizing it at load starts from. None for a
    container's, which are read straight to their places."""
    if isinstance(source, Container | DaemonModel):
        return 0
    tensor = source.tensors[name]
    return tensor_bytes(tensor.dtype, tensor.shape)


def activation_bytes(config: ModelConfig, chunk: int, *, every_logit: bool) -> int:
    """About what a pass over `chunk` tokens holds at once besides weights and state."""
    moe, mla, kda = config.moe, config.mla, config.kda
    widest = max(
        2 * config.dense_inner,
        2 * moe.shared_experts * moe.inner,
        moe.top_k * moe.latent,
        mla.heads * (mla.latent + mla.rope + mla.value),
        5 * kda.width,
    )
    blocks = -(-config.layer_count // config.residual_block)
    per_token = CHUNK_COPIES * widest + (blocks + CHUNK_COPIES) * config.hidden
    rows = chunk if every_logit else 1
    return 4 * (chunk * per_token + 2 * rows * config.vocab)
