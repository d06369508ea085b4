"""The files of a snapshot, which may be spread over several directories.

config.json and the index name them; other files in the directories are not read. A file that is found twice must
have the same content twice. Subdirectories are not searched.

Reads directories, config.json, the index and small files; for one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3.base.errors import ConfigError, IndexFileError, K3Error, ShardError, SourceError
from k3.base.presence import is_named
from k3.base.regular_file import RegularFile, read_small_file, regular_size
from k3.base.safe_text import shown_name
from k3.checkpoint.downloads import download_notes, leftovers_of, published_digest, refuse_holes
from k3.checkpoint.hf_cache import describe_directory, list_directory, snapshot_directory
from k3.checkpoint.shard_index import INDEX_BYTES_MAX, INDEX_NAME, SUFFIX, ShardIndex, parse_index
from k3.model.model_config import CONFIG_BYTES_MAX, CONFIG_NAME, parse_config

SINGLE_NAME = "model.safetensors"
SMALL_FILE_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 20
_ONE_COPY = "Keep one of them, or make them equal"


@dataclass(slots=True)
class SnapshotFiles:
    """The files that were found. `warnings` grows while a snapshot is opened."""

    directories: tuple[Path, ...]
    config_path: Path
    config: dict[str, Any]
    index: ShardIndex | None
    warnings: list[str] = field(default_factory=list)
    _texts: dict[Path, bytes] = field(default_factory=dict)

    @classmethod
    def find(cls, directories: Sequence[Path]) -> SnapshotFiles:
        """Return config.json and the index found in `directories` (cache folders allowed).

        Raises SourceError, ConfigError or IndexFileError, and DriveError when the system refuses.
        """
        if not directories:
            raise SourceError("no directory given", advice="Name the directory of the snapshot")
        unique = tuple(dict.fromkeys(snapshot_directory(Path(path)) for path in directories))
        config_path = _one_file(unique, CONFIG_NAME, CONFIG_BYTES_MAX, ConfigError)
        if config_path is None:
            raise ConfigError(
                f"does not exist; {describe_directory(unique[0])}",
                path=unique[0] / CONFIG_NAME,
                advice="Name the directory of a Hugging Face snapshot: config.json, shards and their index",
            )
        data = _proven(config_path, CONFIG_BYTES_MAX, ConfigError)
        config = parse_config(data, config_path)
        index_path = _one_file(unique, INDEX_NAME, INDEX_BYTES_MAX, IndexFileError)
        index = None
        if index_path is not None:
            index = parse_index(_proven(index_path, INDEX_BYTES_MAX, IndexFileError), index_path)
        return cls(unique, config_path, config, index, download_notes(unique), {config_path: data})

    def indexed_shards(self, index: ShardIndex, needed: Sequence[str]) -> list[Path]:
        """Return the path of every shard in `needed`, in that order. Adds a warning for each other shard.

        Raises ShardError when one is missing, not a regular file, or found twice with different sizes.
        """
        paths = [self._shard(name, index) for name in needed]
        present = self._safetensors()
        for name in sorted(present.keys() - set(index.shard_names())):
            self.warnings.append(f"{shown_name(str(present[name]))} is not named by the index and is ignored")
        return paths

    def single_shard(self) -> Path:
        """Return the one shard of a snapshot without index.

        Raises IndexFileError when there are shards that need one, ShardError when there is none at all.
        """
        present = self._safetensors()
        if set(present) == {SINGLE_NAME}:
            return self._shard(SINGLE_NAME, None)
        index_path = self.directories[0] / INDEX_NAME
        if present:
            raise IndexFileError(
                f"does not exist, but there are shards: {len(present)} files, first {shown_name(min(present))}",
                path=index_path,
                advice="Fetch the index: without it nothing says which shards belong to the model",
            )
        raise ShardError(
            f"there is neither an index nor {SINGLE_NAME}; {describe_directory(self.directories[0])}",
            path=index_path,
            advice="Fetch the shards, or name every directory that holds some",
        )

    def text_file(self, name: str) -> Path | None:
        """Return the first file called `name` in the directories, None without one.

        Raises SourceError for a dangling link.
        """
        for directory in self.directories:
            if is_named(directory / name):
                regular_size(directory / name, SourceError)
                return directory / name
        return None

    def text_bytes(self, name: str) -> bytes | None:
        """Return the bytes of the first small file called `name`, None without one.

        They are read once and kept, so that every caller gets the same. Raises SourceError for a file that is not
        regular, too large, unfinished, or different from the downloader's record.
        """
        path = self.text_file(name)
        return None if path is None else self.small_file(path)

    def small_file(self, path: Path) -> bytes:
        """Return the bytes of a small file of the snapshot, checked and kept as by `text_bytes`."""
        if path not in self._texts:
            self._texts[path] = _proven(path, SMALL_FILE_BYTES_MAX, SourceError)
        return self._texts[path]

    def _safetensors(self) -> dict[str, Path]:
        """Return every *.safetensors file in the directories, the first of each name."""
        found: dict[str, Path] = {}
        for directory in self.directories:
            for name, is_directory in list_directory(directory):
                if name.endswith(SUFFIX) and not is_directory:
                    found.setdefault(name, directory / name)
        return found

    def _shard(self, name: str, index: ShardIndex | None) -> Path:
        found: list[tuple[Path, int]] = []
        failure: K3Error | None = None
        for directory in self.directories:
            path = directory / name
            if not is_named(path):
                continue
            refuse_holes(path, ShardError)
            try:
                found.append((path, regular_size(path)))
            except ShardError as error:
                failure = error
        if not found:
            raise failure or _missing(name, self.directories, index)
        if failure is not None:
            self.warnings.append(f"{failure}; {found[0][0]} is used")
        for path, size_bytes in found[1:]:
            if size_bytes != found[0][1]:
                raise ShardError(
                    f"has {size_bytes} bytes, but {found[0][0]} has {found[0][1]}", path=path, advice=_ONE_COPY
                )
            self.warnings.append(f"{path} is a second copy of {found[0][0]} and is ignored")
        return found[0][0]


def _missing(name: str, directories: Sequence[Path], index: ShardIndex | None) -> ShardError:
    path, named = directories[0] / name, ""
    begun = [other for directory in directories for other in leftovers_of(directory / name)]
    if index is not None:
        tensors = sum(shard == path.name for shard in index.weight_map.values())
        named = f", but {index.path} names it for {tensors} tensors"
    if begun:
        named += f"; its download has not ended: {begun[0]} is there"
    return ShardError(
        f"does not exist{named}",
        path=path,
        advice="Fetch the shard, or name every directory that holds some",
    )


def _proven(path: Path, max_bytes: int, error: type[K3Error]) -> bytes:
    """Return a small file's bytes, compared with the downloader's record."""
    refuse_holes(path, error)
    data = read_small_file(path, max_bytes, error)
    published = published_digest(path)
    if published is not None:
        published.check(data, path, error)
    return data


def _one_file(directories: Sequence[Path], name: str, max_bytes: int, error: type[K3Error]) -> Path | None:
    """Return the file `name` of the first directory that has it. Raises `error` for a copy with other bytes."""
    found = [directory / name for directory in directories if is_named(directory / name)]
    for other in found[1:]:
        if not _equal(found[0], other, max_bytes, error):
            raise error(f"differs from {found[0]}", path=other, advice=_ONE_COPY)
    return found[0] if found else None


def _equal(one: Path, other: Path, max_bytes: int, error: type[K3Error]) -> bool:
    with RegularFile(one, missing=error) as left, RegularFile(other, missing=error) as right:
        if left.size_bytes != right.size_bytes or left.size_bytes > max_bytes:
            return False
        for offset in range(0, left.size_bytes, _READ_BYTES):
            length = min(_READ_BYTES, left.size_bytes - offset)
            if left.read(offset, length) != right.read(offset, length):
                return False
    return True
