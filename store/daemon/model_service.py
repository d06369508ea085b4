"""What the daemon serves: a container, its dense tensors in memory, and the native server over its drives.

`Service.open` does everything that can fail before a client is let in, in the order of what it costs: find the
container, check all of its roots, decide about RAM, read the dense tensors, start the drives. It knows no sockets.
Belongs to the daemon's main thread; `status` may be called from any.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3.base.direct_io import ReadFile
from k3.base.drive_info import DriveInfo, device_read_bytes, drive_info
from k3.base.errors import ContainerError, DaemonError, UnsupportedError
from k3.base.memory_limit import memory_limits
from k3.base.pages import PAGE_BYTES, page_ceil
from k3.container.layout import pack_piece
from k3.container.reader import Container
from k3.model.kinds import CATALOG_NAME
from k3.store.daemon.cache_budget import CachePlan, Wanted, plan_cache
from k3.store.daemon.container_home import find_home
from k3.store.daemon.model_memory import ModelMemory
from k3.store.lending.file_source import Verify
from k3.store.protocol import wire
from k3.store.protocol.model_descriptor import place_dense
from k3.store.protocol.native import ClientGrant, NativeServer, ServerSettings

LEAST_QUOTA = 32
"""Experts that a client can surely hold: two layers of the 16 that a token of the real model picks."""

PROMISED_SHARE = 2
"""One part in this many of the slots is promised to clients when there are plenty; the rest is for the cache."""

QUOTA_MAX = 512
RING_ENTRIES = 1024
DESCRIPTORS_PER_CLIENT = 5
SPARE_DESCRIPTORS = 40
RATE_SAMPLES = 10
HUGE_PAGE_BYTES = 2 << 20
HANGING_S = 5.0
"""A read of at most 4 MiB that takes longer than this is told of in the log."""

_DRIVE_COUNTERS = ("reads", "read_bytes", "read_ns", "busy_ns", "errors", "re_reads")

_log = logging.getLogger("k3.store")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What to serve and how. `cache_bytes`, `reserve_bytes`, `quota` None: decided by what there is."""

    directories: tuple[Path, ...] = ()
    container: Path | None = None
    cache_bytes: int | None = None
    reserve_bytes: int | None = None
    max_clients: int = 8
    quota: int | None = None
    policy: str = "least-stale"
    io_depth: int = 4
    verify: Verify = "always"
    direct: bool = True
    more_descriptors: int = 0
    """Descriptors that something else in this process needs, such as metrics."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What travels beside a welcome. Close the grant when it is sent."""

    grant: ClientGrant
    descriptors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DriveRoot:
    """A root that holds experts, as the server numbers it."""

    path: Path
    share: int
    info: DriveInfo
    direct: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """What had been read at one moment, per drive."""

    at_s: float
    read_bytes: tuple[int, ...]


