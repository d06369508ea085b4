"""The settings of one `k3-run` as values: the commands make them, everything below reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from k3.base.errors import ExitCode, K3Error

if TYPE_CHECKING:
    from k3.model.architecture import LatentType
    from k3.store.lending.file_source import Verify


class SettingsError(K3Error):
    """A setting that contradicts the model or another setting; found after parsing, reported as wrong usage."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Choice of a model, of its form, and of the memory and threads that it may use.

    Exactly one of `container`, `snapshot` and `store` is given; with `fallback` "file", `container` may stand
    beside `store`. `bits`, `mla_bits` and `head_bits` of None mean 8 for a snapshot, and for a container the bits
    it was made with. `expert_bytes` of None means all memory that is left, but no more than all experts take.
    """

    container: Path | None = None
    roots: tuple[Path, ...] = ()
    snapshot: tuple[Path, ...] = ()
    store: Path | None = None  # socket of a k3-store daemon
    fallback: Literal["file"] | None = None  # read experts from the container's files while no daemon runs
    bits: int | None = None
    mla_bits: int | None = None
    head_bits: int | None = None
    layers: str | None = None
    mla_eps: float | None = None
    latent_type: LatentType = "f32"
    exact: bool = False
    keep_share: float = 1.0
    expert_bytes: int | None = None
    prefetch: int | None = None  # most experts of a layer that look-ahead may read; None: see plan_memory
    direct: bool = True
    verify: Verify = "always"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Choice of the next token.

    `temperature` 0 takes the likeliest token. `top_p` in (0, 1] keeps the smallest set of likeliest tokens whose
    probabilities add up to it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature {self.temperature} is not zero or above")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p {self.top_p} is not above 0 and at most 1")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} is negative")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a generation. At most one of `ids` and `text` is given; neither only with `state`."""

    model: ModelSettings
    ids: tuple[int, ...] | None
    text: str | None
    generate: int
    sampler: SamplerOptions
    chunk: int
    max_tokens: int | None
    ignore_eos: bool
    logits: Path | None
    trace: Path | None
    route_trace: Path | None
    as_json: bool
    state: Path | None = None  # file of a saved timeline: continued if it exists, written at the end
