"""Grade one: does the catalog cover the files exactly? Reads headers and small files only, so it takes seconds.

Every byte of every data file must lie in its header or in one extent; headers, catalog, manifest and small files
must match their digests and each other. Where an expert and a tensor must lie follows from the format, so headers
and extents are computed anew (`expected`) and compared: a catalog that points two experts at one place cannot
pass, whatever its digests say.

`check_structure` goes on after a finding as far as something is left to stand on: without its manifest nothing
can be found, without its catalog headers can only be compared with their digests. Reads only; one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from k3.container import checksum
from k3.container.errors import ContainerError, DamageError
from k3.container.keys import PAGE_BYTES
from k3.container.layout import CATALOG_NAME, MANIFEST_NAME, ROOT_NAME
from k3.container.manifest import Manifest
from k3.container.reader import read_manifest
from k3.verify.catalog_check import CatalogCheck, CatalogContent, read_catalog
from k3.verify.expected import header
from k3.verify.files import check_data_file, check_small_file, find_extras
from k3.verify.finding import Finding, Kind, finding_of
from k3.verify.roots import find_roots
from k3.verify.target import Target

_LAYERS_MAX = 1 << 20
"""A range of layers is written out, so an absurd one must not be believed."""


@dataclass
class Structure:
    """What was found, and what a further grade may read.

    `manifest` is None when it is damaged: then nothing else could be checked. `directories` has None for roots
    that are not there. `targets` are all catalogued extents in file order, also those in missing files; there
    are none when the catalog could not be used.
    """

    home: Path
    manifest: Manifest | None = None
    directories: list[Path | None] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    files: int = 0
    read_bytes: int = 0

    def file_path(self, number: int) -> Path | None:
        """Where data file `number` is or should be; None when its root is not there."""
        assert self.manifest is not None
        file = self.manifest.files[number]
        directory = self.directories[file.root]
        return None if directory is None else directory / file.path

    def add(self, kind: Kind, problem: str, path: Path, *, root: int = 0, **place: Any) -> None:
        """Note a finding."""
        self.findings.append(Finding(kind, problem, str(path), root=root, **place))


def check_structure(home: Path, places: Sequence[Path] = ()) -> Structure:
    """Check the container at `home`, its roots looked for in `places` too.

    Everything that is wrong is in the result's findings. Raises only when there is no finished container to
    check: NotAContainerError, IncompleteError (an unfinished repack), VersionError, or DriveError.
    """
    structure = Structure(home)
    try:
        manifest = read_manifest(home)
        _check_manifest_can_be_used(home, manifest)
    except DamageError as error:
        structure.findings.append(finding_of(error, Kind.DAMAGED, root=0))
        return structure
    except ContainerError as error:
        if type(error) is not ContainerError:
            raise
        structure.findings.append(finding_of(error, Kind.INCONSISTENT, root=0))
        return structure
    structure.manifest = manifest
    structure.directories, findings = find_roots(home, manifest, places)
    structure.findings += findings
    _check_manifest(structure, manifest)
    _check_small_files(structure, manifest)
    _check_data_files(structure, manifest, _check_catalog(structure, manifest))
    structure.findings += find_extras(home, manifest, structure.directories)
    return structure


def _check_manifest_can_be_used(home: Path, manifest: Manifest) -> None:
    """What parsing does not look at and this check would stumble over: ContainerError."""
    path = home / MANIFEST_NAME
    for file in manifest.files:
        if file.header_bytes > file.bytes:
            raise ContainerError(f"file {file.path} of {file.bytes} bytes has a larger header", path=path)
    for first, last in manifest.geometry.layers:
        if not first <= last < _LAYERS_MAX:
            raise ContainerError(f"layers {first} to {last} are no range", path=path)
    if manifest.catalog.path != CATALOG_NAME:
        raise ContainerError(f"catalog is called {manifest.catalog.path!r}", path=path)


def _check_manifest(structure: Structure, manifest: Manifest) -> None:
    """The manifest against itself: identities are computed from content."""
    path = structure.home / MANIFEST_NAME
    container = checksum.container_uuid(manifest.identity())
    if container != manifest.container:
        problem = f"container UUID is {manifest.container}, its content gives {container}"
        structure.add(Kind.INCONSISTENT, problem, path)
    for number, root in enumerate(manifest.roots):
        uuid = checksum.root_uuid(manifest.container, number)
        if root.uuid != uuid:
            problem = f"root {number} has UUID {root.uuid}, its container gives {uuid}"
            structure.add(Kind.INCONSISTENT, problem, path, root=number)
        if (root.kind == "drive") != (root.root_file_digest is not None):
            structure.add(Kind.INCONSISTENT, f"root {number} has no digest of its {ROOT_NAME}", path, root=number)
    if manifest.geometry.page_bytes != PAGE_BYTES:
        problem = f"pages of {manifest.geometry.page_bytes} bytes instead of {PAGE_BYTES}"
        structure.add(Kind.INCONSISTENT, problem, path)
    digests = {small.path: small.digest for small in manifest.text_files}
    if "config.json" not in digests:
        structure.add(Kind.MISSING, "container has no config.json", structure.home / "config.json")
    elif manifest.model.get("config_digest") != digests["config.json"]:
        structure.add(Kind.INCONSISTENT, "config.json has two digests", path)


def _check_small_files(structure: Structure, manifest: Manifest) -> None:
    for small in manifest.text_files:
        structure.findings += check_small_file(structure.home / small.path, small.digest, small.bytes, root=0)
        structure.files += 1
        structure.read_bytes += small.bytes
    for number, (root, directory) in enumerate(zip(manifest.roots, structure.directories, strict=True)):
        if directory is not None and root.root_file_digest is not None:
            structure.findings += check_small_file(directory / ROOT_NAME, root.root_file_digest, None, root=number)
            structure.files += 1


def _check_catalog(structure: Structure, manifest: Manifest) -> CatalogCheck | None:
    """The catalog's digest, then what it says; None when it cannot be used."""
    path = structure.home / CATALOG_NAME
    structure.files += 1
    findings = check_small_file(path, manifest.catalog.digest, manifest.catalog.bytes, root=0)
    if not findings:  # only now: walking a damaged tree could crash
        structure.read_bytes += manifest.catalog.bytes
        content = read_catalog(path)
        if isinstance(content, CatalogContent):
            check = CatalogCheck(manifest, content)
            check.run()
            structure.findings += check.findings
            structure.targets = check.targets
            return check
        findings = [content]
    structure.findings += findings
    return None


def _check_data_files(structure: Structure, manifest: Manifest, check: CatalogCheck | None) -> None:
    for number, file in enumerate(manifest.files):
        path = structure.file_path(number)
        if path is None:
            continue
        right: Callable[[], bytes] | None = None
        expected = None if check is None else check.files.get(number)
        if check is not None and expected is not None:
            right = partial(header, expected, manifest.shares, check.content.tensors)
        findings = check_data_file(path, file, right)
        structure.findings += [_with_first_lost(finding, number, structure.targets) for finding in findings]
        structure.files += 1
        structure.read_bytes += file.header_bytes


def _with_first_lost(finding: Finding, number: int, targets: Sequence[Target]) -> Finding:
    """Of a truncated file, also say which expert or tensor is the first that is not whole."""
    if finding.kind is not Kind.TRUNCATED or finding.offset is None:
        return finding
    lost = next((t for t in targets if t.file == number and t.end > finding.offset), None)
    if lost is None:
        return finding
    return replace(finding, layer=lost.layer, expert=lost.expert, tensor=lost.tensor)