class Service:
    """The data side of the daemon. Close it to let go of everything."""

    def __init__(
        self,
        container: Container,
        server: NativeServer,
        plan: CachePlan,
        settings: ServeSettings,
        drives: Sequence[DriveRoot],
        memory: ModelMemory,
        quota: int,
    ) -> None:
        self._container = container
        self._server = server
        self._plan = plan
        self._settings = settings
        self._drives = tuple(drives)
        self._memory = memory
        self._quota = quota
        self._began_s = time.monotonic()
        self._samples: deque[Sample] = deque(maxlen=RATE_SAMPLES + 1)
        self._hanging: set[int] = set()
        self.sample()

    @classmethod
    def open(cls, settings: ServeSettings, on_progress: Callable[[str, int, int], None]) -> Service:
        """Everything up to the first client. `on_progress` is told what is done, how many bytes, and of how many.

        Raises K3Error: no container, a root missing, damage, too little memory, too few descriptors.
        """
        home = find_home(settings.directories, settings.container)
        with contextlib.ExitStack() as undo:
            container = Container.open(home, settings.directories)
            undo.callback(container.close)
            layers = container.expert_layers()
            if not layers:
                raise UnsupportedError("this container has no experts to serve", path=home)
            plan, quota = _decide(container, settings)
            for line in plan.lines():
                _log.info("memory: %s", line)
            _allow_descriptors(settings.max_clients, settings.more_descriptors)
            server = NativeServer(
                ServerSettings(
                    slot_bytes=plan.slot_bytes, slots=plan.slots, policy=settings.policy,
                    io_depth=settings.io_depth, verify=settings.verify, max_clients=settings.max_clients,
                    quota=quota, open_files=_open_files(settings.max_clients),
                ),
                lambda done_bytes: on_progress("reserving memory for experts", done_bytes, plan.cache_bytes),
            )  # fmt: skip
            undo.callback(server.close)
            drives, files = _register(container, server, settings.direct)
            memory = ModelMemory.load(container, files, settings.direct, on_progress)
            undo.callback(memory.close)
            _tell_huge_pages("experts", server.arena_huge_bytes, server.arena_bytes)
            _tell_huge_pages("dense tensors", memory.huge_bytes, memory.dense_bytes)
            server.start()
            undo.pop_all()
            return cls(container, server, plan, settings, drives, memory, quota)

    @property
    def max_clients(self) -> int:
        """Clients that may be attached at once."""
        return self._settings.max_clients

    @property
    def events_fd(self) -> int:
        """Readable when `violations` has something to say."""
        return self._server.events_fd

    @property
    def budget(self) -> CachePlan:
        """How the cache's size was decided."""
        return self._plan

    def violations(self) -> list[int]:
        """Clients whose ring was invalid."""
        return self._server.violations()

    def add_client(self, name: str) -> tuple[wire.Welcome, Invitation]:
        """Return a ring for a new client. DaemonError when there are as many clients as are allowed."""
        attached = len(self._server.stats()["clients"])
        if attached >= self._settings.max_clients:
            raise DaemonError(
                f"{attached} clients are attached, as many as may be",
                advice="Wait for one to end, or raise --max-clients",
            )
        grant = self._server.add_client(name)
        welcome = wire.Welcome(
            version=wire.VERSION,
            client=grant.client,
            container=self._container.manifest.container,
            home=str(self._container.home.resolve()),
            slot_bytes=self._plan.slot_bytes,
            slots=self._plan.slots,
            quota=self._quota,
            ring_bytes=os.fstat(grant.ring_fd).st_size,
            arena_bytes=self._server.arena_bytes,
            dense_bytes=self._memory.dense_bytes,
            model_bytes=self._memory.model_bytes,
        )
        shared = (self._server.arena_fd, grant.ring_fd, self._memory.dense, self._memory.model)
        return welcome, Invitation(grant, (*shared, grant.request_doorbell, grant.completion_doorbell))

    def remove_client(self, client: int) -> None:
        """Free everything that a client holds and waits for."""
        self._server.remove_client(client)

    def drain(self, timeout_s: float) -> bool:
        """Grant nothing new; whether all reads ended within the time."""
        return self._server.drain(timeout_s)

    def close(self) -> None:
        """Stop the drives and let go of files and memory."""
        self._server.close()
        self._memory.close()
        self._container.close()

    # What it says of itself

    def sample(self) -> None:
        """Note what has been read so far, for rates, and tell of drives that hang; called about once a second."""
        roots = self._server.stats()["roots"]
        self._samples.append(Sample(time.monotonic(), tuple(drive["read_bytes"] for drive in roots)))
        for number, (drive, counters) in enumerate(zip(self._drives, roots, strict=True)):
            age_s = counters["oldest_read_ns"] / 1e9
            if age_s >= HANGING_S and number not in self._hanging:
                self._hanging.add(number)
                _log.warning("%s hangs: a read has been under way for %.0f s", drive.path, age_s)
            elif age_s < HANGING_S and number in self._hanging:
                self._hanging.remove(number)
                _log.warning("%s answers again", drive.path)

    def one_line(self) -> str:
        """For `systemctl status`."""
        stats = self._server.stats()
        cache = stats["cache"]
        asked = cache["hits"] + cache["misses"] + cache["joined"]
        share = f"{100 * cache['hits'] / asked:.0f} % hits" if asked else "nothing asked yet"
        return (
            f"{len(stats['clients'])} clients, {self._plan.slots} slots ({self._plan.cache_bytes / 1e9:.3f} GB), "
            f"{share}, {sum(drive['errors'] for drive in stats['roots'])} drive errors"
        )

    def status(self) -> dict[str, Any]:
        """Everything but the sockets' side of `k3-store status --json`."""
        stats = self._server.stats()
        return {
            "version": wire.VERSION,
            "container": self._container.manifest.container,
            "home": str(self._container.home.resolve()),
            "uptime_s": round(time.monotonic() - self._began_s, 3),
            "device_read_bytes": device_read_bytes(),
            "io_depth": self._settings.io_depth,
            "verify": self._settings.verify,
            "max_clients": self._settings.max_clients,
            "quota": self._quota,
            "drives": self._drive_status(stats),
            "cache": self._cache_status(stats),
            "dense": {"bytes": self._memory.dense_bytes, "huge_bytes": self._memory.huge_bytes,
                      "load_s": round(self._memory.load_s, 3)},
            "clients": [_client_status(client) for client in stats["clients"]],
            "budget": [
                {"term": term.name, "bytes": term.size_bytes if term.size_bytes < float("inf") else None}
                for term in self._plan.terms
            ],
        }  # fmt: skip

    def _drive_status(self, stats: Any) -> list[dict[str, Any]]:
        oldest = self._samples[0]
        elapsed_s = max(1e-9, time.monotonic() - oldest.at_s)
        shares = sum(drive.share for drive in self._drives) or 1
        bounds_s = [*(bound_ns / 1e9 for bound_ns in stats["read_bounds_ns"]), None]
        found = []
        for number, (drive, counters) in enumerate(zip(self._drives, stats["roots"], strict=True)):
            recent_bytes = counters["read_bytes"] - oldest.read_bytes[number]
            busy_s = counters["busy_ns"] / 1e9
            found.append({
                "path": str(drive.path), "device": drive.info.device, "model": drive.info.model,
                "share": round(drive.share / shares, 4), "direct": bool(counters["direct"]),
                "queue": counters["queued"] + counters["in_flight"],
                "oldest_read_s": round(counters["oldest_read_ns"] / 1e9, 3),
                "recent_gb_per_s": round(recent_bytes / elapsed_s / 1e9, 3),
                "busy_gb_per_s": round(counters["read_bytes"] / busy_s / 1e9, 3) if busy_s else 0.0,
                **{key: counters[key] for key in _DRIVE_COUNTERS},
                "verify_failures": counters["damaged"],
                "read_times": [
                    {"up_to_s": bound_s, "reads": reads}
                    for bound_s, reads in zip(bounds_s, counters["read_classes"], strict=True)
                ],
            })  # fmt: skip
        return found

    def _cache_status(self, stats: Any) -> dict[str, Any]:
        counters = dict(stats["cache"])
        return {
            "policy": self._settings.policy, "slots": self._plan.slots, "slot_bytes": self._plan.slot_bytes,
            "bytes": self._plan.cache_bytes, "huge_bytes": self._server.arena_huge_bytes,
            "states": dict(stats["slots"]), "coalesced": counters.pop("joined"), **counters,
            **{key: stats[key] for key in ("checked_bytes", "failed", "pinned", "warming", "waiting_for_slot")},
        }  # fmt: skip


