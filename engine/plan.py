"""What a run will hold in memory, from headers and configuration alone, before any weight is read.

`k3-run` and its `--plan` ask the same function, so what is printed is what is run. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from k3.container.keys import Encoding, tensor_bytes
from k3.container.memory_limit import Limit
from k3.container.reader import Container
from k3.container.snapshot import Snapshot
from k3.engine.budget import CHUNK_COPIES, Need, check_fits
from k3.engine.config import ModelConfig
from k3.engine.reading import READ_AHEAD
from k3.engine.settings import ModelSettings
from k3.engine.state import state_bytes
from k3.store.daemon_model import DaemonModel
from k3.store.fetch import buffer_bytes
from k3.store.file import WORKING_SLOTS

AUTO_CACHE_SHARE = 0.8
"""Part of the memory left over that an expert cache of no given size takes; the rest is for the page cache."""

Source: TypeAlias = Container | Snapshot | DaemonModel


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The need of a run, the limit it has to keep to, and the bytes that its expert cache gets."""

    need: Need
    limit: Limit
    cache_bytes: int

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
    """What a run of `capacity` tokens needs that reads the dense tensors `names`."""
    layers = [layer for layer in config.layers if layer in config.moe_layers]
    own_cache = settings.store is None or settings.fallback == "file"  # else the daemon has it
    slot_bytes = max((buffer_bytes(source.expert_layout(layer)) for layer in layers), default=0)
    need = Need(
        dense_bytes=sum(dense_bytes(source, name) for name in names),
        load_bytes=sum(sorted(source_bytes(source, name) for name in names)[-READ_AHEAD:]),
        state_bytes=state_bytes(config, capacity),
        activation_bytes=activation_bytes(config, min(chunk, capacity), every_logit=every_logit),
        working_bytes=slot_bytes * WORKING_SLOTS if layers and own_cache else 0,
        cache_bytes=settings.expert_bytes or 0,
    )
    if settings.expert_bytes is not None or settings.store is not None:
        return MemoryPlan(need, limit, settings.expert_bytes or 0)
    all_bytes = slot_bytes * sum(source.expert_count(layer) for layer in layers)
    left_bytes = limit.free_bytes - need.total_bytes
    return MemoryPlan(need, limit, int(min(all_bytes, max(0, left_bytes) * AUTO_CACHE_SHARE)))


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


def source_bytes(source: Source, name: str) -> int:
    """Bytes of a dense tensor in its source's own dtype: what quantizing it at load starts from."""
    if isinstance(source, Container | DaemonModel):
        return dense_bytes(source, name)
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
