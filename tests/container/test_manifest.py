"""Holds up manifest.json: what is written is read back, and no change of it, in any field, goes unseen."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base import checksum
from k3.base.errors import ContainerError, DamageError, K3Error, NotAContainerError, VersionError
from k3.container.manifest import (
    DataFile,
    Geometry,
    Manifest,
    Root,
    SmallFile,
    SourceShard,
    parse_manifest,
)
from tests.support.containers import build_container

PATH = Path("manifest.json")
_text = st.text(st.characters(codec="utf-8"), max_size=12)
_plain = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=12)
_uuid = st.uuids().map(str)
_sha256 = st.binary(min_size=32, max_size=32).map(bytes.hex)
_hex = st.text("0123456789abcdef", min_size=32, max_size=32)
_count = st.integers(0, 2**63 - 1)
_name = st.text(st.sampled_from("abz-_.ö漢"), min_size=1, max_size=9).filter(lambda name: name.strip("."))
_small = st.builds(SmallFile, _name, _count, _hex)
_roots = st.builds(
    lambda home, others: (home, *others),
    st.builds(Root, _uuid, st.just("home"), st.just("."), _count, st.none(), st.none()),
    st.lists(
        st.builds(
            Root, _uuid, st.sampled_from(["drive", "source"]), _text, _count, st.none() | _count, st.none() | _hex
        ),
        max_size=3,
    ),
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    roots = draw(_roots)
    file = st.builds(
        DataFile,
        st.integers(0, len(roots) - 1),
        _name,
        st.sampled_from(["experts", "dense", "source"]),
        _count,
        _count,
        st.none() | _hex,
    )
    layers = tuple(draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3)))
    return Manifest(
        container=draw(_uuid),
        model=draw(st.dictionaries(_text, st.none() | _text, max_size=4)),
        source=tuple(draw(st.lists(st.builds(SourceShard, _plain, _count, _sha256), max_size=3))),
        quantization=draw(st.dictionaries(_text, _count, max_size=3)),
        geometry=Geometry(layers, draw(_count), draw(_count), draw(_count), 4096),
        roots=roots,
        files=tuple(draw(st.lists(file, max_size=3))),
        text_files=tuple(draw(st.lists(_small, max_size=3))),
        catalog=draw(_small),
        skipped=tuple(draw(st.lists(_plain, max_size=3))),
        unknown=tuple(draw(st.lists(_plain, max_size=3))),
    )


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the manifest of a container on two drives, in place too, so that every field has a value."""
    place = tmp_path_factory.mktemp("manifest")
    built = build_container(place / "home", [place / "drive"], (1, 1), experts=2)
    return built.manifest.render()


@given(manifests())
@settings(max_examples=80, deadline=None)
def test_what_is_rendered_is_read_back(manifest: Manifest) -> None:
    data = manifest.render()
    assert parse_manifest(data, PATH) == manifest
    assert manifest.render() == data
    assert data.endswith(b"}\n")
    assert json.loads(data)["digest"] != checksum.ZERO_DIGEST_HEX


def test_keys_come_in_the_documented_order(rendered: bytes) -> None:
    assert list(json.loads(rendered)) == [
        "format", "version", "container", "model", "source", "quantization", "geometry", "roots", "files",
        "text_files", "catalog", "skipped", "unknown", "digest",
    ]  # fmt: skip


def test_every_byte_counts(rendered: bytes) -> None:
    for offset in range(len(rendered)):
        for mask in (0x01, 0x20):
            damaged = bytearray(rendered)
            damaged[offset] ^= mask
            with pytest.raises(K3Error):
                parse_manifest(bytes(damaged), PATH)


@pytest.mark.parametrize("length", [0, 1, 2, 100, -2, -1])
def test_a_cut_manifest_is_refused(rendered: bytes, length: int) -> None:
    with pytest.raises(DamageError):
        parse_manifest(rendered[:length], PATH)


@pytest.mark.parametrize("extra", [b" ", b"\n", b"{}", b"\0"])
def test_a_longer_manifest_is_refused(rendered: bytes, extra: bytes) -> None:
    with pytest.raises(DamageError):
        parse_manifest(rendered + extra, PATH)


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' * 3000, b'{"format": "other"}', b'"k3-container"'],
)
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises((DamageError, NotAContainerError)):
        parse_manifest(data, PATH)


@pytest.mark.parametrize("text", ['"\\ud800"', "[" * 300 + "]" * 300, "NaN", "1e999"])
def test_values_that_cannot_be_rendered_are_damage(rendered: bytes, text: str) -> None:
    data = rendered.replace(b'"model_type": "kimi_k3"', f'"model_type": {text}'.encode())
    assert data != rendered
    with pytest.raises(DamageError):
        parse_manifest(data, PATH)


def test_a_newer_version_is_refused_by_number(rendered: bytes) -> None:
    with pytest.raises(VersionError, match="version 2, this program reads up to 1"):
        parse_manifest(rendered.replace(b'"version": 1', b'"version": 2'), PATH)
    for bad in (b'"1"', b"0", b"-1", b"null"):
        with pytest.raises(DamageError):
            parse_manifest(rendered.replace(b'"version": 1', b'"version": ' + bad), PATH)


