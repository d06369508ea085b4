"""manifest.json: the description of a container and the list of its files. Parse, check and render; no I/O.

`docs/container.md` section 3 is the specification. A `Manifest` is immutable; parsing checks the format's name,
the version, the digest over the text, the type of every field, and that paths stay inside their roots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from k3.base import checksum
from k3.base.errors import ContainerError, DamageError, NotAContainerError, VersionError
from k3.base.safe_text import is_plain, shown, shown_text
from k3.container.layout import FORMAT, VERSION

_T = TypeVar("_T")

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)

_RESTORE = "Restore this file from a copy, or remove the container's files and repack; the source is untouched"


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A shard of the snapshot that the container was made from."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Root:
    """A directory of the container. `kind` is home, drive or source; `path` is relative to home."""

    uuid: str
    kind: str
    path: str
    share: int
    probe_mb_per_s: int | None
    root_file_digest: str | None


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that holds extents.

    `header_bytes` is 0 for source files, whose headers the container did not write.
    """

    root: int
    path: str
    kind: str
    bytes: int
    header_bytes: int
    header_digest: str | None


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A text file in home, or the catalog."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of the model that a reader of bytes needs. `layers` are inclusive ranges."""

    layers: tuple[tuple[int, int], ...]
    expert_layers: int
    experts: int
    expert_payload_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole manifest, in the order of the file's keys."""

    container: str
    model: Mapping[str, Any]
    source: tuple[SourceShard, ...]
    quantization: Mapping[str, int]
    geometry: Geometry
    roots: tuple[Root, ...]
    files: tuple[DataFile, ...]
    text_files: tuple[SmallFile, ...]
    catalog: SmallFile
    skipped: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def shares(self) -> tuple[int, ...]:
        """Every root's share, in root order."""
        return tuple(root.share for root in self.roots)

    def identity(self) -> dict[str, Any]:
        """Return the content that the UUID `container` is computed from."""
        return content_identity(
            self.source, self.quantization, self.geometry.layers, [(r.kind, r.share) for r in self.roots]
        )

    def render(self) -> bytes:
        """Return the file's bytes, with their digest."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        document["source"] = {"shards": document["source"]}
        document["digest"] = checksum.ZERO_DIGEST_HEX
        return _sealed(_text(document))


_TYPES: dict[type, dict[str, Any]] = {
    kind: get_type_hints(kind) for kind in (SourceShard, Root, DataFile, SmallFile, Geometry)
}


def content_identity(
    source: tuple[SourceShard, ...],
    quantization: Mapping[str, int],
    layers: tuple[tuple[int, int], ...],
    roots: list[tuple[str, int]],
) -> dict[str, Any]:
    """Return the identity of a container with this content (docs/container.md section 3)."""
    return {
        "version": VERSION,
        "source": [asdict(shard) for shard in source],
        "quantization": dict(quantization),
        "layers": [list(pair) for pair in layers],
        "kinds": [kind for kind, _ in roots],
        "shares": [share for _, share in roots],
    }


def parse_manifest(data: bytes, path: Path) -> Manifest:
    """Return the manifest in `data`.

    Raises NotAContainerError for another program's file, VersionError for a newer format, DamageError or
    ContainerError for an invalid manifest; all name `path`.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamageError("manifest is not JSON text", path=path, advice=_RESTORE) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise NotAContainerError("this manifest is not a K3 container's", path=path)
    version = document.get("version")
    if not isinstance(version, int) or version < 1:
        raise DamageError(f"format version {shown(version)} is not a positive number", path=path)
    if version > VERSION:
        raise VersionError(
            f"container has format version {shown(version)}, this program reads up to {VERSION}",
            path=path,
            advice="Use a newer release",
        )
    document["digest"] = checksum.ZERO_DIGEST_HEX
    try:
        sound = data == _sealed(_text(document))
    except (ValueError, RecursionError):  # text that is not UTF-8, or nested too deeply
        sound = False
    if not sound:
        raise DamageError(
            "manifest does not match its own digest",
            path=path,
            advice=f"It was edited or damaged. {_RESTORE}",
        )
    try:
        manifest = _from_document(document)
        _check_references(manifest)
        _check_forms(manifest)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"manifest lacks or misuses a key: {shown_text(str(error))}"
        raise ContainerError(problem, path=path) from error
    return manifest


