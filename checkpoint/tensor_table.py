"""All tensors of a snapshot by name: dense ones as objects, those of experts created from their tables.

Immutable after the snapshot is open; safe to use from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from k3.checkpoint.expert_table import ExpertTable
from k3.checkpoint.shard import SourceTensor
from k3.model.keys import parse_expert_name


class TensorTable(Mapping[str, SourceTensor]):
    """A map from tensor name to SourceTensor. Iterates dense and vision tensors first, then experts by layer."""

    def __init__(self, plain: Mapping[str, SourceTensor], experts: Mapping[int, ExpertTable]) -> None:
        self._plain = plain
        self._experts = experts

    def __getitem__(self, name: str) -> SourceTensor:
        tensor = self._plain.get(name) or self._expert_tensor(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        for table in self._experts.values():
            yield from table.names()

    def __len__(self) -> int:
        return len(self._plain) + sum(table.offsets.size for table in self._experts.values())

    def in_shard(self, shard: int) -> list[SourceTensor]:
        """Return the tensors of one shard in storage order."""
        found = [tensor for tensor in self._plain.values() if tensor.shard == shard]
        for table in self._experts.values():
            found.extend(table.in_shard(shard))
        found.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
        return found

    def _expert_tensor(self, name: str) -> SourceTensor | None:
        parsed = parse_expert_name(name)
        table = None if parsed is None else self._experts.get(parsed.key.layer)
        if parsed is None or table is None:
            return None
        tensor = table.find(parsed)
        # A number with leading zeros parses too, but is not a name in the snapshot.
        return tensor if tensor is not None and tensor.name == name else None
