"""The last grade for bytes: the container against a second reading of the snapshot that it was made from.

The comparison itself is the repacker's own plan with another destination (`repack.compare`), which also hashes
every shard and compares it with the manifest. Here a container's manifest is turned back into that plan, and the
differences into findings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3.base.errors import ContainerError
from k3.base.huge_pages import HugePages
from k3.base.ledger import Ledger
from k3.checkpoint.snapshot import Snapshot
from k3.container.manifest import Manifest
from k3.container.reader import Container
from k3.model.keys import ExpertKey
from k3.model.kinds import MANIFEST_NAME
from k3.model.tensor_recipe import Recipe
from k3.repack.compare import compare_with_source
from k3.repack.comparison import Cause, ComparedUnit
from k3.repack.plan import Plan
from k3.repack.probe import source_jobs
from k3.verify.finding import Finding, Kind

_SCRATCH_NAME = "k3-verify-scratch.partial"
_KINDS = {Cause.DIFFERENT: Kind.DIFFERENT, Cause.GONE: Kind.INCOMPLETE, Cause.UNREADABLE: Kind.UNREADABLE}


@dataclass
class SourceCheck:
    """The bytes that were compared, and what differs. `differences` counts also what `findings` has no room for.

    `ledger` has the container's bytes, `shards` the source's.
    """

    ledger: Ledger[ComparedUnit]
    shards: Ledger[str]
    findings: list[Finding] = field(default_factory=list)
    differences: int = 0
    experts: int = 0
    tensors: int = 0
    through_page_cache: set[str] = field(default_factory=set)
    huge_pages: HugePages = field(default_factory=HugePages)  # what the buffers got
    odd: Mapping[ExpertKey, tuple[str, ...]] = field(default_factory=dict)  # experts that are sound and yet no use


def open_source(manifest: Manifest, sources: Sequence[Path]) -> Snapshot:
    """Return the snapshot in `sources`, as far as the container's layers need it. SourceError if not sound."""
    present = {layer for first, last in manifest.geometry.layers for layer in range(first, last + 1)}
    snapshot = Snapshot.open(sources, layers=sorted(present))
    if present == set(range(snapshot.text["num_hidden_layers"])):
        return Snapshot.open(sources)
    return snapshot


def plan_of(manifest: Manifest, snapshot: Snapshot, home: Path) -> Plan:
    """Return the plan by which this container would be made from this snapshot."""
    in_place = any(root.kind == "source" for root in manifest.roots)
    if in_place and len(snapshot.directories) != len(manifest.roots) - 1:
        raise ContainerError(
            f"the container points into {len(manifest.roots) - 1} source directories, "
            f"{len(snapshot.directories)} are given",
            path=home / MANIFEST_NAME,
            advice="Name the same directories in the same order",
        )
    return Plan(snapshot, Recipe(**manifest.quantization), manifest.shares, in_place=in_place)


def check_against_source(
    home: Path,
    places: Sequence[Path],
    snapshot: Snapshot,
    manifest: Manifest,
    *,
    scratch: Path,
    direct: bool = True,
    on_shard: Callable[[str], None] = lambda name: None,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> SourceCheck:
    """Compare every byte with what this snapshot gives. `scratch` is a directory for experts that lie apart.

    SourceError for a snapshot that is not sound, ContainerError for a container that cannot be opened.
    """
    container = Container.open(home, (*places, *snapshot.directories))
    try:
        comparison = compare_with_source(
            plan_of(manifest, snapshot, home),
            container,
            scratch=scratch / _SCRATCH_NAME,
            direct=direct,
            jobs=source_jobs(None, snapshot),
            on_shard=on_shard,
            on_bytes=on_bytes,
        )
    finally:
        container.close()
    return SourceCheck(
        ledger=comparison.ledger,
        shards=comparison.shards,
        findings=[Finding(_KINDS[item.cause], item.problem, **item.place()) for item in comparison.differences],
        differences=comparison.difference_count,
        experts=comparison.experts,
        tensors=comparison.tensors,
        through_page_cache=set(comparison.through_page_cache),
        huge_pages=comparison.huge_pages,
        odd=comparison.odd,
    )
