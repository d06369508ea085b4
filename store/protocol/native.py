"""The typed interface of the native data plane (`k3.store._store`).

`NativeServer` is for the daemon, `NativeRing` for clients.

Adds to the C++ classes what is easier said in Python: settings with units, errors of the error tree, memfds for
the dense blob and the model. All methods of both classes may be called from any thread, except that one thread at
a time may wait on a `NativeRing`. Nothing here runs in the path of a lease in the daemon.
"""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from k3.base.direct_io import drive_error, memory_error
from k3.base.errno_advice import Operation
from k3.store._store import (
    ClientRing,
    Completion,
    Grants,
    Policy,
    Server,
    SharedMapping,
    policy_names,
    reserve,
    xxh3_128,
)
from k3.store._store import (
    make_memfd as _make_memfd,
)
from k3.store.protocol.closing import close_descriptor
from k3.store.protocol.plane_sizes import default_open_files, slot_bytes_for
from k3.store.protocol.ring_layout import DEFAULT_ENTRIES, Op
from k3.store.source import Payload

__all__ = [
    "ClientGrant", "Completion", "Grants", "NativeRing", "NativeServer", "Policy", "ServerSettings", "Woken",
    "make_memfd", "map_shared", "policy_names", "seal_all", "seal_future_write", "slot_bytes_for", "xxh3_128",
]  # fmt: skip

Verify = Literal["always", "first", "never"]
Woken = Literal["completions", "closed", "other", "timeout"]
FaultKind = Literal["error", "short", "flip", "stall"]

_F_SEAL_FUTURE_WRITE = 0x10  # not in the fcntl module before Python 3.13
_SIZE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_log = logging.getLogger("k3.store")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server is made with. See `store/src/server.h` for how the slots are divided.

    `quota` is in leases held or awaited at once, per client, at most half of `entries`; `max_clients` * `quota`
    must not exceed `slots`. A quarter of the other slots is for prefetches, the rest of them may be pinned.
    """

    slot_bytes: int
    slots: int
    max_clients: int
    quota: int
    policy: str = "least-stale"
    pins: tuple[tuple[int, int], ...] = ()
    io_depth: int = 4  # reads in progress per root
    checkers: int = 0  # threads that compute digests; 0: one per root, on at most half of the processors
    verify: Verify = "always"
    entries: int = DEFAULT_ENTRIES
    open_files: int = dataclasses.field(default_factory=default_open_files)


@dataclass(frozen=True, slots=True)
class ClientGrant:
    """A new client's number and the descriptors it must be sent. Close them here once they are sent."""

    client: int
    ring_fd: int
    request_doorbell: int
    completion_doorbell: int

    def close(self) -> None:
        """Close this side's copies of the descriptors."""
        for fd in (self.ring_fd, self.request_doorbell, self.completion_doorbell):
            close_descriptor(fd)


