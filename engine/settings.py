"""The settings of one `k3-run`, as a value: made by cli.py, read by everything below it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3.container.errors import ExitCode, K3Error
from k3.engine.latent_cache import LatentType
from k3.engine.sampler import SamplerOptions
from k3.store.file import Verify


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