def _client_status(counters: dict[str, Any]) -> dict[str, Any]:
    rest = dict(counters)
    return {"client": rest.pop("id"), **rest}


def _decide(container: Container, settings: ServeSettings) -> tuple[CachePlan, int]:
    """Slots and quota. UnsupportedError with the numbers when there is too little memory."""
    layers = container.expert_layers()
    _, dense_bytes = place_dense(tuple(container.tensor(name) for name in container.tensor_names()))
    wanted = Wanted(
        slot_bytes=_slot_bytes(container),
        experts=sum(container.expert_count(layer) for layer in layers),
        dense_bytes=dense_bytes,
        rings_bytes=settings.max_clients * page_ceil(4096 + RING_ENTRIES * (32 + 64)),
        least_slots=settings.max_clients * (settings.quota or LEAST_QUOTA),
        cache_bytes=settings.cache_bytes,
        reserve_bytes=settings.reserve_bytes,
    )
    plan = plan_cache(memory_limits(), wanted)
    if settings.quota is not None:
        return plan, settings.quota
    share = plan.slots // PROMISED_SHARE // settings.max_clients
    return plan, min(QUOTA_MAX, max(LEAST_QUOTA, share))


def _tell_huge_pages(what: str, huge_bytes: int, size_bytes: int) -> None:
    """One line; a warning when there could have been some and the kernel gave none."""
    level = logging.WARNING if huge_bytes == 0 and size_bytes >= HUGE_PAGE_BYTES else logging.INFO
    hint = "" if level == logging.INFO else ": reads from the drives cost more (Linux 6.1 or newer can give them)"
    _log.log(
        level, "huge pages for %s: granted %d of %d MB%s", what, huge_bytes // 10**6, size_bytes // 10**6, hint
    )


