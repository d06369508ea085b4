"""Holds up: whatever is wrong with a container's files and records is found, named, and does not hide the rest."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3.base import checksum
from k3.base.errors import ExitCode, IncompleteError, NotAContainerError, VersionError
from k3.container.catalog import CatalogLayer, CatalogReader, write_catalog
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import JOURNAL_NAME, ROOT_NAME, pack_piece
from k3.container.manifest import SmallFile
from k3.model.keys import ExpertKey
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME
from k3.verify.files import check_small_file
from k3.verify.finding import Finding, Kind, exit_code
from k3.verify.structure import check_structure
from tests.support.containers import Built, build_container, flip, write_manifest


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home", [tmp_path / "a", tmp_path / "b"], [3, 2, 1])


def found(built: Built, *places: Path) -> list[Finding]:
    return check_structure(built.home, places).findings


def only(built: Built, *places: Path) -> Finding:
    findings = found(built, *places)
    assert len(findings) == 1, "\n".join(map(str, findings))
    return findings[0]


def layer_file(built: Built, layer: int, root: int) -> tuple[int, Path]:
    """Return number and path of a root's expert file."""
    for number, file in enumerate(built.manifest.files):
        if file.root == root and file.path.endswith(f"layer-{layer:05d}.safetensors"):
            return number, built.path(number)
    raise AssertionError


# Sound containers


@pytest.mark.parametrize("shares", [(1,), (3, 2, 1), (0, 1, 1), (1, 1000, 1)])
def test_nothing_is_found_in_a_sound_container(tmp_path: Path, shares: tuple[int, ...]) -> None:
    drives = [tmp_path / f"drive{number}" for number in range(1, len(shares))]
    built = build_container(tmp_path / "home", drives, shares)
    structure = check_structure(built.home)
    assert structure.findings == []
    everything = sum(file.bytes for file in built.manifest.files)
    headers = sum(file.header_bytes for file in built.manifest.files)
    assert sum(target.stored_bytes for target in structure.targets) == everything - headers


def test_nothing_is_found_in_a_sound_container_in_place(tmp_path: Path) -> None:
    built = build_container(tmp_path / "home", in_place=tmp_path / "snapshot")
    assert found(built) == []


def test_roots_inside_home_are_no_extra_files(tmp_path: Path) -> None:
    built = build_container(tmp_path / "home", [tmp_path / "home/mnt/a", tmp_path / "home/b"], [1, 1, 1])
    assert found(built) == []


def test_moved_roots_are_found_by_their_uuid(built: Built, tmp_path: Path) -> None:
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    assert found(built, tmp_path / "elsewhere") == []


def test_roots_are_found_from_a_link_to_home(built: Built, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to(built.home)
    assert check_structure(link).findings == []


def test_swapped_roots_are_found_by_their_uuid(built: Built, tmp_path: Path) -> None:
    (tmp_path / "a").rename(tmp_path / "x")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "x").rename(tmp_path / "b")
    assert found(built) == []


def test_a_root_in_the_place_of_one_that_is_gone(built: Built, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    finding = only(built)
    assert (finding.kind, finding.root) == (Kind.INCOMPLETE, 1)
    assert built.manifest.roots[2].uuid in finding.problem


# Single files


@pytest.mark.parametrize("root", [0, 1, 2])
def test_a_flip_in_a_header_is_found_at_its_byte(built: Built, root: int) -> None:
    number, path = layer_file(built, 2, root)
    header_bytes = built.manifest.files[number].header_bytes
    for offset in (0, 20, header_bytes - 1):  # length, JSON, padding
        flip(path, offset)
        finding = only(built)
        assert (finding.kind, finding.path, finding.offset, finding.root) == (
            Kind.DAMAGED,
            str(path),
            offset,
            root,
        )
        flip(path, offset)


@pytest.mark.parametrize("cut", [1, 4096])
def test_truncation_says_how_much_and_what_is_lost_first(built: Built, cut: int) -> None:
    number, path = layer_file(built, 1, 1)
    nbytes = built.manifest.files[number].bytes
    os.truncate(path, nbytes - cut)
    finding = only(built)
    assert (finding.kind, finding.path, finding.root) == (Kind.TRUNCATED, str(path), 1)
    assert (finding.offset, finding.nbytes) == (nbytes - cut, cut)
    assert (finding.layer, finding.expert) == (1, 4)


def test_a_dense_blob_cut_in_its_header(built: Built) -> None:
    os.truncate(built.path(0), 100)
    finding = only(built)
    assert (finding.kind, finding.tensor) == (Kind.TRUNCATED, "model.embed_tokens.weight")


def test_bytes_that_were_appended(built: Built) -> None:
    _, path = layer_file(built, 1, 0)
    nbytes = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b"x")
    finding = only(built)
    assert (finding.kind, finding.offset, finding.nbytes) == (Kind.TOO_LONG, nbytes, 1)


