"""Files with experts, a server over them, and clients, for the tests of the native data plane."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from k3.base.direct_io import ReadFile
from k3.store.protocol.native import (
    ClientGrant,
    Completion,
    NativeRing,
    NativeServer,
    ServerSettings,
    slot_bytes_for,
)
from k3.store.protocol.ring_layout import Op, Status

RECORD = struct.Struct("<IIQQQ16s")
PAGE = 4096


@dataclass
class World:
    """Files on disk, and the bytes of each expert in them: payloads[layer, expert]."""

    paths: list[tuple[int, Path]]
    payload_bytes: int
    pieces: dict[int, list[int]]
    records: dict[int, bytes]
    payloads: dict[tuple[int, int], bytes]
    places: dict[tuple[int, int], list[tuple[int, int, int]]]  # file, offset, stored bytes

    def experts(self, layer: int) -> list[int]:
        return [e for number, e in self.payloads if number == layer]


def make_world(
    folder: Path,
    *,
    layers: int = 3,
    experts: int = 8,
    payload_bytes: int = 9 * PAGE - 100,
    roots: int = 1,
    unaligned: int = 0,
    seed: int = 0,
) -> World:
    """Write one file per layer and root. With `unaligned` n > 0, an expert has n unaligned extents in one root."""
    random = np.random.default_rng(seed)
    paths: list[tuple[int, Path]] = []
    contents: list[bytearray] = []
    pieces: dict[int, list[int]] = {}
    records: dict[int, bytes] = {}
    payloads: dict[tuple[int, int], bytes] = {}
    places: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for layer in range(layers):
        first = len(paths)
        for root in range(roots):
            paths.append((root, folder / f"root{root}-layer{layer}"))
            contents.append(bytearray(random.bytes(PAGE)))
        pieces[layer], packed = [], b""
        for expert in range(experts):
            payload = random.bytes(payload_bytes)
            payloads[layer, expert] = payload
            places[layer, expert] = []
            if unaligned:
                cuts = sorted(random.choice(np.arange(1, payload_bytes), unaligned - 1, replace=False).tolist())
            else:
                page_count = -(-payload_bytes // PAGE)
                cuts = [page_count * (r + 1) // roots * PAGE for r in range(roots - 1)]
            for part, (begin, end) in enumerate(zip([0, *cuts], [*cuts, payload_bytes], strict=True)):
                file = first + (0 if unaligned else part)
                stored = payload[begin:end]
                if unaligned:
                    contents[file] += random.bytes(int(random.integers(0, 700)))
                else:
                    stored += b"\0" * (-len(stored) % PAGE)
                place = (file, len(contents[file]), len(stored))
                contents[file] += stored
                places[layer, expert].append(place)
                packed += RECORD.pack(file, 0, place[1], end - begin, len(stored), xxhash.xxh3_128_digest(stored))
            pieces[layer].append(len(places[layer, expert]))
        records[layer] = packed
    for (_, path), content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return World(paths, payload_bytes, pieces, records, payloads, places)


def start_server(world: World, **overrides: Any) -> NativeServer:
    """Start a server over a world's files. `overrides` are fields of `ServerSettings`, and `direct`."""
    given: dict[str, Any] = {
        "slot_bytes": slot_bytes_for(world.payload_bytes), "slots": 16, "max_clients": 4, "quota": 2,
        "io_depth": 2,
    }  # fmt: skip
    direct = overrides.pop("direct", True)
    server = NativeServer(ServerSettings(**{**given, **overrides}))
    for root, path in world.paths:
        with ReadFile(path, direct=direct) as probe:
            server.add_file(root, path, direct=probe.direct)
    for layer, counts in world.pieces.items():
        server.set_layer(layer, world.payload_bytes, counts, world.records[layer])
    server.start()
    return server


class Client:
    """A client in this process that asks for experts, waits for them and compares their bytes."""

    def __init__(self, server: NativeServer, world: World, name: str = "test") -> None:
        self.server, self.world = server, world
        self.grant = server.add_client(name)
        self.ring = ring_of(self.grant, server)
        self.inbox: list[Completion] = []

    def close(self) -> None:
        self.ring.close()
        self.grant.close()
        self.server.remove_client(self.grant.client)

    def ask(self, layer: int, experts: Sequence[int], tag: int = 1, op: Op = Op.LEASE) -> None:
        assert self.ring.submit(tag, op, layer, list(experts)) == len(experts)

    def take(self, count: int, timeout_s: float = 30.0) -> list[Completion]:
        """Return the next `count` completions, or raise AssertionError after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while len(self.inbox) < count:
            woken = self.ring.wait(max(0.0, until - time.monotonic()))
            assert woken == "completions", f"{woken} with {len(self.inbox)} of {count} completions"
            self.inbox += self.ring.poll()
        taken, self.inbox = self.inbox[:count], self.inbox[count:]
        return taken

    def lease(self, layer: int, experts: Sequence[int]) -> list[Completion]:
        """Lease experts, all of which must be granted with their bytes."""
        self.ask(layer, experts)
        granted = self.take(len(experts))
        assert sorted(c.expert for c in granted) == sorted(experts)
        for completion in granted:
            self.check(completion)
        return granted

    def check(self, completion: Completion) -> None:
        """Assert that the completion grants the right bytes of its expert."""
        assert completion.status == Status.OK, Status(completion.status).name
        view = self.ring.payload(completion.offset, completion.payload_bytes)
        assert view.tobytes() == self.world.payloads[completion.layer, completion.expert]

    def give_back(self, completions: Sequence[Completion]) -> None:
        slots, generations = [c.slot for c in completions], [c.generation for c in completions]
        assert self.ring.release(slots, generations) == len(slots)


def ring_of(grant: ClientGrant, server: NativeServer) -> NativeRing:
    return NativeRing(
        grant.ring_fd, server.arena_fd, server.arena_bytes, grant.request_doorbell, grant.completion_doorbell
    )


@contextlib.contextmanager
def serving(world: World, **overrides: Any) -> Iterator[NativeServer]:
    server = start_server(world, **overrides)
    try:
        yield server
    finally:
        server.clear_faults()
        server.close()


@contextlib.contextmanager
def client_of(server: NativeServer, world: World, name: str = "test") -> Iterator[Client]:
    client = Client(server, world, name)
    try:
        yield client
    finally:
        client.close()
