"""model.safetensors.index.json: the map from every tensor to its shard.

The index is untrusted: its file names become paths, so they are first checked to be plain names. It is large (60
MB and 497,220 names for K3), so equal file names share one string, and callers drop it after they have compared it
with the shards.

Pure; the result is a plain value owned by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3.base.errors import IndexFileError
from k3.base.safe_text import shown, shown_name
from k3.base.strict_json import parse_object

INDEX_NAME = "model.safetensors.index.json"
INDEX_BYTES_MAX = 1 << 30
SUFFIX = ".safetensors"

_REFETCH = "Fetch the index again"


@dataclass(slots=True)
class ShardIndex:
    """A checked index. `weight_map` maps tensor names to shard file names; its owner may empty it.

    `total_bytes` is the tensors' total size by the index, None where it has no usable one.
    """

    path: Path
    weight_map: dict[str, str]
    total_bytes: int | None

    def shard_names(self) -> list[str]:
        """Return the names of the shards, sorted and each once."""
        return sorted(set(self.weight_map.values()))


def parse_index(data: bytes, path: Path) -> ShardIndex:
    """Return the index, checked.

    Raises IndexFileError for bytes that are not JSON and names that are not plain.
    """
    fields = parse_object(data, what="the index", path=path, error=IndexFileError, advice=_REFETCH)
    weight_map = fields.get("weight_map")
    if type(weight_map) is not dict:
        raise IndexFileError("the index has no weight_map table", path=path, advice=_REFETCH)
    if not weight_map:
        raise IndexFileError("the index names no tensors", path=path, advice=_REFETCH)
    names: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if type(shard) is not str:
            raise IndexFileError(
                f"the index has {shown(shard)} where a file name is expected",
                path=path,
                tensor=shown_name(tensor),
                advice=_REFETCH,
            )
        known = names.get(shard)
        if known is None:
            _check_file_name(shard, path, tensor)
            known = names[shard] = shard
        weight_map[tensor] = known
    return ShardIndex(path, weight_map, _total_bytes(fields.get("metadata")))


def _check_file_name(shard: str, path: Path, tensor: str) -> None:
    if "/" in shard or "\\" in shard or shard in ("", ".", ".."):
        problem, advice = "is not a plain file name", f"An index must not lead out of its folder. {_REFETCH}"
    elif len(shard) > 255 or not shard.isprintable():
        problem, advice = "is not a file name", _REFETCH
    elif not shard.endswith(SUFFIX):
        problem, advice = f"does not end with {SUFFIX}", "Name a safetensors snapshot"
    else:
        return
    raise IndexFileError(
        f"shard name {shown(shard)} {problem}", path=path, tensor=shown_name(tensor), advice=advice
    )


def _total_bytes(metadata: Any) -> int | None:
    total = metadata.get("total_size") if type(metadata) is dict else None
    return total if type(total) is int else None
