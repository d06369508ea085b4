"""The comparison of an index with its shards: every tensor must be there once, in the shard that the index names.

Other loaders take the first file that has a tensor, or leave a tensor that they do not find uninitialised; both
change tokens silently. Here every difference is refused, except a wrong `total_size`, which no reader depends on.

For one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from k3.base.errors import IndexFileError, ShardError
from k3.checkpoint.safetensors_header import Header
from k3.checkpoint.shard_index import ShardIndex

_STALE = "The index belongs to other shards: fetch index and shards again from one revision"


class IndexCheck:
    """Compares shards with the index one by one, then as a whole."""

    def __init__(self, index: ShardIndex, wanted: Callable[[str], bool] | None) -> None:
        """Begin without shards.

        `wanted` returns True for names of tensors that are needed; None means all. Shards without any are not
        needed.
        """
        self._index = index
        self._expected = Counter(index.weight_map.values())
        self._needed = self._expected.keys()
        if wanted is not None:
            self._needed = {shard: 0 for name, shard in index.weight_map.items() if wanted(name)}.keys()
        self._paths: dict[str, Path] = {}
        self._elsewhere: list[tuple[str, str, str]] = []  # (tensor, shard that holds it, shard the index says)
        self._lacking: dict[str, str] = {}  # tensor -> shard that should hold it and does not
        self._tensor_bytes = 0

    def needed_shards(self) -> list[str]:
        """Return the names of the shards to open."""
        return sorted(self._needed)

    def add(self, path: Path, header: Header) -> None:
        """Compare one shard. Raises IndexFileError for a tensor that the index does not name."""
        shard = path.name
        self._paths[shard] = path
        agreeing = 0
        for tensor in header.tensors:
            self._tensor_bytes += tensor.nbytes
            said = self._index.weight_map.get(tensor.name)
            if said == shard:
                agreeing += 1
            elif said is None:
                raise self._stale(f"it does not name a tensor that {path} holds", tensor.name)
            else:
                self._elsewhere.append((tensor.name, shard, said))
        if agreeing != self._expected[shard]:
            held = {tensor.name for tensor in header.tensors}
            for name, said in self._index.weight_map.items():
                if said == shard and name not in held:
                    self._lacking[name] = shard

    def finish(self) -> list[str]:
        """Check the whole after the last shard, and return warnings about harmless differences.

        Raises IndexFileError or ShardError for a tensor that is not in the shard, or not only in the shard, that
        the index names.
        """
        for name, shard, said in self._elsewhere:
            if name in self._lacking or said not in self._paths:
                raise self._stale(f"it says that a tensor is in {said}, but {self._paths[shard]} holds it", name)
            raise ShardError(
                f"the tensor is in two shards; the other is {self._paths[said]}",
                path=self._paths[shard],
                tensor=name,
                advice="Nothing says which of them is right: fetch both again from one revision",
            )
        for name, shard in self._lacking.items():
            raise self._stale(f"it names a tensor that {self._paths[shard]} does not hold", name)
        return self._total_warnings()

    def _total_warnings(self) -> list[str]:
        if len(self._needed) < len(self._expected):
            return []  # a part of the model was opened
        said = self._index.total_bytes
        if said is None:
            return [f"{self._index.path} does not say the total size of the tensors"]
        if said != self._tensor_bytes:
            return [
                f"{self._index.path} says {said} bytes in total, the tensors have {self._tensor_bytes}; "
                "the tensors were checked one by one, so this does no harm"
            ]
        return []

    def _stale(self, problem: str, tensor: str) -> IndexFileError:
        return IndexFileError(
            f"the index is stale: {problem}", path=self._index.path, tensor=tensor, advice=_STALE
        )
