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

from k3.base import checksum
from k3.base.errors import ContainerError, DamageError
from k3.base.ledger import Tally
from k3.base.pages import PAGE_BYTES
from k3.container.layout import ROOT_NAME
from k3.container.manifest import Manifest
from k3.container.reader import read_manifest
from k3.model.keys import ExpertLayout
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME
from k3.verify.catalog_check import CatalogCheck, CatalogContent, read_catalog
from k3.verify.expected import header
from k3.verify.files import Checked, check_data_file, check_small_file, find_extras
from k3.verify.finding import Finding, Kind, finding_of
from k3.verify.roots import find_roots
from k3.verify.target import Target
from k3.verify.verdict import VerifyUnit, unexplained

_LAYERS_MAX = 1 << 20
"""A range of layers is written out, so an absurd one must not be believed."""


@dataclass
class Structure:
    """The findings of the structure grade, and what a further grade may read.

    `manifest` is None when it is damaged: then nothing else could be checked. `directories` has None for roots
    that are not there. `targets` are all catalogued extents in file order, also those in missing files; they are
    all that there is to read only if `catalogued` is set. The `tally` has every file of the manifest: small ones
    whole, data files with their header and size.
    """

    home: Path
    manifest: Manifest | None = None
    directories: list[Path | None] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    catalogued: bool = False
    layouts: dict[int, ExpertLayout] = field(default_factory=dict)  # of experts, by layer
    tally: Tally[VerifyUnit] = field(default_factory=Tally)

    def file_path(self, number: int) -> Path | None:
        """Return the path of data file `number`, whether it is there or not; None when its root is not there."""
        assert self.manifest is not None
        file = self.manifest.files[number]
        directory = self.directories[file.root]
        return None if directory is None else directory / file.path

    def lost_roots(self) -> set[int]:
        """Numbers of the roots that are not there."""
        return {number for number, directory in enumerate(self.directories) if directory is None}

    def account(self, unit: VerifyUnit, checked: Checked) -> None:
        """Note what a check of one file found, and that it was proven if it was."""
        self.findings += checked.findings
        if checked.equal:
            self.tally.settle(unit)

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
    for unit in (*_small_units(structure, manifest), *_data_units(structure, manifest)):
        structure.tally.require(unit, unit.nbytes)
    _check_manifest(structure, manifest)
    _check_small_files(structure, manifest)
    _check_data_files(structure, manifest, _check_catalog(structure, manifest))
    structure.findings += find_extras(home, manifest, structure.directories)
    structure.findings += unexplained(
        structure.tally.ledger().open(), structure.findings, lost_roots=structure.lost_roots()
    )
    return structure


def _small_units(structure: Structure, manifest: Manifest) -> list[VerifyUnit]:
    """Small files, the catalog, and one root.json for each drive root (whose size the manifest does not have)."""
    units = [
        VerifyUnit(str(structure.home / small.path), 0, small.bytes)
        for small in (*manifest.text_files, manifest.catalog)
    ]
    for number, root in enumerate(manifest.roots):
        if root.root_file_digest is not None:
            units.append(VerifyUnit(f"{structure.directories[number] or root.path}/{ROOT_NAME}", number, 0))
    return units


def _data_units(structure: Structure, manifest: Manifest) -> list[VerifyUnit]:
    """One for each data file: its header, and that it has its size."""
    return [
        VerifyUnit(str(structure.file_path(number) or f"{manifest.roots[file.root].path}/{file.path}"), file.root,
             file.header_bytes)
        for number, file in enumerate(manifest.files)
    ]  # fmt: skip


def _check_manifest_can_be_used(home: Path, manifest: Manifest) -> None:
    """Raise ContainerError for what parsing does not look at and this check could not work with."""
    path = home / MANIFEST_NAME
    for file in manifest.files:
        if file.header_bytes > file.bytes:
            raise ContainerError(f"file {file.path} of {file.bytes} bytes has a larger header", path=path)
    for first, last in manifest.geometry.layers:
        if not first <= last < _LAYERS_MAX:
            raise ContainerError(
                f"layers {first} to {last} are not an ascending range below {_LAYERS_MAX}", path=path
            )
    if manifest.catalog.path != CATALOG_NAME:
        raise ContainerError(f"catalog is called {manifest.catalog.path!r}", path=path)


def _check_manifest(structure: Structure, manifest: Manifest) -> None:
    """Compare the manifest with itself: its identities are computed anew from its content."""
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
    units = iter(_small_units(structure, manifest))
    for small in manifest.text_files:
        path = structure.home / small.path
        structure.account(next(units), check_small_file(path, small.digest, small.bytes, root=0))
    next(units)  # the catalog has a check of its own
    for number, (root, directory) in enumerate(zip(manifest.roots, structure.directories, strict=True)):
        if root.root_file_digest is None:
            continue
        unit = next(units)
        if directory is not None:
            path = directory / ROOT_NAME
            structure.account(unit, check_small_file(path, root.root_file_digest, None, root=number))


def _check_catalog(structure: Structure, manifest: Manifest) -> CatalogCheck | None:
    """Return the catalog's digest, then what it says; None when it cannot be used."""
    path = structure.home / CATALOG_NAME
    checked = check_small_file(path, manifest.catalog.digest, manifest.catalog.bytes, root=0)
    structure.account(VerifyUnit(str(path), 0, manifest.catalog.bytes), checked)
    if not checked.equal:  # walking a damaged tree could crash
        return None
    content = read_catalog(path)
    if not isinstance(content, CatalogContent):
        structure.findings.append(content)
        return None
    check = CatalogCheck(manifest, content)
    check.run()
    structure.findings += check.findings
    structure.targets = check.targets
    structure.layouts = {number: layer.layout for number, layer in content.layers.items()}
    structure.catalogued = True
    return check


def _check_data_files(structure: Structure, manifest: Manifest, check: CatalogCheck | None) -> None:
    for number, (file, unit) in enumerate(zip(manifest.files, _data_units(structure, manifest), strict=True)):
        path = structure.file_path(number)
        if path is None:
            continue
        right: Callable[[], bytes] | None = None
        expected = None if check is None else check.files.get(number)
        if check is not None and expected is not None:
            right = partial(header, expected, manifest.shares, check.content.tensors)
        checked = check_data_file(path, file, right)
        findings = [_with_first_lost(finding, number, structure.targets) for finding in checked.findings]
        structure.account(unit, replace(checked, findings=findings))


def _with_first_lost(finding: Finding, number: int, targets: Sequence[Target]) -> Finding:
    """Of a truncated file, also say which expert or tensor is the first that is not whole."""
    if finding.kind is not Kind.TRUNCATED or finding.offset is None:
        return finding
    lost = next((t for t in targets if t.file == number and t.end > finding.offset), None)
    if lost is None:
        return finding
    return replace(finding, layer=lost.layer, expert=lost.expert, tensor=lost.tensor)