class NativeServer:
    """The daemon's data plane. Set up with `add_file` and `set_layer`, then `start`; `close` when done.

    UnsupportedError with the numbers when the arena's memory cannot be had, ValueError when settings contradict
    each other.
    """

    def __init__(self, settings: ServerSettings, on_reserved: Callable[[int], None] | None = None) -> None:
        """`on_reserved` is told now and then how many bytes of the arena are reserved."""
        self.settings = settings
        given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        try:
            self._server = Server(**given, on_reserved=on_reserved)
        except OSError as error:
            arena_bytes = settings.slot_bytes * settings.slots
            what = f"an arena of {settings.slots} slots of {settings.slot_bytes} bytes ({arena_bytes} in all)"
            raise memory_error(f"{what} cannot be had", error) from error

    def add_file(self, root: int, path: Path, *, direct: bool) -> int:
        """Register a file of a root (numbered from 0 without gaps) and return its number.

        DriveError when it cannot be opened.
        """
        try:
            return self._server.add_file(root, os.fspath(path), direct)
        except OSError as error:
            raise drive_error("cannot open", error, path) from error

    def set_layer(self, layer: int, payload_bytes: int, pieces: Sequence[int], records: bytes) -> None:
        """Say where a layer's experts lie.

        `pieces` holds the number of records of each expert in ascending id, `records` all of them
        (docs/container.md section 4) in that order, with the file numbers that `add_file` gave. ValueError when
        they contradict each other.
        """
        self._server.set_layer(layer, payload_bytes, list(pieces), records)

    def start(self) -> None:
        """Begin to serve."""
        try:
            self._server.start()
        except OSError as error:
            raise memory_error("the data plane cannot start its threads", error, Operation.THREAD) from error

    @property
    def arena_fd(self) -> int:
        """The arena's memfd, sealed: no shared mapping of it can be written. Valid until `close`."""
        return self._server.arena_fd

    @property
    def arena_bytes(self) -> int:
        """Size of the arena."""
        return self._server.arena_bytes

    @property
    def arena_huge_bytes(self) -> int:
        """How much of the arena is in huge pages."""
        return self._server.arena_huge_bytes

    @property
    def events_fd(self) -> int:
        """Readable while `violations` has something to tell."""
        return self._server.events_fd

    def add_client(self, name: str) -> ClientGrant:
        """Return a ring for one more client.

        UnsupportedError when descriptors or memory are short, ValueError when there are `max_clients` already.
        """
        try:
            return ClientGrant(*self._server.add_client(name))
        except OSError as error:
            raise memory_error("no ring for one more client", error) from error

    def remove_client(self, client: int) -> None:
        """Free all that a client held, awaited and pinned. Does nothing when it is not there."""
        self._server.remove_client(client)

    def violations(self) -> list[int]:
        """Clients that broke the protocol since the last call. They are cut off already; remove them."""
        return self._server.violations()

    def stats(self) -> dict[str, Any]:
        """Counters of this moment: cache, slots, roots (a list), clients (a list) and totals."""
        return self._server.stats()

    def warm(self, layer: int, experts: Sequence[int]) -> int:
        """Read experts into the cache at low priority; how many were queued. `stats()["warming"]` counts down."""
        return self._server.warm(layer, list(experts))

    def pin(self, layer: int, experts: Sequence[int]) -> int:
        """Keep experts in RAM until `unpin`; how many were accepted (fewer when the slots for pins run out)."""
        return self._server.pin(layer, list(experts))

    def unpin(self, layer: int, experts: Sequence[int]) -> int:
        """Let pinned experts go again; how many were pinned."""
        return self._server.unpin(layer, list(experts))

    def inject(
        self,
        kind: FaultKind,
        *,
        file: int = -1,
        begin: int = 0,
        end: int = 2**63,
        times: int = -1,
        probability: float = 1.0,
        argument: int = 0,
        seed: int = 0,
    ) -> None:
        """For tests: let reads of `file` (-1: any) that touch [begin, end) go wrong, `times` times (-1: always).

        `argument` is the errno of an error, the bytes that a short read returns, or the milliseconds of a stall
        (`resume_stalls` ends it earlier).
        Chances are drawn from one generator, seeded by the first rule.
        """
        self._server.inject(
            kind,
            file=file,
            begin=begin,
            end=end,
            times=times,
            probability=probability,
            argument=argument,
            seed=seed,
        )

    def clear_faults(self) -> None:
        """Undo `inject`; stalls that have begun end."""
        self._server.clear_faults()

    def resume_stalls(self) -> None:
        """End the stalls that have begun; the rules of `inject` stay."""
        self._server.resume_stalls()

    def throttle(self, root: int, bytes_per_s: int) -> None:
        """For tests: let a root be a drive of this rate (0: as fast as it is)."""
        self._server.throttle(root, bytes_per_s)

    def drain(self, timeout_s: float) -> bool:
        """Grant nothing new; whether all that was under way ended within the time."""
        return self._server.drain(timeout_s)

    def close(self) -> None:
        """End all threads and let go of memory and descriptors. Rings read as closed from here on."""
        self._server.close()

    def __enter__(self) -> NativeServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NativeRing:
    """A client's end: requests in, completions out, payloads as read-only views of the arena.

    The descriptors given stay the caller's. ValueError when the ring or the arena is not what it should be.
    """

    def __init__(
        self,
        ring_fd: int,
        arena_fd: int,
        arena_bytes: int,
        request_doorbell: int,
        completion_doorbell: int,
    ) -> None:
        self._ring = ClientRing(ring_fd, arena_fd, arena_bytes, request_doorbell, completion_doorbell)

    @property
    def entries(self) -> int:
        """Requests that fit in the ring."""
        return self._ring.entries

    @property
    def closed_by_daemon(self) -> bool:
        """Whether the daemon has closed the ring."""
        return self._ring.closed_by_daemon

    def submit(self, tag: int, op: Op, layer: int, experts: Sequence[int]) -> int:
        """Write requests for experts of a layer; how many found room in the ring (the first ones)."""
        return self._ring.submit(tag, op, layer, experts)

    def release(self, slots: Sequence[int], generations: Sequence[int]) -> int:
        """Give leases back; how many found room in the ring (the first ones)."""
        return self._ring.release(slots, generations)

    def poll(self, most: int = 256) -> list[Completion]:
        """Take the completions that are there, at most `most` and at most 256."""
        return self._ring.poll(most)

    def take(self) -> tuple[list[Grants], list[Completion]]:
        """Take the completions that are there, at most 256: runs of those that grant leases; then all others."""
        return self._ring.take()

    def wait(self, timeout_s: float | None = None, other_fd: int = -1) -> Woken:
        """Wait for completions, the ring's being closed, `other_fd` to be readable or ended, or the time."""
        woken = self._ring.wait(timeout_s, other_fd)
        assert woken in ("completions", "closed", "other", "timeout")
        return woken  # type: ignore[return-value]

    def payload(self, offset: int, payload_bytes: int) -> Payload:
        """Return a read-only view of the arena. It stays mapped as long as the view lives, also after `close`."""
        view: Payload = np.frombuffer(memoryview(self._ring), dtype=np.uint8, count=payload_bytes, offset=offset)
        return view

    def close(self) -> None:
        """Let go of the ring. Views of the arena stay readable, but the leases under them are void."""
        self._ring.close()


