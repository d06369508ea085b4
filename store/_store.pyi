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
    """Slots per layer, as evenly as whole numbers allow, none getting more than it has experts."""

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

class LoanRequest:
    """Experts that somebody asked of a `Lending` and has not got yet."""

class NoRoom:
    """The answer to a request that waited too long: `held` of `all` slots are held."""

    held: int
    all: int

class LoanFailure:
    """The reason why an expert did not come: `is_damage`, or the errno of a read or of opening its file."""

    @property
    def layer(self) -> int: ...
    @property
    def expert(self) -> int: ...
    @property
    def is_damage(self) -> bool: ...
    @property
    def error(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def offset(self) -> int:
        """Of the read that failed, or of the extent whose digest is wrong."""

    @property
    def file(self) -> int: ...
    @property
    def extent_offset(self) -> int: ...
    @property
    def stored_bytes(self) -> int:
        """Of the extent."""

    @property
    def digest(self) -> bytes:
        """That the extent should have."""

    @property
    def found(self) -> bytes:
        """That it has, when it is damaged."""

class Lending:
    """The data plane inside one process; see store/src/lending.h. ValueError in a forked child for what asks."""

    def __init__(
        self,
        *,
        memory: Buffer,
        slot_bytes: int,
        slots: int,
        working_slots: int,
        prefetch_slots: int,
        policy: str,
        layer_counts: Mapping[int, int],
        verify: str,
        threads: int,
        checkers: int,
        chunk_bytes: int,
        direct: bool,
        open_files: int,
        patience_s: float,
    ) -> None: ...
    def add_file(self, path: bytes) -> int:
        """Register a file, which is opened when it is first read; return its number."""

    def place(
        self,
        layer: int,
        expert: int,
        payload_bytes: int,
        pieces: Sequence[tuple[int, int, int, int, bytes | None]],
    ) -> None:
        """Say where an expert lies, once: file, offset, payload bytes, stored bytes and digest of each piece.

        ValueError when they do not make up the payload or do not fit into a slot.
        """

    def request(self, layer: int, experts: Sequence[int]) -> LoanRequest | NoRoom:
        """Ask for experts that were placed, in turn. ValueError when closed, OSError without threads."""

    def next(self, request: LoanRequest) -> tuple[int, int, int, int, int] | LoanFailure | NoRoom | None:
        """Wait for the next expert: layer, expert, slot, offset in the memory, bytes. None after the last.

        ValueError when closed.
        """

    def release(self, request: LoanRequest, slot: int) -> None: ...
    def give_up(self, request: LoanRequest) -> None:
        """Give back what a request has not handed out."""

    def prefetch(self, layer: int, experts: Sequence[int]) -> int:
        """Name experts that may be asked for, the likeliest first; return the number to take that back by."""

    def take_back(self, hint: int) -> None: ...
    def stats(self) -> dict[str, int]:
        """Return the counters of `SourceStats`."""

    def opened(self) -> list[tuple[int, bool]]:
        """Return the files that were opened, each with True if it is read past the page cache."""

    @property
    def refused_direct(self) -> int:
        """Return how many files were to be read past the page cache and could not be."""

    def close(self) -> None:
        """Begin nothing more; returns when the reads in progress have ended."""

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
    @property
    def fired(self) -> int:
        """The number of faults that happened."""

    @property
    def struck(self) -> list[tuple[int, int]]:
        """File and offset of the reads that faults struck, in their order."""
