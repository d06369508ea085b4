"""The memory that a run will take, from headers and configuration alone, before any weight is read.

`k3-run` and its `--plan` call the same function, so that a run takes what was printed. One difference remains: a
run on text leaves room for the vocabulary (0.1 GB), which it reads beside the weights. Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from k3.base.memory_limit import Limit
from k3.engine.definition.settings import ModelSettings
from k3.engine.definition.state_size import scores_bytes, state_bytes
from k3.engine.launch.memory_need import CHUNK_COPIES, Need, check_fits
from k3.engine.launch.model_files import OpenedModel
from k3.model.architecture import ModelConfig
from k3.model.k3_tensors import Use
from k3.model.model_source import DenseInfo
from k3.model.tensor_names import tensor_use
from k3.store.lending.file_source import WORKING_SLOTS
from k3.store.protocol.plane_sizes import slot_bytes_for

AUTO_CACHE_SHARE = 0.8
"""Part of the free memory that an expert cache takes if no size is given; the page cache has the rest."""

DENSE_PARTS: tuple[Use, ...] = get_args(Use)
"""Purposes of dense weights, in the order in which they are printed."""

_VECTORS: Use = "norms and other vectors"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory that a run needs, its limit, and the use of each byte.

    `parts` is the need's `dense_bytes` by purpose, `experts` the number of experts in all layers that are run,
    `prefetch` the number of them that look-ahead may read before a layer asks.
    """

    need: Need
    limit: Limit
    parts: Mapping[str, int]
    capacity: int
    slot_bytes: int
    experts: int
    expert_bytes: int  # of the largest expert
    prefetch: int

    @property
    def cache_bytes(self) -> int:
        """Bytes of the run's own expert cache."""
        return self.need.cache_bytes

    @property
    def cached_experts(self) -> int:
        """Experts that the run's own cache holds when it is full."""
        return min(self.experts, self.cache_bytes // self.slot_bytes) if self.slot_bytes else 0

    @property
    def fits(self) -> bool:
        """True when the need does not exceed the limit."""
        return self.need.total_bytes <= self.limit.free_bytes

    def check(self) -> None:
        """Raise UnsupportedError, with all numbers, when the need exceeds the limit."""
        check_fits(self.need, self.limit)


def plan_memory(
    opened: OpenedModel, settings: ModelSettings, limit: Limit, *, capacity: int, chunk: int, every_logit: bool
) -> MemoryPlan:
    """Return the memory that a run of `capacity` tokens needs, which takes prompts in `chunk` tokens at a time.

    `every_logit` asks for the logits of all prompt tokens. If the settings give no number, look-ahead may read as
    many experts as a token uses; none where a daemon reads them, or where the cache holds all of them.
    """
    source, config = opened.source, opened.config
    layers = [layer for layer in config.layers if layer in config.moe_layers]
    own_cache = settings.store is None or settings.fallback == "file"  # otherwise the daemon has the only one
    slot_bytes = max((slot_bytes_for(source.expert_layout(layer).payload_bytes) for layer in layers), default=0)
    prefetch = settings.prefetch
    if prefetch is None:
        prefetch = config.moe.top_k if layers and settings.store is None else 0
    parts: dict[str, int] = dict.fromkeys(DENSE_PARTS, 0)
    for name in opened.names:
        use = tensor_use(name, config)
        parts[use] += held_bytes(source.dense(name), as_float32=use == _VECTORS)
    need = Need(
        dense_bytes=sum(parts.values()),
        load_bytes=source.loading_bytes(opened.names),
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


def held_bytes(tensor: DenseInfo, *, as_float32: bool) -> int:
    """Return this process's memory for a dense tensor that a run uses as it is stored, or as float32.

    A tensor that is needed as float32 and stored otherwise is copied; `kept_bytes` of its stored form stay.
    """
    if not as_float32 or tensor.dtype == "F32":
        return tensor.resident_bytes
    return tensor.kept_bytes + 4 * math.prod(tensor.shape)


def activation_bytes(config: ModelConfig, chunk: int, *, every_logit: bool) -> int:
    """Return roughly the bytes that a pass over `chunk` tokens holds in addition to weights and state."""
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
