"""The ledger of a comparison with the source, its differences, and the verdict that follows. Pure.

The units come from the plan and the manifest before anything is read: every header, every piece of every expert,
weights and scales of every dense tensor and its catalog entry, every small file, and every shard of the source,
whole. `compare` settles them one by one (docs/proof.md).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from k3.base.errors import ExitCode, K3Error
from k3.base.huge_pages import HugePages
from k3.base.ledger import Ledger
from k3.checkpoint.shard import Shard
from k3.container.manifest import Manifest
from k3.model.keys import ExpertKey
from k3.repack.plan import Plan, PlannedExtent, PlannedTensor


class ComparedUnit(NamedTuple):
    """One thing that a comparison has to prove.

    `number` is a file's (header), a layer (expert), or a tensor's position (tensor, entry); `name` is a small
    file's path; `part` tells pieces of an expert, and weights from scales.
    """

    kind: Literal["header", "expert", "tensor", "entry", "small"]
    number: int = 0
    expert: int = 0
    part: int = 0
    name: str = ""


def required_units(plan: Plan, small_files: Mapping[str, int]) -> dict[ComparedUnit, int]:
    """Bytes of every unit of the container that a plan describes. `small_files` has sizes by path."""
    units = {
        ComparedUnit("header", number): file.header_bytes
        for number, file in enumerate(plan.files)
        if file.kind != "source"
    }
    for key in plan.experts():
        for part, extent in enumerate(plan.expert_extents(key)):
            units[expert_unit(key, part)] = extent.stored_bytes
    for tensor in plan.tensors:
        units[ComparedUnit("entry", tensor.position)] = 0
        for part, extent in enumerate(tensor_extents(tensor)):
            units[ComparedUnit("tensor", tensor.position, part=part)] = extent.stored_bytes
    units.update({ComparedUnit("small", name=name): nbytes for name, nbytes in small_files.items()})
    return units


def expert_unit(key: ExpertKey, part: int) -> ComparedUnit:
    """Return the unit of an expert's piece number `part`."""
    return ComparedUnit("expert", key.layer, key.expert, part)


def tensor_extents(tensor: PlannedTensor) -> tuple[PlannedExtent, ...]:
    """Return a tensor's weights and, where it has them, its scales."""
    return (tensor.weights,) if tensor.scales is None else (tensor.weights, tensor.scales)


def required_shards(manifest: Manifest, shards: Iterable[Shard]) -> dict[str, int]:
    """Return bytes by name of every shard that has to be read whole: the manifest's, and others of the source."""
    sizes = {shard.name: shard.size_bytes for shard in shards}
    sizes.update({shard.name: shard.bytes for shard in manifest.source})
    return sizes


def shard_problem(manifest: Manifest, shard: Shard, sha256: str) -> str | None:
    """Return what is wrong with a shard that was read whole and has this digest; None if it is the manifest's."""
    entries = [entry for entry in manifest.source if entry.name == shard.name]
    if not entries:
        return "the container was made without this shard"
    for entry in entries:
        if entry.bytes != shard.size_bytes:
            return f"shard has {shard.size_bytes} bytes, the container was made from one of {entry.bytes}"
        if entry.sha256 != sha256:
            return f"shard's SHA-256 is {sha256}, the manifest has {entry.sha256}"
    if shard.blob_sha256 not in (None, sha256):
        return f"shard's SHA-256 is {sha256}, but it was published as {shard.blob_sha256}"
    return None


class Cause(enum.Enum):
    """Why something is not proven equal."""

    DIFFERENT = "different"  # it was compared, and bytes differ or are missing
    GONE = "gone"  # its root is not there any more
    UNREADABLE = "unreadable"  # it could not be compared


EXIT_CODES = {
    Cause.DIFFERENT: ExitCode.DAMAGED,
    Cause.GONE: ExitCode.INCOMPLETE,
    Cause.UNREADABLE: ExitCode.DRIVE,
}
"""The exit code of each cause, the worst first."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where the container is not what the source says it must be, or could not be proven to be."""

    problem: str
    path: str
    offset: int | None = None
    layer: int | None = None
    expert: int | None = None
    tensor: str | None = None
    cause: Cause = Cause.DIFFERENT

    def __str__(self) -> str:
        return str(K3Error(self.problem, **self.place()))

    def place(self) -> dict[str, Any]:
        """Return the place of the difference, for messages and JSON."""
        fields = asdict(self)
        del fields["problem"], fields["cause"]
        return fields


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome. `ledger` counts the container's bytes, `shards` the source's, each hashed whole.

    `counts` has all differences by cause, `differences` those that there was room for. `through_page_cache` are
    directories that could not be read past the page cache, `huge_pages` what the buffers got, `odd` what
    experts of the source are noted for.
    """

    ledger: Ledger[ComparedUnit]
    shards: Ledger[str]
    experts: int
    tensors: int
    counts: Mapping[Cause, int]
    differences: tuple[Difference, ...]
    through_page_cache: tuple[str, ...]
    huge_pages: HugePages
    odd: Mapping[ExpertKey, tuple[str, ...]] = field(default_factory=dict)

    @property
    def difference_count(self) -> int:
        """All differences, also those that are not described."""
        return sum(self.counts.values())

    @property
    def exit_code(self) -> ExitCode:
        """0 only if every unit and every shard was compared and nothing differs; else that of the worst cause."""
        for cause, code in EXIT_CODES.items():
            if self.counts.get(cause):
                return code
        return ExitCode.OK if self.ledger.complete and self.shards.complete else ExitCode.DRIVE

    @property
    def equal(self) -> bool:
        """True when the container is proven."""
        return self.exit_code is ExitCode.OK

    @property
    def verdict(self) -> str:
        """One word: equal, different, or unproven when something could not be compared."""
        if self.equal:
            return "equal"
        return "different" if self.exit_code is ExitCode.DAMAGED else "unproven"
