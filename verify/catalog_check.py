"""The catalog against the manifest and against the format: what is catalogued, and where it must be.

Pure: works on records that were read already, and returns findings. See `expected` for what is compared with.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from k3.base.errors import ContainerError
from k3.container.catalog import CatalogLayer, CatalogReader, CatalogTensor
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import SCALES_SUFFIX
from k3.container.manifest import DataFile, Manifest
from k3.model.keys import ExpertKey, layer_of
from k3.model.kinds import MANIFEST_NAME
from k3.verify.expected import ExpectedFile, Place, expected_dense_file, expected_expert_files, stored_tensors
from k3.verify.finding import Finding, Kind, finding_of
from k3.verify.target import Target


@dataclass(frozen=True)
class CatalogContent:
    """Everything a catalog says."""

    path: Path
    files: tuple[DataFile, ...]
    layers: dict[int, CatalogLayer]
    tensors: tuple[CatalogTensor, ...]
    experts: dict[ExpertKey, list[CatalogExtent]]


def read_catalog(path: Path) -> CatalogContent | Finding:
    """Read a catalog whose digest is right; a finding when its records are not what the format has."""
    try:
        reader = CatalogReader(path)
    except ContainerError as error:
        return finding_of(error, Kind.DAMAGED, root=0)
    try:
        return CatalogContent(
            path,
            tuple(reader.files()),
            reader.layers(),
            tuple(reader.tensors()),
            {ExpertKey(layer, expert): extents for layer, expert, extents in reader.experts()},
        )
    except ContainerError as error:
        return finding_of(error, Kind.INCONSISTENT, root=0)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        return Finding(Kind.INCONSISTENT, f"catalog record cannot be understood: {error!r}", str(path), root=0)
    finally:
        reader.close()


@dataclass
class CatalogCheck:
    """The result of checking a catalog: findings, the files as they should be by number, and what can be read."""

    manifest: Manifest
    content: CatalogContent
    findings: list[Finding] = field(default_factory=list)
    files: dict[int, ExpectedFile] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def run(self) -> None:
        """Compare everything. Call once."""
        self._numbers = {(file.root, file.path): number for number, file in enumerate(self.manifest.files)}
        self._claimed: set[int] = set()
        self._compare_files()
        self._compare_geometry()
        self._check_dense()
        if any(root.kind == "source" for root in self.manifest.roots):
            self._check_source_layers()
        else:
            self._check_layers()
        self._check_unclaimed()
        self._collect_targets()

    def _add(self, problem: str, **place: Any) -> None:
        place.setdefault("path", str(self.content.path))
        self.findings.append(Finding(Kind.INCONSISTENT, problem, root=place.pop("root", 0), **place))

    def _compare_files(self) -> None:
        mine, theirs = self.manifest.files, self.content.files
        if len(mine) != len(theirs):
            self._add(f"{len(theirs)} files in the catalog, {len(mine)} in the manifest")
        for number, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            if a != b:
                self._add(f"file {number} is {b} in the catalog, {a} in the manifest")

    def _compare_geometry(self) -> None:
        geometry, layers = self.manifest.geometry, self.content.layers
        for what, recorded, found in (
            ("expert layers", geometry.expert_layers, len(layers)),
            ("experts", geometry.experts, max((layer.experts for layer in layers.values()), default=0)),
            (
                "bytes in an expert",
                geometry.expert_payload_bytes,
                max((layer.layout.payload_bytes for layer in layers.values()), default=0),
            ),
        ):
            if recorded != found:
                self._add(f"{found} {what} in the catalog, {recorded} in the manifest")
        numbers = (layer_of(tensor.name) for tensor in self.content.tensors)
        present = {*layers, *(number for number in numbers if number is not None)}
        recorded_layers = {n for first, last in geometry.layers for n in range(first, last + 1)}
        if present != recorded_layers:
            odd = sorted(present ^ recorded_layers)
            self._add(f"catalog and manifest disagree on which layers there are: {odd[:20]}")

    def _check_dense(self) -> None:
        counts = Counter(tensor.name for tensor in self.content.tensors)
        for name in (name for name, count in counts.items() if count > 1):
            self._add("tensor is catalogued more than once", tensor=name)
        try:
            expected = expected_dense_file(self.content.tensors)
        except (KeyError, ValueError) as error:
            self._add(f"no dense blob can hold these tensors: {error}")
            return
        number = self._claim(expected)
        stored = [name for tensor in self.content.tensors for name, _, _ in stored_tensors(tensor)]
        found = [extent for tensor in self.content.tensors for extent in (tensor.weights, tensor.scales) if extent]
        if len(stored) != len(found):
            self._add(f"{len(found)} extents for {len(stored)} stored tensors: scales do not fit the encodings")
        elif number is not None:
            for name, place, extent in zip(stored, expected.places, found, strict=True):
                self._compare_place(number, place, extent, tensor=name)

    def _check_layers(self) -> None:
        """Experts in files of our own: every piece has one right place."""
        if self.content.layers and not any(self.manifest.shares):
            self._add("no root has a share of the experts", path=self._manifest_path)
            return
        for layer in self.content.layers.values():
            expected = expected_expert_files(layer, self.manifest.shares)
            numbers = [self._claim(file) for file in expected]
            for key, extents in self._experts_of(layer):
                if len(extents) != len(expected):
                    self._add(
                        f"{len(extents)} pieces instead of {len(expected)}", layer=key.layer, expert=key.expert
                    )
                    continue
                for number, file, extent in zip(numbers, expected, extents, strict=True):
                    if number is not None:
                        self._compare_place(
                            number, file.places[key.expert], extent, layer=key.layer, expert=key.expert
                        )

    def _check_source_layers(self) -> None:
        """Experts in the original shards: inside their files, whole, and each byte used once."""
        ranges: list[tuple[int, int, int, ExpertKey]] = []
        for layer in self.content.layers.values():
            for key, extents in self._experts_of(layer):
                payload_bytes = sum(extent.payload_bytes for extent in extents)
                if payload_bytes != layer.layout.payload_bytes:
                    problem = f"extents hold {payload_bytes} bytes instead of {layer.layout.payload_bytes}"
                    self._add(problem, layer=key.layer, expert=key.expert)
                for extent in extents:
                    ranges.append((extent.file, extent.offset, extent.offset + extent.stored_bytes, key))
        ranges.sort(key=lambda one: one[:3])
        for before, after in pairwise(ranges):
            if before[0] == after[0] and after[1] < before[2]:
                other = f"layer {before[3].layer}, expert {before[3].expert}"
                self._add(
                    f"extent overlaps one of {other}",
                    offset=after[1],
                    layer=after[3].layer,
                    expert=after[3].expert,
                )
        self._claimed |= {n for n, file in enumerate(self.manifest.files) if file.kind == "source"}

    def _experts_of(self, layer: CatalogLayer) -> Iterator[tuple[ExpertKey, list[CatalogExtent]]]:
        """Return a layer's experts that are catalogued; a finding for each that is not."""
        for expert in range(layer.experts):
            key = ExpertKey(layer.layer, expert)
            extents = self.content.experts.get(key)
            if extents is None:
                problem = "expert is not in the catalog"
                self.findings.append(
                    Finding(Kind.MISSING, problem, str(self.content.path), root=0, layer=key.layer, expert=expert)
                )
            else:
                yield key, extents

    def _claim(self, expected: ExpectedFile) -> int | None:
        """Return the number of an expected file, compared with the manifest; None when it is not there."""
        number = self._numbers.get((expected.root, expected.path))
        layer = None if expected.layer is None else expected.layer.layer
        if number is None:
            self._add(
                f"no file {expected.path} on root {expected.root}", path=self._manifest_path, root=expected.root,
                layer=layer,
            )  # fmt: skip
            return None
        self._claimed.add(number)
        self.files[number] = expected
        recorded = self.manifest.files[number]
        for what, a, b in (
            ("kind", recorded.kind, expected.kind),
            ("size", recorded.bytes, expected.size_bytes),
            ("header size", recorded.header_bytes, expected.header_bytes),
            ("header digest", recorded.header_digest, expected.header_digest),
        ):
            if a != b:
                problem = f"{what} of {expected.path} is {a} in the manifest, the catalog's shapes give {b}"
                self._add(problem, path=self._manifest_path, root=expected.root, layer=layer)
        return number

    def _compare_place(self, number: int, place: Place, extent: CatalogExtent, **where: Any) -> None:
        found = (extent.file, extent.offset, extent.payload_bytes, extent.stored_bytes)
        if found != (number, *place):
            names = "file, offset, payload, stored"
            self._add(f"catalog has ({names}) {found}, the format {(number, *place)}", **where)

    def _check_unclaimed(self) -> None:
        for number, file in enumerate(self.manifest.files):
            if number not in self._claimed:
                problem = f"no extent of the catalog is in {file.path} on root {file.root}"
                self._add(problem, path=self._manifest_path, root=file.root)
        for key in self.content.experts:
            layer = self.content.layers.get(key.layer)
            if layer is None or key.expert >= layer.experts:
                self._add("expert that its layer does not have", layer=key.layer, expert=key.expert)

    def _collect_targets(self) -> None:
        for key, extents in self.content.experts.items():
            payload_offset = 0
            for extent in extents:
                self._target(extent, layer=key.layer, expert=key.expert, payload_offset=payload_offset)
                payload_offset += extent.payload_bytes
        for tensor in self.content.tensors:
            layer = layer_of(tensor.name)
            self._target(tensor.weights, layer=layer, tensor=tensor.name)
            if tensor.scales is not None:
                self._target(tensor.scales, layer=layer, tensor=tensor.name + SCALES_SUFFIX)
        self.targets.sort(key=lambda target: (target.file, target.offset))

    def _target(
        self,
        extent: CatalogExtent,
        *,
        layer: int | None,
        expert: int | None = None,
        tensor: str | None = None,
        payload_offset: int = 0,
    ) -> None:
        where = {"layer": layer, "expert": expert, "tensor": tensor}
        if extent.file >= len(self.manifest.files):
            self._add(f"extent in file {extent.file}, there are {len(self.manifest.files)}", **where)
            return
        file = self.manifest.files[extent.file]
        if extent.stored_bytes == 0 or extent.offset + extent.stored_bytes > file.bytes:
            self._add(f"extent is not inside {file.path}", offset=extent.offset, **where)
            return
        self.targets.append(
            Target(
                extent.file,
                extent.offset,
                extent.stored_bytes,
                extent.digest,
                layer,
                expert,
                tensor,
                payload_offset,
                extent.payload_bytes,
            )
        )

    @property
    def _manifest_path(self) -> str:
        return str(self.content.path.with_name(MANIFEST_NAME))