def _text(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _sealed(blank: bytes) -> bytes:
    """Return the text with its zeros, which are its last value, replaced by its own digest."""
    zeros = checksum.ZERO_DIGEST_HEX.encode()
    head, _, tail = blank.rpartition(zeros)
    return head + checksum.digest(blank).hex().encode() + tail


def _from_document(document: Mapping[str, Any]) -> Manifest:
    geometry = dict(document["geometry"])
    ranges = _typed("layers", geometry["layers"], list)
    geometry["layers"] = tuple((_typed("layer", first, int), _typed("layer", last, int)) for first, last in ranges)
    return Manifest(
        container=_typed("container", document["container"], str),
        model=_typed("model", document["model"], dict),
        source=_records(SourceShard, document["source"]["shards"]),
        quantization=_typed("quantization", document["quantization"], dict),
        geometry=_record(Geometry, geometry),
        roots=_records(Root, document["roots"]),
        files=_records(DataFile, document["files"]),
        text_files=_records(SmallFile, document["text_files"]),
        catalog=_record(SmallFile, document["catalog"]),
        skipped=tuple(_typed("skipped", name, str) for name in _typed("skipped", document["skipped"], list)),
        unknown=tuple(_typed("unknown", name, str) for name in _typed("unknown", document["unknown"], list)),
    )


def _records(kind: type[_T], items: list[dict[str, Any]]) -> tuple[_T, ...]:
    return tuple(_record(kind, item) for item in items)


def _record(kind: type[_T], item: dict[str, Any]) -> _T:
    """Return the value of a JSON object. Raises TypeError for missing, unknown or mistyped keys."""
    record = kind(**item)
    for name, wanted in _TYPES[kind].items():
        if name != "layers":  # checked where it is made: nested types cannot be compared like this
            _typed(name, item[name], wanted)
    return record


def _typed(name: str, value: Any, wanted: Any) -> Any:
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}")
    if isinstance(value, int) and not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def _check_references(manifest: Manifest) -> None:
    """Check the kinds of roots and files, and that no path leads out of its root. Raises ValueError."""
    kinds = [root.kind for root in manifest.roots]
    if kinds[:1] != ["home"] or not {"drive", "source"}.issuperset(kinds[1:]):
        raise ValueError(f"roots are of the kinds {shown(kinds)}, not one home and then drives or sources")
    for file in manifest.files:
        if file.root >= len(kinds) or file.kind not in ("experts", "dense", "source"):
            raise ValueError(
                f"file {shown(file.path)} is of the kind {shown(file.kind)} in root {shown(file.root)}"
            )
    paths = [file.path for file in manifest.files]
    paths += [file.path for file in (*manifest.text_files, manifest.catalog)]
    for path in paths:
        if path.startswith("/") or {"", ".", ".."}.intersection(path.split("/")):
            raise ValueError(f"path {shown(path)} does not stay inside its root")
    names = [*paths, *(shard.name for shard in manifest.source), *manifest.skipped, *manifest.unknown]
    for name in names:
        if not is_plain(name):
            raise ValueError(f"{shown(name)} is not a name of printable characters")


def _check_forms(manifest: Manifest) -> None:
    """Check the form of digests and UUIDs, so that a damaged one is not copied. Raises ValueError."""
    forms = [("container", manifest.container, _UUID)]
    forms += [("root", root.uuid, _UUID) for root in manifest.roots]
    forms += [("sha256", shard.sha256, _SHA256) for shard in manifest.source]
    digests = [root.root_file_digest for root in manifest.roots] + [file.header_digest for file in manifest.files]
    digests += [small.digest for small in (*manifest.text_files, manifest.catalog)]
    forms += [("digest", digest, _DIGEST) for digest in digests if digest is not None]
    for what, value, form in forms:
        if not form.fullmatch(value):
            raise ValueError(f"{shown(value)} is not a valid {what}")