def test_a_missing_file(built: Built) -> None:
    _, path = layer_file(built, 1, 2)
    path.unlink()
    finding = only(built)
    assert (finding.kind, finding.path, finding.root) == (Kind.MISSING, str(path), 2)


def test_a_directory_in_place_of_a_file(built: Built) -> None:
    _, path = layer_file(built, 1, 2)
    path.unlink()
    path.mkdir()
    assert only(built).kind is Kind.MISSING


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", CATALOG_NAME])
def test_small_files(built: Built, name: str) -> None:
    path = built.home / name
    data = path.read_bytes()
    for change, kind in (
        (lambda: flip(path, len(data) // 2), Kind.DAMAGED),
        (lambda: os.truncate(path, len(data) - 1), Kind.TRUNCATED),
        (lambda: path.write_bytes(data + b"\n"), Kind.TOO_LONG),
        (path.unlink, Kind.MISSING),
    ):
        change()
        finding = only(built)
        assert (finding.kind, finding.path, finding.root) == (kind, str(path), 0)
        path.write_bytes(data)
    assert found(built) == []


def test_a_small_file_that_becomes_a_pipe_as_it_is_opened_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real_open = tmp_path / "config.json", os.open
    path.write_bytes(b"{}")

    def swapped(name: Path, *arguments: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return real_open(name, *arguments)

    monkeypatch.setattr(os, "open", swapped)
    checked = check_small_file(path, checksum.digest(b"{}").hex(), 2, root=0)
    assert ([finding.problem for finding in checked.findings], checked.equal) == (["not a file"], False)


def test_root_files(built: Built) -> None:
    path = built.directories[1] / ROOT_NAME
    data = path.read_bytes()
    for offset in range(len(data)):  # names, UUIDs, punctuation: always this file, never a lost root
        flip(path, offset)
        finding = only(built)
        assert (finding.kind, finding.path, finding.root) == (Kind.DAMAGED, str(path), 1)
        flip(path, offset)
    path.unlink()
    finding = only(built)
    assert (finding.kind, finding.path, finding.root) == (Kind.MISSING, str(path), 1)


def test_extra_files_are_warnings_with_their_place(built: Built) -> None:
    paths = [
        built.home / "notes.txt",
        built.home / "experts" / "layer-00009.safetensors",
        built.directories[1] / "experts" / "layer-00001.safetensors.partial",
        built.directories[1] / "dense.safetensors.partial",
    ]
    for path in paths:
        path.write_bytes(b"x")
    (built.directories[1] / "lost+found").mkdir()  # a drive's own: not ours to complain about
    findings = found(built)
    assert {finding.path for finding in findings} == {str(path) for path in paths}
    assert {finding.kind for finding in findings} == {Kind.EXTRA}
    assert exit_code(findings) is ExitCode.OK


def test_a_damaged_catalog_does_not_hide_a_damaged_header(built: Built) -> None:
    flip(built.home / CATALOG_NAME, 9000)
    _, path = layer_file(built, 2, 0)
    flip(path, 30)
    flip(built.home / "config.json", 3)
    kinds = {(finding.kind, Path(finding.path or "").name) for finding in found(built)}
    assert kinds == {
        (Kind.DAMAGED, CATALOG_NAME), (Kind.DAMAGED, path.name), (Kind.DAMAGED, "config.json")
    }  # fmt: skip


# Roots and whole containers


def test_a_missing_root(built: Built, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "b")
    flip(built.directories[1] / ROOT_NAME, 5)  # the rest is still looked at
    kinds = {(finding.kind, finding.root) for finding in found(built)}
    assert kinds == {(Kind.INCOMPLETE, 2), (Kind.DAMAGED, 1)}
    assert exit_code([f for f in found(built) if f.root == 2]) is ExitCode.INCOMPLETE


def test_a_root_of_another_container(built: Built, tmp_path: Path) -> None:
    build_container(tmp_path / "other", [tmp_path / "c", tmp_path / "d"], [3, 2, 2], seed=1)
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "d").rename(tmp_path / "b")
    finding = only(built)
    assert (finding.kind, finding.root) == (Kind.INCOMPLETE, 2)
    assert "holds a root of container" in finding.problem


def test_the_source_of_an_in_place_container_is_gone(tmp_path: Path) -> None:
    built = build_container(tmp_path / "home", in_place=tmp_path / "snapshot")
    (tmp_path / "snapshot").rename(tmp_path / "moved")
    assert only(built).kind is Kind.INCOMPLETE
    assert found(built, tmp_path / "moved") == []
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--a--b" / "snapshots" / "1").symlink_to(tmp_path / "moved")
    assert found(built, tmp_path / "models--a--b") == []
    next((tmp_path / "moved").iterdir()).unlink()
    assert only(built, tmp_path / "moved").kind is Kind.MISSING


def test_an_unfinished_container(built: Built) -> None:
    (built.home / JOURNAL_NAME).write_bytes(b"")
    assert only(built).kind is Kind.EXTRA
    (built.home / MANIFEST_NAME).unlink()
    with pytest.raises(IncompleteError):
        check_structure(built.home)


def test_what_is_no_container(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotAContainerError):
            check_structure(path)
    (tmp_path / MANIFEST_NAME).write_text("{}")
    with pytest.raises(NotAContainerError):
        check_structure(tmp_path)


@pytest.mark.parametrize("version", [2, 1000])
def test_a_newer_version_is_not_judged(built: Built, version: int) -> None:
    path = built.home / MANIFEST_NAME
    path.write_text(path.read_text().replace('"version": 1,', f'"version": {version},'))
    with pytest.raises(VersionError, match=str(version)):
        check_structure(built.home)


@pytest.mark.parametrize("version", ["0", "-1", '"1"', "null", "1.0"])
def test_versions_that_never_were(built: Built, version: str) -> None:
    path = built.home / MANIFEST_NAME
    path.write_text(path.read_text().replace('"version": 1,', f'"version": {version},'))
    finding = only(built)
    assert (finding.kind, finding.path) == (Kind.DAMAGED, str(path))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_flip_in_the_manifest_passes(built: Built, data: st.DataObject) -> None:
    path = built.home / MANIFEST_NAME
    good = path.read_bytes()
    offset = data.draw(st.integers(0, len(good) - 1))
    flip(path, offset, 1 << data.draw(st.integers(0, 7)))
    try:
        findings = found(built)
        assert exit_code(findings) is ExitCode.DAMAGED, "\n".join(map(str, findings))
    except (NotAContainerError, VersionError):
        pass  # the format's name or number was hit: refused as well
    finally:
        path.write_bytes(good)


# Records that contradict each other, all with right digests


def rewrite_catalog(built: Built, change: Callable[[dict[str, Any]], None]) -> None:
    """Write another catalog and a manifest that vouches for it."""
    reader = CatalogReader(built.home / CATALOG_NAME)
    content: dict[str, Any] = {
        "files": reader.files(),
        "layers": reader.layers(),
        "experts": {ExpertKey(layer, expert): extents for layer, expert, extents in reader.experts()},
        "tensors": reader.tensors(),
    }
    reader.close()
    change(content)
    path = built.home / CATALOG_NAME
    write_catalog(
        path,
        content["files"],
        content["layers"].values(),
        [(key.layer, key.expert, b"".join(map(packed, extents))) for key, extents in content["experts"].items()],
        content["tensors"],
        expected_bytes=1 << 20,
    )
    data = path.read_bytes()
    small = SmallFile(CATALOG_NAME, len(data), checksum.digest(data).hex())
    write_manifest(built, replace(built.manifest, catalog=small))


def packed(extent: CatalogExtent) -> bytes:
    return pack_piece(extent.file, extent.offset, extent.payload_bytes, extent.stored_bytes, extent.digest)


def _two_experts_at_one_place(content: dict[str, Any]) -> None:
    content["experts"][ExpertKey(1, 3)] = content["experts"][ExpertKey(1, 2)]


def _swapped_experts(content: dict[str, Any]) -> None:
    experts = content["experts"]
    experts[ExpertKey(1, 3)], experts[ExpertKey(1, 2)] = experts[ExpertKey(1, 2)], experts[ExpertKey(1, 3)]


def _a_piece_too_few(content: dict[str, Any]) -> None:
    content["experts"][ExpertKey(1, 3)].pop()


def _pieces_in_another_order(content: dict[str, Any]) -> None:
    content["experts"][ExpertKey(1, 3)].reverse()


def _a_shorter_payload(content: dict[str, Any]) -> None:
    extents = content["experts"][ExpertKey(1, 3)]
    extents[0] = replace(extents[0], payload_bytes=extents[0].payload_bytes - 1)


def _a_file_that_is_not(content: dict[str, Any]) -> None:
    extents = content["experts"][ExpertKey(1, 3)]
    extents[0] = replace(extents[0], file=99)


def _beyond_the_end(content: dict[str, Any]) -> None:
    extents = content["experts"][ExpertKey(1, 3)]
    extents[0] = replace(extents[0], offset=1 << 40)


@pytest.mark.parametrize(
    "change",
    [
        _two_experts_at_one_place,
        _swapped_experts,
        _a_piece_too_few,
        _pieces_in_another_order,
        _a_shorter_payload,
        _a_file_that_is_not,
        _beyond_the_end,
    ],
)
def test_a_catalog_that_points_elsewhere(built: Built, change: Callable[[dict[str, Any]], None]) -> None:
    rewrite_catalog(built, change)
    findings = found(built)
    assert {finding.kind for finding in findings} == {Kind.INCONSISTENT}
    assert {(finding.layer, finding.expert) for finding in findings} <= {(1, 2), (1, 3)}
    assert (1, 3) in {(finding.layer, finding.expert) for finding in findings}


def test_an_expert_that_is_not_catalogued(built: Built) -> None:
    rewrite_catalog(built, lambda content: content["experts"].pop(ExpertKey(2, 4)))
    finding = only(built)
    assert (finding.kind, finding.layer, finding.expert) == (Kind.MISSING, 2, 4)


def test_an_expert_of_no_layer(built: Built) -> None:
    rewrite_catalog(
        built, lambda content: content["experts"].update({ExpertKey(3, 0): content["experts"][ExpertKey(2, 4)]})
    )
    finding = only(built)
    assert (finding.kind, finding.layer, finding.expert) == (Kind.INCONSISTENT, 3, 0)


def test_fewer_experts_than_the_file_holds(built: Built) -> None:
    """The last expert's bytes would belong to nothing."""

    def change(content: dict[str, Any]) -> None:
        layer = content["layers"][1]
        content["layers"][1] = CatalogLayer(1, layer.experts - 1, layer.layout)
        content["experts"].pop(ExpertKey(1, layer.experts - 1))

    rewrite_catalog(built, change)
    findings = found(built)
    assert {(finding.kind, finding.layer) for finding in findings} == {(Kind.INCONSISTENT, 1)}
    assert any("size of experts/layer-00001" in finding.problem for finding in findings)


def test_a_dense_tensor_of_another_shape(built: Built) -> None:
    def change(content: dict[str, Any]) -> None:
        content["tensors"][0] = replace(content["tensors"][0], shape=(160, 96))

    rewrite_catalog(built, change)
    assert "header digest of dense.safetensors" in only(built).problem


def test_dense_tensors_in_another_order(built: Built) -> None:
    rewrite_catalog(built, lambda content: content["tensors"].reverse())
    assert {finding.kind for finding in found(built)} == {Kind.INCONSISTENT}


def test_a_dense_tensor_too_few(built: Built) -> None:
    rewrite_catalog(built, lambda content: content["tensors"].pop())
    assert any("size of dense.safetensors" in finding.problem for finding in found(built))


def test_scales_that_do_not_fit_the_encoding(built: Built) -> None:
    def change(content: dict[str, Any]) -> None:
        content["tensors"][1] = replace(content["tensors"][1], scales=None)

    rewrite_catalog(built, change)
    assert "scales do not fit" in only(built).problem


def test_catalog_and_manifest_list_other_files(built: Built) -> None:
    rewrite_catalog(built, lambda content: content["files"].pop())
    assert "files in the catalog" in only(built).problem


def test_overlapping_extents_in_a_source(tmp_path: Path) -> None:
    built = build_container(tmp_path / "home", in_place=tmp_path / "snapshot")

    def change(content: dict[str, Any]) -> None:
        extents = content["experts"][ExpertKey(1, 3)]
        extents[0] = replace(extents[0], offset=extents[0].offset - 1)

    rewrite_catalog(built, change)
    finding = only(built)
    assert (finding.kind, finding.layer, finding.expert) == (Kind.INCONSISTENT, 1, 3)
    assert "overlaps" in finding.problem


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda m: replace(m, container=m.container.replace("0", "1")), "container UUID"),
        (lambda m: replace(m, roots=(*m.roots[:2], replace(m.roots[2], uuid=m.roots[1].uuid))), "root 2 has UUID"),
        (lambda m: replace(m, quantization={**m.quantization, "bits": 4}), "container UUID"),
        (lambda m: replace(m, geometry=replace(m.geometry, experts=6)), "5 experts in the catalog, 6"),
        (lambda m: replace(m, geometry=replace(m.geometry, expert_layers=3)), "2 expert layers"),
        (lambda m: replace(m, geometry=replace(m.geometry, layers=((1, 3),))), "which layers there are: .3."),
        (lambda m: replace(m, geometry=replace(m.geometry, page_bytes=512)), "pages of 512"),
        (lambda m: replace(m, model={**m.model, "config_digest": "1" * 32}), "two digests"),
        (lambda m: replace(m, text_files=m.text_files[1:]), "no config.json"),
        (
            lambda m: replace(m, files=(*m.files, replace(m.files[1], path="experts/x"))),
            "no extent of the catalog",
        ),
        (lambda m: replace(m, files=(replace(m.files[0], header_bytes=8192), *m.files[1:])), "header size"),
    ],
)
def test_a_manifest_that_contradicts(built: Built, change: Callable[[Any], Any], problem: str) -> None:
    write_manifest(built, change(built.manifest))
    findings = found(built)
    assert any(re.search(problem, finding.problem) for finding in findings), "\n".join(map(str, findings))
    assert exit_code(findings) is not ExitCode.OK


