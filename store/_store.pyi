# Types of the native module, written by hand; tests/store/test_native_layout.py compares the names.
# store/protocol/native.py is the face that other modules use for Server and ClientRing; Policy is used as it is.

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer, Self

Payload = npt.NDArray[np.uint8]
_R = TypeVar("_R")
_S = TypeVar("_S")

def xxh3_128(data: Buffer) -> bytes:
    """Return the 16 bytes of xxh3-128, seed 0, in canonical order. Releases the GIL."""

def xxh3_128_in_steps(data: Buffer, steps: Sequence[int]) -> bytes:
    """For tests: the same of data that arrives bit by bit; `steps` are ascending numbers of bytes."""

def xxh3_variant() -> str: ...
def set_xxh3_variant(name: str) -> bool: ...
def layout() -> dict[str, Any]: ...
def reserve(fd: int, size_bytes: int, name: str, on_reserved: Callable[[int], None] | None) -> int:
    """Make all pages of a memfd present; how many bytes are in huge pages. OSError when memory is refused."""

def make_memfd(name: str) -> int:
    """Return an empty memfd that can be sealed, and not executed where the kernel supports that.

    Raises OSError.
    """

def touches_guarded(fd: int, size_bytes: int) -> bool:
    """For tests: write to every page of a memory as the daemon does to a ring; whether one was not to be had."""

class SharedMapping(Buffer):
    """A mapping of a memfd as a buffer. OSError when it cannot be mapped."""

    def __init__(self, fd: int, size_bytes: int, writable: bool) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def policy_names() -> tuple[str, ...]:
    """layer-lru, lru, s3-fifo, least-stale, pin-lru; what they do is in store/src/policy.h."""

def divide(slots: int, layer_counts: Mapping[int, int]) -> dict[int, int]:
    """Slots per layer, as store.eviction.divide."""

class Policy:
    """Which experts stay: at most `capacity` of them. Not thread-safe. `pins` only with pin-lru."""

    def __init__(
        self, name: str, capacity: int, layer_counts: Mapping[int, int], pins: Sequence[tuple[int, int]] = ()
    ) -> None: ...
    def access(self, layer: int, expert: int) -> bool:
        """Note that an expert is wanted now; whether it is in. Call before insert() also when it is not."""

    def insert(self, layer: int, expert: int) -> list[tuple[int, int]]:
        """Bring in an expert that is not in (ValueError otherwise); those that left for it.

        RuntimeError, and nothing changed, when all `capacity` experts are held or pinned.
        """

    def evict_one(self) -> tuple[int, int] | None:
        """Take out the expert that would go next; None when none may."""

    def hold(self, layer: int, expert: int) -> None:
        """One holder more; a held expert is never evicted. ValueError when it is not in."""

    def unhold(self, layer: int, expert: int) -> None: ...
    def remove(self, layer: int, expert: int) -> None:
        """Take an expert out, held or not, and remember nothing of it. ValueError when it is not in."""

    def contains(self, layer: int, expert: int) -> bool: ...
    def held(self, layer: int, expert: int) -> bool: ...
    def __len__(self) -> int: ...
    @property
    def capacity(self) -> int: ...

class Completion:
    """An answer. Numbers as in store/protocol/ring_layout.py: op, status and source are plain ints."""

    tag: int
    op: int
    status: int
    source: int
    layer: int
    expert: int
    slot: int
    generation: int
    file: int
    offset: int
    payload_bytes: int
    file_offset: int
    error: int