def resealed(rendered: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return the manifest after a change, with a right digest: written by another program, or by a bad one."""
    document = json.loads(rendered)
    change(document)
    document["digest"] = checksum.ZERO_DIGEST_HEX
    blank = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    return blank.replace(f'"digest": "{"0" * 32}"\n}}'.encode(), f'"digest": "{checksum.digest(blank).hex()}"\n}}'.encode())  # fmt: skip  # noqa: E501


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of every value inside a document, containers included."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, item in inside for leaf in leaves(item, (*path, key)))]


def put(document: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def test_no_field_may_have_another_type(rendered: bytes) -> None:
    assert parse_manifest(resealed(rendered, lambda document: None), PATH)
    free = {("model",), ("quantization",), ("digest",), ("version",), ("format",)}
    wanted = [path for path in leaves(json.loads(rendered)) if path and path[:1] not in free]
    assert len(wanted) > 60
    for path in wanted:
        for value in (True, -5, 1.5, [["a"]], {"a": 1}):
            data = resealed(rendered, partial(put, path=path, value=value))
            with pytest.raises(ContainerError, match="lacks or misuses"):
                parse_manifest(data, PATH)


def test_no_key_may_be_missing(rendered: bytes) -> None:
    document = json.loads(rendered)
    places = [path for path in leaves(document) if path and isinstance(path[-1], str) and path[:1] != ("model",)]
    for path in places:
        if path[0] in ("format", "version", "digest", "quantization") and path != ("quantization",):
            continue

        def drop(document: Any, path: tuple[Any, ...] = path) -> None:
            for key in path[:-1]:
                document = document[key]
            del document[path[-1]]

        with pytest.raises(ContainerError, match="lacks or misuses"):
            parse_manifest(resealed(rendered, drop), PATH)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../b", "a//b", "./a", ".."])
def test_no_path_leaves_its_root(rendered: bytes, path: str) -> None:
    for place in (("files", 0, "path"), ("text_files", 0, "path"), ("catalog", "path")):
        data = resealed(rendered, partial(put, path=place, value=path))
        with pytest.raises(ContainerError, match="does not stay inside its root"):
            parse_manifest(data, PATH)


NAMES = [
    ("files", 0, "path"), ("text_files", 0, "path"), ("catalog", "path"), ("source", "shards", 0, "name"),
    ("skipped", 0), ("unknown", 0),
]  # fmt: skip
FORMS = [
    ("container",), ("roots", 0, "uuid"), ("source", "shards", 0, "sha256"), ("catalog", "digest"),
    ("files", 0, "header_digest"), ("text_files", 0, "digest"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["a\0b", "\x1b]0;owned\x07", "a\u202eb", "a\nb", "x" * 401])
def test_names_are_printable_and_bounded(rendered: bytes, name: str) -> None:
    def change(document: Any, place: tuple[Any, ...]) -> None:
        document["skipped"], document["unknown"] = ["s"], ["u"]
        put(document, place, name)

    for place in NAMES:
        with pytest.raises(ContainerError, match="not a name of printable characters") as caught:
            parse_manifest(resealed(rendered, partial(change, place=place)), PATH)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", ["", "0", "G" * 64, "g57658" + "0" * 58, "A" * 32, "0" * 33, "\x1b" * 32])
def test_digests_and_identities_have_their_form(rendered: bytes, value: str) -> None:
    for place in FORMS:
        with pytest.raises(ContainerError, match="is not a valid"):
            parse_manifest(resealed(rendered, partial(put, path=place, value=value)), PATH)


@pytest.mark.parametrize("value", ["x" * 100_000, [["y" * 50_000]], 10**400, {"\x1b" * 999: 1}, -(10**400)])
def test_no_message_is_flooded_by_a_value(rendered: bytes, value: Any) -> None:
    for place in (("files", 0, "bytes"), ("roots", 0, "kind"), ("files", 0, "kind"), ("version",), ("roots",)):
        with pytest.raises(ContainerError) as caught:
            parse_manifest(resealed(rendered, partial(put, path=place, value=value)), PATH)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 800


def test_files_lie_in_roots_that_exist(rendered: bytes) -> None:
    for place, value in ((("files", 0, "root"), 2), (("roots", 0, "kind"), "drive"), (("roots",), [])):
        with pytest.raises(ContainerError):
            parse_manifest(resealed(rendered, partial(put, path=place, value=value)), PATH)


def test_identities_depend_on_content_only(rendered: bytes) -> None:
    manifest = parse_manifest(rendered, PATH)
    assert checksum.container_uuid(manifest.identity()) == manifest.container
    for number, root in enumerate(manifest.roots):
        assert root.uuid == checksum.root_uuid(manifest.container, number)
    identity = manifest.identity()
    for key in identity:
        assert checksum.container_uuid({**identity, key: None}) != manifest.container
    assert manifest.container[14] == "8"
    assert manifest.container[19] in "89ab"
