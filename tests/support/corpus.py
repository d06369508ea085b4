"""The files that others may hand us, and what reads each: for damage of every kind, by seed.

A target is sound bytes and a function that reads them as the product does. What it returns says what was read, so
that a reading of mutated bytes that is not refused can be compared with the right one.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import zstandard

from k3.base import checksum
from k3.base.regular_file import RegularFile
from k3.checkpoint.safetensors_header import read_header
from k3.container.catalog import CatalogReader
from k3.container.layout import ROOT_NAME
from k3.container.manifest import Manifest, parse_manifest
from k3.container.reader import Container, locate_roots, read_manifest
from k3.engine.definition.tokenizer import Tokenizer
from k3.engine.forward.state import State
from k3.engine.run.state_file import SavedState, write_state
from k3.model.architecture import ModelConfig
from k3.model.keys import ExpertKey
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME
from k3.model.model_config import parse_config
from k3.model.vocabulary import (
    GENERATION_NAME,
    RANKS_NAME,
    SPECIAL_NAMES_NAME,
    parse_eos_ids,
    parse_vocabulary,
)
from k3.repack.journal import Journal
from k3.repack.journal_file import ShardRecord, read_journal
from k3.store.client.daemon_model import DaemonModel
from k3.store.client.socket_link import Link
from k3.store.protocol.model_descriptor import describe, parse_descriptor, place_dense
from k3.store.routing.route_trace import (
    Choice,
    RoutedPass,
    RouteHeader,
    TracedLayer,
    write_route_trace,
)
from k3.store.routing.simulate import compulsory
from k3.store.routing.trace_requests import Requests
from tests.engine.test_state_file import BINDING, filled, small_config
from tests.support.containers import build_container
from tests.support.engines import VECTORS
from tests.support.mutants import MUTATIONS, mutated, mutated_json

TARGETS = (
    "catalog", "manifest", "manifest with its digest", "root.json", "journal", "config", "tokenizer",
    "tokenizer config", "generation config", "state", "header", "route trace", "route trace inside its frame",
    "model descriptor",
)  # fmt: skip
"""Names of what `make_target` makes."""


@dataclass(frozen=True)
class Target:
    """Sound bytes, the function that reads them, and one that damages them.

    `agrees` is True of each result that a reading of damaged bytes may have instead of being refused.
    """

    sound: bytes
    read: Callable[[bytes], Any]
    mutate: Callable[[random.Random], bytes]
    agrees: Callable[[Any], bool] = lambda found: True


def any_damage(data: bytes) -> Callable[[random.Random], bytes]:
    """Return a function that makes one damage of a random kind to `data`."""
    return lambda rng: mutated(data, rng.choice(MUTATIONS), rng)


def make_target(name: str, place: Path) -> Target:
    """Return the target of this name, whose files are written into `place`."""
    makers: dict[str, Callable[[Path], Target]] = {
        "catalog": _catalog, "manifest": _manifest, "manifest with its digest": _sealed_manifest,
        "root.json": _root_file, "journal": _journal, "config": _config, "tokenizer": _tokenizer,
        "tokenizer config": _tokenizer_config, "generation config": _generation_config, "state": _state,
        "header": _header, "route trace": _route_trace, "route trace inside its frame": _route_trace_inside,
        "model descriptor": _model_descriptor,
    }  # fmt: skip
    return makers[name](place)


def _catalog(place: Path) -> Target:
    path = build_container(place / "home", [place / "a"], [1, 2]).home / CATALOG_NAME
    data = path.read_bytes()

    def read(found: bytes) -> Any:
        reader = CatalogReader(path, found)
        experts = list(reader.experts())
        assert all(reader.expert(layer, expert) == extents for layer, expert, extents in experts)
        return reader.files(), reader.layers(), reader.tensors(), experts

    return Target(data, read, any_damage(data))


def _manifest(place: Path) -> Target:
    home = build_container(place / "home", [place / "a"], [1, 2]).home
    data = (home / MANIFEST_NAME).read_bytes()
    right = parse_manifest(data, Path(MANIFEST_NAME))

    def read(found: bytes) -> Manifest:
        return parse_manifest(found, Path(MANIFEST_NAME))

    return Target(data, read, lambda rng: mutated_json(data, rng), lambda found: bool(found == right))


def _sealed_manifest(place: Path) -> Target:
    target = _manifest(place)

    def mutate(rng: random.Random) -> bytes:
        changed = mutated_json(target.sound, rng)
        try:
            document = json.loads(changed)
            document["digest"] = "0" * 32
            blank = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
        except (ValueError, RecursionError, TypeError):
            return changed
        return blank.replace(b"0" * 32 + b'"\n}', checksum.digest(blank).hex().encode() + b'"\n}')

    return replace(target, mutate=mutate, agrees=lambda found: True)


def _root_file(place: Path) -> Target:
    built = build_container(place / "home", [place / "a"], [1, 2])
    path = built.directories[1] / ROOT_NAME
    data = path.read_bytes()
    manifest = read_manifest(built.home)

    def read(found: bytes) -> Any:
        path.write_bytes(found)
        return locate_roots(built.home, manifest, [])

    right = read(data)
    return Target(data, read, lambda rng: mutated_json(data, rng), lambda found: bool(found == right))


def _journal(place: Path) -> Target:
    path = place / "journal.mdb"
    journal = Journal(path)
    journal.begin({"shares": [1, 2], "probes": {}})
    for start in range(0, 200, 40):
        journal.commit({ExpertKey(0, n): (n.to_bytes(16, "big"),) for n in range(start, start + 40)}, {}, {})
    journal.commit({}, {n: (bytes(16),) for n in range(9)}, {"s": ShardRecord("ab" * 32, 1, 2)})
    journal.close()
    data = path.read_bytes()
    right = read_journal(path)

    def read(found: bytes) -> Any:
        path.write_bytes(found)
        return read_journal(path)

    def agrees(found: Any) -> bool:
        if found.request is None:
            return path.stat().st_size == 0
        return bool(
            found.request == right.request
            and found.experts.items() <= right.experts.items()
            and found.tensors.items() <= right.tensors.items()
            and found.shards.items() <= right.shards.items()
        )

    return Target(data, read, any_damage(data), agrees)


def _config(place: Path) -> Target:
    data = (VECTORS / "tiny_s0" / "config.json").read_bytes()
    path = Path("config.json")

    def read(found: bytes) -> Any:
        return ModelConfig.from_raw(parse_config(found, path), path)

    return Target(data, read, lambda rng: mutated_json(data, rng))


def _decoded(ranks: bytes, names: bytes) -> str:
    vocabulary = parse_vocabulary(ranks, Path(RANKS_NAME), names, Path(SPECIAL_NAMES_NAME), 512)
    return Tokenizer(vocabulary).decode(range(300))


def _tokenizer(place: Path) -> Target:
    data = (VECTORS / "tiny_s0" / RANKS_NAME).read_bytes()
    names = (VECTORS / "tiny_s0" / SPECIAL_NAMES_NAME).read_bytes()
    return Target(data, lambda found: _decoded(found, names), any_damage(data))


def _tokenizer_config(place: Path) -> Target:
    data = (VECTORS / "tiny_s0" / SPECIAL_NAMES_NAME).read_bytes()
    ranks = (VECTORS / "tiny_s0" / RANKS_NAME).read_bytes()
    return Target(data, lambda found: _decoded(ranks, found), lambda rng: mutated_json(data, rng))


def _generation_config(place: Path) -> Target:
    data = b'{"bos_token_id": 1, "eos_token_id": [2, 300], "pad_token_id": 0}\n'
    path = Path(GENERATION_NAME)
    return Target(data, lambda found: parse_eos_ids(found, path, 512), lambda rng: mutated_json(data, rng))


def _state(place: Path) -> Target:
    config = small_config()
    state = filled(config, 4, 3, np.random.default_rng(1))
    path = place / "state"
    write_state(path, state, config, BINDING, [1, 2, 3], np.zeros(5, np.float32), "ids")
    data = path.read_bytes()

    def read(found: bytes) -> Any:
        path.write_bytes(found)
        into = State(config, 4)
        with SavedState(path, BINDING, config) as saved:
            logits = saved.restore(into)
        return logits.tobytes(), into.position

    right = read(data)
    return Target(data, read, any_damage(data), lambda found: bool(found == right))


def _header(place: Path) -> Target:
    whole = min((VECTORS / "tiny_s0").glob("*.safetensors"))
    data = whole.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    path = place / "x.safetensors"

    def read(found: bytes) -> Any:
        path.write_bytes(found)
        with RegularFile(path) as file:
            return read_header(file)[1]

    def mutate(rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutated(data[:size], rng.choice(MUTATIONS), rng) + data[size:]
        header = mutated_json(data[8:size], rng)
        return len(header).to_bytes(8, "little") + header + data[size:]

    return Target(data, read, mutate)


def _route_trace(place: Path) -> Target:
    path = place / "trace"
    header = RouteHeader("a model", 2, (TracedLayer(1, 40, 9792), TracedLayer(2, 40, 9792)))
    ids = np.arange(16, dtype=np.uint16)
    choice = Choice(np.full(8, 2, np.uint16), ids)
    write_route_trace(path, header, [RoutedPass(position, 8, (choice, choice)) for position in range(0, 80, 8)])
    data = path.read_bytes()

    def read(found: bytes) -> Any:
        path.write_bytes(found)
        requests = Requests.from_trace(path)
        once = compulsory(requests)
        return requests.header, requests.passes, requests.tokens, requests.experts.tolist(), once.bytes_read

    right = read(data)
    return Target(data, read, any_damage(data), lambda found: bool(found == right))


def _route_trace_inside(place: Path) -> Target:
    """Return a target whose damage is made before compression, so that the frame's checksum is right."""
    target = _route_trace(place)
    content = zstandard.ZstdDecompressor().decompressobj().decompress(target.sound)
    size = int.from_bytes(content[12:16], "little")

    def mutate(rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            changed = mutated(content, rng.choice(MUTATIONS), rng)
        else:
            header = mutated_json(content[16 : 16 + size], rng)
            changed = content[:12] + len(header).to_bytes(4, "little") + header + content[16 + size :]
        return zstandard.ZstdCompressor(write_checksum=True).compress(changed)

    return replace(target, mutate=mutate, agrees=lambda found: True)


def _model_descriptor(place: Path) -> Target:
    """Return the target for the model descriptor, which a client reads from what may be another user's daemon."""
    home = build_container(place / "home", [place / "a"], [1, 2]).home
    with contextlib.closing(Container.open(home, [place / "a"])) as container:
        tensors, dense_bytes = place_dense(tuple(container.tensor(name) for name in container.tensor_names()))
        config = (VECTORS / "tiny_s0" / "config.json").read_bytes()
        data = describe(container, tensors, {"config.json": config}, [place / "x"]).render()

    memory = np.zeros(dense_bytes, np.uint8)

    def read(found: bytes) -> Any:
        descriptor = parse_descriptor(found, dense_bytes)
        model = DaemonModel(cast(Link, SimpleNamespace(descriptor=lambda: descriptor, dense=memory)))
        for name in model.tensor_names():
            model.read_tensor(name)
        return model.identity, descriptor.layers

    return Target(data, read, lambda rng: mutated_json(data, rng))