class Lease:
    """One expert in RAM, on loan. A context manager: leaving it releases.

    Not to be made by callers; sources make them. `release` is thread-safe.
    """

    def __new__(
        cls, layer: int, expert: int, payload: Payload, on_release: Callable[[], None] | None = None, /
    ) -> Self: ...
    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def payload(self) -> Payload:
        """The expert's bytes: uint8, one-dimensional, contiguous, read-only. ValueError after release."""

    def release(self) -> None:
        """Give the expert back. Every view of its payload is invalid from here on."""

    def withdraw(self) -> tuple[Any, ...]:
        """For sources: what `on_release` would have been called with; the lease counts as released."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

class ReadyLeases(Iterator[Lease]):
    """Hands out what is in a deque, or when it is empty what `_await_next` of the derived class returns."""

    def __init__(self, ready: deque[Lease], /) -> None: ...
    def __next__(self) -> Lease: ...
    def __iter__(self) -> Self: ...

class Grants:
    """Leases of one tag and source, granted one after the other; at least one."""

    @property
    def tag(self) -> int: ...
    @property
    def source(self) -> int: ...
    @property
    def payload_bytes(self) -> int:
        """Of all of them."""

    def __len__(self) -> int: ...
    def slots(self) -> list[tuple[int, int, int]]:
        """(expert, slot, generation) of each."""

    def lend(
        self,
        awaited: set[int],
        views: dict[tuple[int, int], Payload],
        view: Callable[[int, int], Payload],
        on_release: Callable[[_R, _S, int, int], None],
        request: _R,
        session: _S,
    ) -> list[Lease]:
        """Make them leases, in order; their experts are taken from `awaited` (AssertionError for one not in it).

        Payloads are in `views` by offset and bytes, or made by `view`. `on_release` is called with request,
        session, slot and generation.
        """

class Server:
    def __init__(
        self,
        *,
        slot_bytes: int,
        slots: int,
        policy: str,
        pins: Sequence[tuple[int, int]],
        io: str,
        io_depth: int,
        checkers: int,
        verify: str,
        max_clients: int,
        quota: int,
        entries: int,
        open_files: int,
        on_reserved: Callable[[int], None] | None,
    ) -> None: ...
    def add_file(self, root: int, path: str, direct: bool) -> int: ...
    def set_layer(self, layer: int, payload_bytes: int, pieces: Sequence[int], records: Buffer) -> None: ...
    def start(self) -> None: ...
    @property
    def arena_fd(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def arena_huge_bytes(self) -> int: ...
    @property
    def events_fd(self) -> int: ...
    @property
    def io(self) -> str: ...
    @property
    def notice(self) -> str: ...
    def add_client(self, name: str) -> tuple[int, int, int, int]: ...
    def remove_client(self, client: int) -> None: ...
    def violations(self) -> list[int]: ...
    def stats(self) -> dict[str, Any]: ...
    def warm(self, layer: int, experts: Sequence[int]) -> int: ...
    def pin(self, layer: int, experts: Sequence[int]) -> int: ...
    def unpin(self, layer: int, experts: Sequence[int]) -> int: ...
    def inject(
        self,
        kind: str,
        *,
        file: int,
        begin: int,
        end: int,
        times: int,
        probability: float,
        argument: int,
        seed: int,
    ) -> None: ...
    def clear_faults(self) -> None: ...
    def resume_stalls(self) -> None: ...
    def throttle(self, root: int, bytes_per_s: int) -> None: ...
    def drain(self, timeout_s: float) -> bool: ...
    def close(self) -> None: ...

class ClientRing(Buffer):
    def __init__(
        self,
        ring_fd: int,
        arena_fd: int,
        arena_bytes: int,
        request_doorbell: int,
        completion_doorbell: int,
    ) -> None: ...
    def submit(self, tag: int, op: int, layer: int, experts: Sequence[int]) -> int: ...
    def release(self, slots: Sequence[int], generations: Sequence[int]) -> int: ...
    def poll(self, most: int) -> list[Completion]: ...
    def take(self) -> tuple[list[Grants], list[Completion]]: ...
    def wait(self, timeout_s: float | None, other_fd: int) -> str: ...
    @property
    def closed_by_daemon(self) -> bool: ...
    @property
    def entries(self) -> int: ...
    def close(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