@pytest.mark.parametrize(
    "change",
    [
        lambda m: replace(m, files=(replace(m.files[0], path="../../etc/passwd"), *m.files[1:])),
        lambda m: replace(m, files=(replace(m.files[0], path="/etc/passwd"), *m.files[1:])),
        lambda m: replace(m, text_files=(replace(m.text_files[0], path="../x"), *m.text_files[1:])),
        lambda m: replace(m, catalog=replace(m.catalog, path="../catalog.mdb")),
        lambda m: replace(m, files=(replace(m.files[0], root=7), *m.files[1:])),
        lambda m: replace(m, files=(replace(m.files[0], root=-1), *m.files[1:])),
        lambda m: replace(m, files=(replace(m.files[0], header_bytes=10**9), *m.files[1:])),
        lambda m: replace(m, geometry=replace(m.geometry, layers=((0, 10**12),))),
        lambda m: replace(m, geometry=replace(m.geometry, layers=((2, 1),))),
        lambda m: replace(m, files=(replace(m.files[0], bytes="many"), *m.files[1:])),
        lambda m: replace(m, roots=m.roots[1:]),
        lambda m: replace(m, roots=(*m.roots[:2], replace(m.roots[2], kind="cloud"))),
        lambda m: replace(m, roots=(*m.roots[:2], replace(m.roots[2], share=-1))),
    ],
)
def test_a_manifest_that_leads_astray_is_not_followed(built: Built, change: Callable[[Any], Any]) -> None:
    write_manifest(built, change(built.manifest))
    finding = only(built)
    assert (finding.kind, finding.path) == (Kind.INCONSISTENT, str(built.home / MANIFEST_NAME))


def test_a_manifest_without_a_key(built: Built) -> None:
    path = built.home / MANIFEST_NAME
    document = json.loads(path.read_text())
    del document["geometry"]
    document["digest"] = checksum.ZERO_DIGEST_HEX
    text = json.dumps(document, indent=2) + "\n"
    document["digest"] = checksum.digest(text.encode()).hex()
    path.write_text(json.dumps(document, indent=2) + "\n")
    assert only(built).kind is Kind.INCONSISTENT
