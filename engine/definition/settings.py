"""The settings of one `k3-run`, as a value: made by cli.py, read by everything below it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from k3.base.errors import ExitCode, K3Error

if TYPE_CHECKING:
    from k3.model.architecture import LatentType
    from k3.store.local.file_source import Verify


class SettingsError(K3Error):
    """A setting that does not fit the model or another setting: wrong usage, found after parsing."""

    exit_code = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which model, in which form, and how much of it stays in memory.

    Exactly one of `container`, `snapshot` and `store` is given; with `fallback` "file", `container` may stand
    beside `store`. `bits` and its siblings None: 8 for a snapshot,
    whatever it was made with for a container. `expert_bytes` None: what memory is left, at most all experts.
    """

    container: Path | None = None
    roots: tuple[Path, ...] = ()
    snapshot: tuple[Path, ...] = ()
    store: Path | None = None  # a k3-store daemon's socket
    fallback: Literal["file"] | None = None  # where experts come from while there is no daemon
    bits: int | None = None
    mla_bits: int | None = None
    head_bits: int | None = None
    layers: str | None = None
    mla_eps: float | None = None
    latent_type: LatentType = "f32"
    exact: bool = False
    keep_share: float = 1.0
    expert_bytes: int | None = None
    prefetch: int | None = None  # experts that look-ahead may have read before a layer asks; None: see plan.py
    direct: bool = True
    verify: Verify = "always"
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """`temperature` 0 is greedy. `top_p` in (0, 1] keeps the smallest set of likely tokens with that share."""

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
    """What to do with the model. At most one of `ids` and `text` is given; none only with `state`."""

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
    state: Path | None = None  # loaded from if it is there, saved to