def make_memfd(name: str, size_bytes: int, on_reserved: Callable[[int], None] | None = None) -> tuple[int, int]:
    """Return a memfd with `size_bytes` of memory reserved, and how many of them are in huge pages.

    `on_reserved` is told now and then how many bytes are reserved. UnsupportedError with the numbers when the
    memory cannot be had.
    """
    try:
        fd = _make_memfd(name)
    except OSError as error:
        raise memory_error("no memory can be shared", error) from error
    try:
        os.ftruncate(fd, size_bytes)
        return fd, reserve(fd, size_bytes, name, on_reserved)
    except OSError as error:
        close_descriptor(fd)
        raise memory_error(f"{size_bytes} bytes of shared memory for {name} cannot be had", error) from error
    except BaseException:
        close_descriptor(fd)
        raise


def map_shared(fd: int, size_bytes: int, *, writable: bool = False) -> Payload:
    """Return the bytes of a memfd, mapped as long as there are views of them, in huge pages where it has them.

    OSError when it cannot be mapped that way. The descriptor stays the caller's.
    """
    if size_bytes == 0:
        return np.frombuffer(b"", dtype=np.uint8)
    view: Payload = np.frombuffer(memoryview(SharedMapping(fd, size_bytes, writable)), dtype=np.uint8)
    return view


def seal_future_write(fd: int) -> None:
    """From here on the memfd can only be mapped read-only, by anybody; writable mappings that exist stay."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)


def seal_all(fd: int) -> None:
    """From here on nobody can change the memfd. OSError (EBUSY) while a writable mapping exists."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_WRITE)
