"""Before a container is published: is everything durable that the plan has? Pure.

"Finished" does not follow from a stream that met no error. It follows from the journal: every expert, dense tensor
and shard of the plan has its record there, with one digest for each of its runs, and a record is made only after
the bytes were made durable (docs/proof.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from k3.base.errors import IncompleteError
from k3.base.ledger import Ledger
from k3.base.safe_text import counted
from k3.model.keys import ExpertKey
from k3.repack.comparison import tensor_extents
from k3.repack.journal import Journal
from k3.repack.plan import Plan


class Durable(NamedTuple):
    """A unit of a repack: an expert by layer and id, a tensor by its position, a shard by its name."""

    kind: Literal["expert", "tensor", "shard"]
    number: int = 0
    expert: int = 0
    name: str = ""


def durable_units(plan: Plan, journal: Journal) -> Ledger[Durable]:
    """Return the plan's units with their bytes, and those that the journal holds whole.

    Experts of a container in place have bytes in the source only: there it is their digests that are durable.
    """
    required: dict[Durable, int] = {}
    proven: dict[Durable, int] = {}

    def enter(unit: Durable, sizes: Iterable[int], digests: tuple[bytes, ...] | None) -> None:
        runs = list(sizes)
        required[unit] = sum(runs)
        if digests is not None and len(digests) == len(runs):
            proven[unit] = sum(runs)

    for key in plan.experts():
        sizes = (extent.stored_bytes for extent in plan.expert_extents(key))
        enter(Durable("expert", key.layer, key.expert), sizes, journal.experts.get(key))
    for tensor in plan.tensors:
        sizes = (extent.stored_bytes for extent in tensor_extents(tensor))
        enter(Durable("tensor", tensor.position), sizes, journal.tensors.get(tensor.position))
    for shard in plan.snapshot.shards:
        unit = Durable("shard", name=shard.name)
        required[unit] = shard.size_bytes
        record = journal.shards.get(shard.name)
        if record is not None:
            proven[unit] = record.size_bytes
    return Ledger(required, proven)


def refuse_unfinished(plan: Plan, journal: Journal) -> None:
    """IncompleteError, and nothing is published, when a unit of the plan is not durable."""
    ledger = durable_units(plan, journal)
    if ledger.complete:
        return
    still_open = ledger.open()
    first = still_open[0]
    key = ExpertKey(first.number, first.expert) if first.kind == "expert" else None
    raise IncompleteError(
        f"{counted(len(still_open), 'unit')} of {len(ledger.required):,} did not become durable, first "
        + (f"shard {first.name}" if first.kind == "shard" else f"this {first.kind}"),
        path=journal.path,
        tensor=plan.tensors[first.number].source.name if first.kind == "tensor" else None,
        layer=None if key is None else key.layer,
        expert=None if key is None else key.expert,
        advice="Run the same command again: it continues, and makes what is missing",
    )