def _slot_bytes(container: Container) -> int:
    """Room for the largest expert. One that lies somewhere inside a page of a shard takes that page's rest too."""
    layouts = [container.expert_layout(layer) for layer in container.expert_layers()]
    in_shards = any(root.kind == "source" for root in container.manifest.roots)
    return max(page_ceil(layout.payload_bytes) for layout in layouts) + (PAGE_BYTES if in_shards else 0)


def _allow_descriptors(max_clients: int, more: int) -> None:
    """Raise the soft limit as far as it is needed. UnsupportedError when the hard one is too low."""
    needed = SPARE_DESCRIPTORS + DESCRIPTORS_PER_CLIENT * max_clients + more
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < needed:
        if hard != unlimited and hard < needed:
            raise UnsupportedError(
                f"{max_clients} clients need {needed} descriptors and this process may have {hard} (ulimit -n)",
                advice="Raise the limit (LimitNOFILE= in the unit), or lower --max-clients",
            )
        soft = needed if hard == unlimited else min(hard, 4 * needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _open_files(max_clients: int) -> int:
    """Expert files that may be open at once: half of what clients and the rest leave."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 256
    return max(4, min(256, (soft - SPARE_DESCRIPTORS // 2 - DESCRIPTORS_PER_CLIENT * max_clients) // 2))


def _register(container: Container, server: NativeServer, direct: bool) -> tuple[list[DriveRoot], list[Path]]:
    """Tell the server every file and expert. Its roots are those that hold experts; its files are returned."""
    manifest = container.manifest
    wanted = [number for number, file in enumerate(manifest.files) if file.kind != "dense"]
    roots = sorted({manifest.files[number].root for number in wanted})
    works = {}
    for number in wanted:
        path = container.file_path(number)
        with ReadFile(path, direct=direct) as file:
            works[number] = file.direct
    numbers: dict[int, int] = {}
    files: list[Path] = []
    for root in roots:
        of_root = [number for number in wanted if manifest.files[number].root == root]
        for number in of_root:
            path = container.file_path(number)
            numbers[number] = server.add_file(roots.index(root), path, direct=works[number])
            files.append(path)
        if direct and not all(works[number] for number in of_root):
            _log.warning(
                "%s cannot be read with O_DIRECT: reads go through the page cache", container.roots[root].directory
            )
    _set_layers(container, server, numbers)
    drives = [
        DriveRoot(
            container.roots[root].directory.resolve(),
            manifest.roots[root].share,
            drive_info(container.roots[root].directory),
            all(works[number] for number in wanted if manifest.files[number].root == root),
        )
        for root in roots
    ]
    return drives, files


def _set_layers(container: Container, server: NativeServer, numbers: dict[int, int]) -> None:
    records: dict[int, list[bytes]] = {layer: [] for layer in container.expert_layers()}
    pieces: dict[int, list[int]] = {layer: [] for layer in records}
    for layer, expert, extents in container.catalog.experts():
        known = pieces.get(layer)
        if known is None:
            raise _unsound(container, layer, expert, "has an expert of a layer that it does not have")
        if expert != len(known):
            raise _unsound(container, layer, len(known), "lacks an expert")
        if not numbers.keys() >= {item.file for item in extents}:
            raise _unsound(container, layer, expert, "places an expert in a file that has none")
        known.append(len(extents))
        records[layer] += [
            pack_piece(numbers[item.file], item.offset, item.payload_bytes, item.stored_bytes, item.digest)
            for item in extents
        ]
    for layer in records:
        payload_bytes = container.expert_layout(layer).payload_bytes
        try:
            server.set_layer(layer, payload_bytes, pieces[layer], b"".join(records[layer]))
        except ValueError as error:
            raise _unsound(container, layer, None, f"does not fit: {error}") from error


def _unsound(container: Container, layer: int, expert: int | None, problem: str) -> ContainerError:
    """Return the error for a catalog that matches its digest and contradicts itself: it was written like that."""
    path = container.home / CATALOG_NAME
    advice = "Repack: this container was not made by k3-repack, or by one with a fault"
    return ContainerError(f"the catalog {problem}", path=path, layer=layer, expert=expert, advice=advice)
