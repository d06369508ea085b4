"""A finished container, opened for reading: it locates roots and hands out extents and tensors.

Opening reads the manifest, checks the catalog against its digest, finds every root, and compares every file's
size; no tensor is read. After that `Container` is immutable and may be used from any thread. It fulfils
`ModelSource`; the rooms above this one see offsets only inside an `Extent`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3.base import checksum
from k3.base.direct_io import ReadFile, span_bytes
from k3.base.errors import (
    ContainerError,
    DamageError,
    DriveError,
    IncompleteError,
    NotAContainerError,
    VersionError,
)
from k3.base.page_buffers import huge_buffer
from k3.base.presence import is_directory, is_there
from k3.base.regular_file import read_small_file, regular_size
from k3.base.strict_json import parse_object
from k3.checkpoint.hf_cache import possible_snapshots
from k3.container.catalog import CATALOG_BYTES_MAX, CatalogLayer, CatalogReader, CatalogTensor
from k3.container.catalog_record import CatalogExtent
from k3.container.dense_load import DenseLoad
from k3.container.layout import JOURNAL_NAME, ROOT_FORMAT, ROOT_NAME, VERSION
from k3.container.manifest import DataFile, Manifest, Root, parse_manifest
from k3.model.identity import GENERATION_CONFIG_NAME, ModelIdentity, config_identity, text_identity
from k3.model.keys import ExpertLayout, Extent
from k3.model.kinds import MANIFEST_NAME
from k3.model.model_config import CONFIG_NAME, parse_config
from k3.model.model_source import DenseInfo, EncodedTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


SMALL_FILE_BYTES_MAX = 64 << 20
"""Largest manifest, root.json or text file that is accepted."""

_RESTORE = "Restore it from a copy, or repack"
_RESTORE_DATA = "Restore it, or repack; k3-verify lists all findings"


@dataclass(frozen=True, slots=True)
class LocatedRoot:
    """A root of the manifest and the directory where it was found."""

    number: int
    root: Root
    directory: Path


class Container:
    """A finished container, opened for reading. Create it with `open`."""

    has_extents = True

    def __init__(self, home: Path, manifest: Manifest, roots: tuple[LocatedRoot, ...], catalog: CatalogReader):
        self.home = home
        self.manifest = manifest
        self.roots = roots
        self.catalog = catalog
        self._paths = tuple(roots[file.root].directory / file.path for file in manifest.files)
        self._layers = catalog.layers()

    @classmethod
    def open(cls, home: Path, roots: Sequence[Path] = ()) -> Container:
        """Open the container whose home is `home`.

        `roots` are directories in which to look for drive and source roots. Raises NotAContainerError,
        IncompleteError (unfinished, or a root missing), VersionError, DamageError, and DriveError when the system
        refuses.
        """
        manifest = read_manifest(home)
        located = locate_roots(home, manifest, roots)
        check_sizes(manifest, located)
        path = home / manifest.catalog.path
        return cls(home, manifest, located, CatalogReader(path, read_catalog(home, manifest)))

    def close(self) -> None:
        """Close the catalog."""
        self.catalog.close()

    # -- ModelSource

    @cached_property
    def identity(self) -> ModelIdentity:
        """The UUID with the digests of configuration and vocabulary: equal content has an equal identity."""
        return ModelIdentity(
            weights=self.manifest.container,
            config=config_identity(self.config, self.text_bytes(GENERATION_CONFIG_NAME), self.config_path),
            text=text_identity({file.path: file.digest for file in self.manifest.text_files}),
        )

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json as parsed."""
        data = self.text_bytes(CONFIG_NAME)
        if data is None:
            raise ContainerError("container has no config.json", path=self.home)
        return parse_config(data, self.config_path)

    @property
    def config_path(self) -> Path:
        """The path of config.json in the container's home."""
        return self.home / CONFIG_NAME

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directory of every root, home first."""
        return tuple(dict.fromkeys((self.home, *(root.directory for root in self.roots))))

    def files(self) -> Iterator[Path]:
        """Yield the path of every data file."""
        yield from self._paths

    def text_file(self, name: str) -> Path | None:
        """Return the path of a small file of the model, or None."""
        known = any(file.path == name for file in self.manifest.text_files)
        return self.home / name if known else None

    def text_bytes(self, name: str) -> bytes | None:
        """Return the bytes of a small file, None without it.

        Raises DamageError when they differ from the digest in the manifest.
        """
        path = self.text_file(name)
        if path is None:
            return None
        data = _read_small(path)
        expected = next(file.digest for file in self.manifest.text_files if file.path == name)
        if checksum.digest(data).hex() != expected:
            raise DamageError(f"{name} does not match its digest", path=path, advice="Restore it, or repack")
        return data

    def tensor_names(self) -> Sequence[str]:
        """Return the dense tensors in execution order."""
        return tuple(self._tensors)

    def dense(self, name: str) -> DenseInfo:
        """Return form and memory of a dense tensor, by the catalog. Raises KeyError when there is none."""
        entry = self._tensors[name]
        stored_bytes = entry.weights.stored_bytes + (0 if entry.scales is None else entry.scales.stored_bytes)
        return DenseInfo(entry.dtype, entry.shape, entry.encoding, stored_bytes, stored_bytes, stored_bytes)

    def tensor(self, name: str) -> CatalogTensor:
        """Return a dense tensor's catalog entry. Raises KeyError when there is none."""
        return self._tensors[name]

    def read_tensor(self, name: str) -> EncodedTensor:
        """Read one dense tensor and check its digest.

        Raises KeyError when there is none, DamageError when its bytes differ from the digest, DriveError when a
        read fails.
        """
        from k3.model.encoded_tensor import encoded_tensor  # NumPy takes longer to import than a container to open

        entry = self._tensors[name]
        scales = None if entry.scales is None else self._read(entry.scales, name)
        weights = self._read(entry.weights, name)
        return encoded_tensor(name, entry.encoding, entry.dtype, entry.shape, weights, scales)

    def begin_load(
        self,
        names: Sequence[str],
        *,
        on_read: Callable[[str], None] = lambda name: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> DenseLoad:
        """Start to read dense tensors in the background, with O_DIRECT, and check each by its digest."""
        return DenseLoad(self, names, on_read=on_read, on_end=on_end)

    def loading_bytes(self, names: Sequence[str]) -> int:
        """Return 0: tensors are read straight to their places."""
        return 0

    def expert_layers(self) -> Sequence[int]:
        """Return the 0-based layers that have routed experts, ascending."""
        return tuple(self._layers)

    def expert_count(self, layer: int) -> int:
        """Return the number of routed experts of a layer. Raises ContainerError for a layer without any."""
        return self._layer(layer).experts

    def expert_layout(self, layer: int) -> ExpertLayout:
        """Return the parts of an expert's payload. Raises ContainerError for a layer without experts."""
        return self._layer(layer).layout

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Return an expert's extents in payload order. Raises ContainerError when there is no such expert."""
        found = self.catalog.expert(layer, expert)
        if found is None:
            raise ContainerError("container has no such expert", path=self.home, layer=layer, expert=expert)
        return tuple(self.extent(item) for item in found)

    # -- for the verifier and the loader

    def file_path(self, number: int) -> Path:
        """Return the path of data file `number`."""
        return self._paths[number]

    def file(self, number: int) -> DataFile:
        """Return the manifest's entry of data file `number`."""
        return self.manifest.files[number]

    def extent(self, item: CatalogExtent) -> Extent:
        """Return a catalogued extent with its file resolved. Raises ContainerError when there is no such file."""
        if not 0 <= item.file < len(self._paths):
            raise ContainerError(f"the catalog refers to file {item.file}, which does not exist", path=self.home)
        return Extent(self._paths[item.file], item.offset, item.payload_bytes, item.stored_bytes, item.digest)

    @cached_property
    def _tensors(self) -> dict[str, CatalogTensor]:
        return {entry.name: entry for entry in self.catalog.tensors()}

    def _layer(self, layer: int) -> CatalogLayer:
        try:
            return self._layers[layer]
        except KeyError:
            raise ContainerError(
                "the container has no routed experts of this layer", path=self.home, layer=layer
            ) from None

    def _read(self, item: CatalogExtent, name: str) -> npt.NDArray[np.uint8]:
        path = self.extent(item).path
        buffer = huge_buffer(span_bytes(item.offset, item.stored_bytes))
        with ReadFile(path) as file:
            stored: npt.NDArray[np.uint8] = file.read(item.offset, item.stored_bytes, buffer)
        if checksum.digest(stored) != item.digest:
            raise DamageError(
                "tensor does not match its digest", path=path, tensor=name, offset=item.offset,
                advice="Run k3-verify, then repack the damaged file from the source",
            )  # fmt: skip
        return stored[: item.payload_bytes]


def read_manifest(home: Path) -> Manifest:
    """Return the manifest of a finished container at `home`, after checking its own digest.

    Raises IncompleteError for an unfinished repack, NotAContainerError where there is none, and what
    `parse_manifest` raises.
    """
    path = home / MANIFEST_NAME
    finished = is_there(path)
    if not finished and is_there(home / JOURNAL_NAME):
        raise IncompleteError(
            "the repack into this directory is unfinished",
            path=home,
            advice="Run the k3-repack command that began it again; it continues",
        )
    if not finished:
        if not is_directory(home):
            raise NotAContainerError("there is no such directory", path=home)
        hint = "A snapshot: repack it first with k3-repack" if is_there(home / "config.json") else None
        raise NotAContainerError(
            "there is no manifest.json here, so this is not a container", path=home, advice=hint
        )
    return parse_manifest(_read_small(path), path)


def recorded_places(home: Path, manifest: Manifest) -> list[Path]:
    """Return the directory that each root had when the container was made, by number."""
    base = home.resolve()  # recorded paths are relative to the directory itself, not to a link to it
    return [Path(os.path.normpath(base / root.path)) for root in manifest.roots]


def locate_roots(home: Path, manifest: Manifest, places: Sequence[Path]) -> tuple[LocatedRoot, ...]:
    """Find every root; drive roots by the UUID in their root.json, among `places` and the recorded directories.

    A place may be a download cache's folder above the snapshot that is looked for. Raises IncompleteError naming
    every root that is missing, DriveError when one may be in a folder that cannot be listed.
    """
    hints = recorded_places(home, manifest)
    places, refused = listed_places(places)
    drives = {uuid: place for place in (*hints, *places) if (uuid := _root_identity(place, manifest)) is not None}
    found = []
    missing = []
    for number, root in enumerate(manifest.roots):
        directory: Path | None = home
        if root.kind == "drive":
            directory = drives.get(root.uuid)
        elif root.kind == "source":
            wanted = [file.path for file in manifest.files if file.root == number]
            candidates = (*places, hints[number])
            directory = next((p for p in candidates if all(is_there(p / name) for name in wanted)), None)
        if directory is None:
            missing.append(f"root {number} ({root.kind} {root.uuid}, last at {root.path})")
        else:
            found.append(LocatedRoot(number, root, directory))
    if missing and refused:
        raise refused[0]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise IncompleteError(
            f"{len(missing)} of {len(manifest.roots)} roots {verb} missing: {'; '.join(missing)}",
            path=home,
            advice="Mount the drives, or name the directories with --dirs",
        )
    return tuple(found)


def went_away(number: int, manifest: Manifest, directory: Path) -> bool:
    """Return True when a root that was in `directory` has disappeared: none of the files that mark it is left.

    An unmounted drive leaves its empty mount point behind. A directory that cannot be read has not disappeared.
    """
    kind = manifest.roots[number].kind
    marks = [MANIFEST_NAME if kind == "home" else ROOT_NAME]
    if kind == "source":
        marks = [file.path for file in manifest.files if file.root == number]
    try:
        return not any(is_there(directory / mark) for mark in marks)
    except DriveError:
        return False


def unused_places(roots: Sequence[LocatedRoot], places: Sequence[Path]) -> list[Path]:
    """Return the `places` that hold none of the located `roots`: misspelt, or not mounted."""
    used = {root.directory.resolve() for root in roots}
    return [place for place in places if used.isdisjoint(path.resolve() for path in listed_places([place])[0])]


def listed_places(places: Iterable[Path]) -> tuple[list[Path], list[DriveError]]:
    """Return the `places`, each followed by its revisions if it is a download cache's folder, and errors.

    The errors are those of folders that could not be listed, so that their revisions are not known.
    """
    listed: list[Path] = []
    refused = []
    for place in places:
        try:
            listed += possible_snapshots(place)
        except DriveError as error:
            listed.append(place)
            refused.append(error)
    return listed, refused


def _root_identity(directory: Path, manifest: Manifest) -> str | None:
    """Return the root UUID in a directory's root.json, None when it is no drive root of this container.

    Raises DamageError when the file is invalid, or is of this container but contradicts the manifest.
    """
    path = directory / ROOT_NAME
    if not is_there(path):
        return None
    document = parse_object(_read_small(path), what="the root file", path=path, error=DamageError, advice=_RESTORE)
    container, uuid, version = document.get("container"), document.get("root"), document.get("version")
    numbers = {root.uuid: number for number, root in enumerate(manifest.roots) if root.kind == "drive"}
    number = numbers.get(uuid) if isinstance(uuid, str) else None
    if number is None and container != manifest.container:
        return None
    if isinstance(version, int) and version > VERSION:
        raise VersionError(f"root has format version {version}, this program reads up to {VERSION}", path=path)
    fields = {"format": ROOT_FORMAT, "container": manifest.container, "root": uuid, "number": number}
    if (
        number is None
        or not isinstance(version, int)
        or any(document.get(key) != value for key, value in fields.items())
    ):
        raise DamageError(
            "root file contradicts the manifest", path=path, advice="Restore this file from a copy, or repack"
        )
    return str(uuid)


def check_sizes(manifest: Manifest, roots: Sequence[LocatedRoot]) -> None:
    """Compare every data file's size with the manifest.

    Raises DamageError naming the first file that has another size or is not a regular file.
    """
    for file in manifest.files:
        path = roots[file.root].directory / file.path
        size = regular_size(path, DamageError, _RESTORE_DATA)
        if size != file.bytes:
            word = "truncated" if size < file.bytes else "too long"
            raise DamageError(
                f"data file is {word}: {size} bytes instead of {file.bytes}", path=path,
                offset=min(size, file.bytes), advice=_RESTORE_DATA,
            )  # fmt: skip


def read_catalog(home: Path, manifest: Manifest) -> bytes:
    """Return the catalog's content, after comparing size and digest with the manifest.

    Raises DamageError when they differ, DriveError when a read fails.
    """
    path = home / manifest.catalog.path
    data = read_small_file(path, min(CATALOG_BYTES_MAX, manifest.catalog.bytes), DamageError, _RESTORE)
    if len(data) != manifest.catalog.bytes or checksum.digest(data).hex() != manifest.catalog.digest:
        raise DamageError("catalog does not match its digest", path=path, advice=_RESTORE)
    return data


def _read_small(path: Path) -> bytes:
    return read_small_file(path, SMALL_FILE_BYTES_MAX, DamageError, _RESTORE)
