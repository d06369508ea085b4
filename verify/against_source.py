"""The last grade for bytes: the container against a second reading of the snapshot that it was made from.

The comparison itself is the repacker's own plan with another destination (`repack.compare`). Here a container's
manifest is turned back into that plan, and the differences into findings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k3.container.errors import ContainerError
from k3.container.huge_pages import HugePages
from k3.container.layout import MANIFEST_NAME
from k3.container.manifest import Manifest
from k3.container.reader import Container
from k3.container.recipe import Recipe
from k3.container.snapshot import Snapshot
from k3.repack.compare import compare_with_source
from k3.repack.plan import Plan
from k3.verify.finding import Finding, Kind

_SCRATCH_NAME = "k3-verify-scratch.partial"


@dataclass
class SourceCheck:
    """What was compared and what differs. `differences` counts also those that `findings` has no room for."""

    findings: list[Finding] = field(default_factory=list)
    differences: int = 0
    compared_bytes: int = 0
    source_bytes: int = 0
    experts: int = 0
    tensors: int = 0
    through_page_cache: set[str] = field(default_factory=set)
    huge_pages: HugePages = field(default_factory=HugePages)  # what the buffers got


def open_source(manifest: Manifest, sources: Sequence[Path]) -> Snapshot:
    """The snapshot in `sources`, as far as the container's layers need it. SourceError when it is not sound."""
    present = {layer for first, last in manifest.geometry.layers for layer in range(first, last + 1)}
    snapshot = Snapshot.open(sources, layers=sorted(present))
    if present == set(range(snapshot.text["num_hidden_layers"])):
        return Snapshot.open(sources)
    return snapshot


def plan_of(manifest: Manifest, snapshot: Snapshot, home: Path) -> Plan:
    """The plan by which this container would be made from this snapshot."""
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
    check = SourceCheck(findings=_other_shards(manifest, snapshot, home))
    check.differences = len(check.findings)
    container = Container.open(home, (*places, *snapshot.directories))
    try:
        comparison = compare_with_source(
            plan_of(manifest, snapshot, home),
            container,
            scratch=scratch / _SCRATCH_NAME,
            direct=direct,
            on_shard=on_shard,
            on_bytes=on_bytes,
        )
    finally:
        container.close()
    for difference in comparison.differences:
        check.findings.append(Finding(Kind.DIFFERENT, difference.problem, **difference.place()))
    check.differences += comparison.difference_count
    check.compared_bytes = comparison.compared_bytes
    check.source_bytes = comparison.source_bytes
    check.experts = comparison.experts
    check.tensors = comparison.tensors
    check.through_page_cache = set(comparison.through_page_cache)
    check.huge_pages = comparison.huge_pages
    return check


def _other_shards(manifest: Manifest, snapshot: Snapshot, home: Path) -> list[Finding]:
    """Shards that are visibly not those of the manifest: another name, size or published digest."""
    findings = []
    recorded = {shard.name: shard for shard in manifest.source}
    for shard in snapshot.shards:
        known = recorded.get(shard.name)
        problem = None
        if known is None:
            problem = "the container was made without this shard"
        elif known.bytes != shard.size_bytes:
            problem = f"shard has {shard.size_bytes} bytes, the container was made from one of {known.bytes}"
        elif shard.blob_sha256 not in (None, known.sha256):
            problem = f"shard is published as {shard.blob_sha256}, the container was made from {known.sha256}"
        if problem is not None:
            findings.append(Finding(Kind.DIFFERENT, problem, str(shard.path)))
    return findings
