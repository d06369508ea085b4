"""Attacks on model.safetensors.index.json and on its agreement with the shards."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from k3.base.errors import IndexFileError, ShardError
from tests.attacks.builders import (
    INDEX,
    NORM_1,
    SHARD,
    add,
    attack,
    edit_json,
    edit_map,
    shard_name,
    tensors_of,
    write_tensors,
)


@attack(IndexFileError, "does not exist, but there are shards", file=INDEX)
def index_missing(directory: Path) -> None:
    """Without an index nothing says which shards belong together, and how many there should be."""
    (directory / INDEX).unlink()


@attack(IndexFileError, "does not exist, but there are shards", file=INDEX)
def single_shard_of_many(directory: Path) -> None:
    """One shard of several and no index: not a whole model."""
    (directory / INDEX).unlink()
    for number in (1, 3, 4):
        (directory / shard_name(number)).unlink()


for _name, _bytes, _says, _why in (
    ("index_empty", b"", "is not JSON", "A file of no bytes."),
    (
        "index_cut",
        b'{"metadata": {"total_size": 1}, "weight_map": {"a": "b.safe',
        "is not JSON",
        "A download that broke off.",
    ),
    ("index_zeros", bytes(4096), "is not JSON", "A file of zeros, after a power cut."),
    ("index_not_utf8", b'{"weight_map": {"\xff": "a"}}', "is not UTF-8", "Another encoding."),
    ("index_array", b"[]", "not a JSON object but an array", "The index is an object."),
    ("index_number", b"7", "not a JSON object but a number", "The index is an object."),
    ("index_null", b"null", "not a JSON object but null", "The index is an object."),
    ("index_deep", b"[" * 100_000, "nested too deeply", "Nested until the parser's stack ends."),
    ("index_without_map", b'{"metadata": {}}', "no weight_map", "The one table that matters is missing."),
    ("index_map_array", b'{"weight_map": ["a"]}', "no weight_map", "The map is an object."),
    ("index_map_empty", b'{"weight_map": {}}', "names no tensors", "A model of no tensors."),
    ("index_value_number", b'{"weight_map": {"a": 1}}', "has 1 where a file name", "A shard's name is a string."),
    (
        "index_value_null",
        b'{"weight_map": {"a": null}}',
        "has None where a file name",
        "A shard's name is a string.",
    ),
    (
        "index_value_list",
        b'{"weight_map": {"a": ["b.safetensors"]}}',
        "where a file name is expected",
        "A shard's name is a string.",
    ),
    (
        "index_key_twice",
        b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        "twice",
        "Two answers to where a tensor is.",
    ),
    ("index_map_twice", b'{"weight_map": {}, "weight_map": {}}', "twice", "Two maps."),
):

    def _content(directory: Path, content: bytes = _bytes) -> None:
        (directory / INDEX).write_bytes(content)

    _tensor = "a" if "where a file name" in _says else None
    add(_name, _why, IndexFileError, _says, _content, file=INDEX, tensor=_tensor)

for _name, _shard, _says in (
    ("index_leads_up", "../model.safetensors", "not a plain file name"),
    ("index_leads_to_root", "/etc/passwd", "not a plain file name"),
    ("index_leads_down", "sub/model.safetensors", "not a plain file name"),
    ("index_leads_up_backwards", "..\\model.safetensors", "not a plain file name"),
    ("index_names_parent", "..", "not a plain file name"),
    ("index_names_itself", ".", "not a plain file name"),
    ("index_names_nothing", "", "not a plain file name"),
    ("index_name_with_nul", "a\0.safetensors", "not a file name"),
    ("index_name_with_escapes", "a\x1b[2J.safetensors", "not a file name"),
    ("index_name_too_long", "a" * 300 + ".safetensors", "not a file name"),
    ("index_names_pickle", "pytorch_model.bin", "does not end with .safetensors"),
    ("index_names_config", "config.json", "does not end with .safetensors"),
):

    def _point(directory: Path, shard: str = _shard) -> None:
        edit_map(directory, lambda weight_map: weight_map.update({NORM_1: shard}))

    _why = "Names in the index become paths; they must be plain names of safetensors files."
    add(_name, _why, IndexFileError, _says, _point, file=INDEX, tensor=NORM_1)


@attack(IndexFileError, "more than the 1073741824 allowed", file=INDEX)
def index_enormous(directory: Path) -> None:
    """An index larger than any model's: it is refused by its size, before it is read."""
    os.truncate(directory / INDEX, (1 << 30) + 1)


@attack(IndexFileError, "a directory", file=INDEX)
def index_is_directory(directory: Path) -> None:
    """A folder under the index's name."""
    (directory / INDEX).unlink()
    (directory / INDEX).mkdir()


@attack(IndexFileError, "dangling link", file=INDEX)
def index_dangles(directory: Path) -> None:
    """The index's blob was deleted; the shards must not be taken for a snapshot without index."""
    (directory / INDEX).unlink()
    (directory / INDEX).symlink_to("../../blobs/0123")


@attack(IndexFileError, "the index is stale", file=INDEX, tensor=True)
def index_with_old_names(directory: Path) -> None:
    """Tensors were renamed and the index was not."""

    def rename(index: dict[str, Any]) -> None:
        old = index["weight_map"]
        index["weight_map"] = {name.replace("language_model.", ""): shard for name, shard in old.items()}

    edit_json(directory / INDEX, rename)


@attack(IndexFileError, "the index is stale: it names a tensor that", file=INDEX, tensor=f"{NORM_1}.gone")
def index_names_more(directory: Path) -> None:
    """The index names a tensor that the shard does not hold: it would stay uninitialised."""
    edit_map(directory, lambda weight_map: weight_map.update({f"{NORM_1}.gone": SHARD}))


@attack(IndexFileError, "the index is stale: it does not name", file=INDEX, tensor=NORM_1)
def index_names_less(directory: Path) -> None:
    """The shard holds a tensor that the index does not name."""
    edit_map(directory, lambda weight_map: weight_map.pop(NORM_1))


@attack(IndexFileError, "the index is stale: it says that a tensor is in", file=INDEX, tensor=NORM_1)
def index_names_other_shard(directory: Path) -> None:
    """The tensor is there, but in another shard than the index says."""
    edit_map(directory, lambda weight_map: weight_map.update({NORM_1: shard_name(3)}))


@attack(ShardError, "in two shards", file=shard_name(3), tensor=NORM_1)
def tensor_in_two_shards(directory: Path) -> None:
    """The same name with other bytes in a second shard of the index: the first file would win by its name."""
    path = directory / shard_name(3)
    write_tensors(path, [*tensors_of(path), (NORM_1, "BF16", [32], bytes(64))])


@attack(ShardError, "in two shards", file=shard_name(1), tensor=NORM_1)
def tensor_in_earlier_shard(directory: Path) -> None:
    """The same, with the second one in a shard that is read earlier."""
    path = directory / shard_name(1)
    write_tensors(path, [*tensors_of(path), (NORM_1, "BF16", [32], bytes(64))])


@attack(IndexFileError, "the index is stale", file=INDEX, tensor=True)
def shards_exchanged(directory: Path) -> None:
    """Two shards under each other's names."""
    spare = directory / "spare"
    shutil.move(directory / SHARD, spare)
    shutil.move(directory / shard_name(3), directory / SHARD)
    shutil.move(spare, directory / shard_name(3))
