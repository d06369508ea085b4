"""The one contract the engine knows for experts: ask for a set, get each as it arrives, give it back.

What an `ExpertSource` promises:

* Every expert of a request arrives exactly once, in any order. Nothing may depend on the order.
* A payload is exactly the expert's bytes as its layer's `ExpertLayout` describes them, or the request raises.
  There is no third case: no zeros, no bytes of another expert, no part of an expert.
* A payload is a read-only view. It may be read from any thread until `Lease.release`, and not afterwards: the
  buffer under it is used again for another expert. A source opened with `debug=True` hands out private copies
  and fills each with `POISON` when it is released, so that a late reader sees 0xA5 and not a plausible weight.
* `lease` starts reading before it returns; the caller may do other work before it takes the first lease.
* Requests may be made from any thread, several at a time; one request's stream belongs to one thread at a
  time. A lease may be released from any thread, once; releasing it again does nothing.
* A source holds a bounded number of experts. A caller that gives leases back while it takes new ones may ask
  for any number in one request. One that keeps more than the source holds, alone or together with other
  threads, gets a `BudgetError` with the numbers, never a wait without end.
* After an error a stream is over: what was not yet handed out has been given back, leases already handed out
  stay valid until they are released. The source itself stays usable.

* `prefetch` is a hint: a source may read what it names into RAM ahead of a request, when nothing that was asked
  for is there to be read, or may do nothing. It changes no answer, takes no room that a request could use, and
  raises no error of a drive: a request for the expert will meet it. An expert that is asked for while it is being
  prefetched is read on as one that was asked for, not a second time.

A request with a duplicate id is a mistake of the programmer (ValueError); an expert or layer that the model
does not have is an `ExpertError`, since a container can hold fewer layers than the configuration names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from k3.base.direct_io import memory_of
from k3.base.errors import ExpertError, UnsupportedError
from k3.base.huge_pages import HugePages
from k3.store._store import Lease

__all__ = [
    "POISON", "BudgetError", "ExpertSource", "Lease", "LeaseStream", "Payload", "SourceStats", "checked_request",
    "poisoned_on_release", "read_only",
]  # fmt: skip

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Payload: TypeAlias = "npt.NDArray[np.uint8]"

POISON = 0xA5
"""What a debug source fills released buffers with."""


class BudgetError(UnsupportedError):
    """More experts are held at once than the source has room for."""


@dataclass(frozen=True, slots=True)
class SourceStats:
    """Counters of one source since it was opened, at one moment.

    Of every expert that was asked for, exactly one of `hits` (it was in RAM), `joined` (another request was
    just reading it) and `misses` (it was read) counts it.
    """

    hits: int = 0
    joined: int = 0
    misses: int = 0
    evictions: int = 0
    retries: int = 0  # pieces that were read a second time
    reads: int = 0  # pieces read, retries included
    read_bytes: int = 0  # bytes asked from the drives, retries included
    read_ns: int = 0  # time in reads, summed over threads
    prefetched: int = 0  # experts whose reading was begun on a hint; their bytes are in read_bytes
    prefetch_hits: int = 0  # of these, those that were asked for in time; also counted as hits or joined
    wait_ns: int = 0  # time that callers waited for an expert or for room
    checked_bytes: int = 0  # compared with their digest
    unchecked_bytes: int = 0  # not compared: no digest known, or not asked to
    slots: int = 0  # experts that fit in RAM at once
    slot_bytes: int = 0
    open_files: int = 0
    direct: Mapping[Path, bool] = field(default_factory=dict)  # per directory: reads bypass the page cache


class LeaseStream(Protocol):
    """The leases of one request as they arrive: an iterator that can be given up early."""

    def __iter__(self) -> Iterator[Lease]: ...

    def __next__(self) -> Lease: ...

    def close(self) -> None:
        """Give back everything that was not handed out. Does nothing the second time, or at the end."""


class ExpertSource(Protocol):
    """Where experts come from. See the module's text for the rules."""

    def lease(self, layer: int, experts: Sequence[int]) -> LeaseStream:
        """Ask for a set of experts of one layer.

        ValueError for duplicates or a closed source; ExpertError for an unknown layer or expert. Taking from
        the stream raises DriveError or DamageError with file, offset, layer and expert, or BudgetError.
        """

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """Hint that these experts may be asked for soon, the likeliest first. Waits for nothing.

        Returns a function that takes the hint back: what was not read and not asked for by then is left. It may
        be called at any time, from any thread, and more than once. ValueError and ExpertError as for `lease`.
        """

    def stats(self) -> SourceStats:
        """Return the counters of this moment."""

    def huge_pages(self) -> HugePages:
        """Return how much of this process's own buffers is in huge pages. Takes milliseconds."""

    def close(self) -> None:
        """Stop reading and let go of files and RAM. Streams still in use raise; leases must not be read."""


def read_only(payload: Payload | memoryview) -> Payload:
    """Return a view of the same bytes that cannot be made writable again."""
    import numpy as np

    view: Payload = np.frombuffer(memory_of(payload).toreadonly(), dtype=np.uint8)
    return view


def poisoned_on_release(
    payload: Payload, on_release: Callable[[], None] | None
) -> tuple[Payload, Callable[[], None]]:
    """For `debug` sources: a private read-only copy, and a release that poisons it before `on_release`."""
    copy = payload.copy()

    def release() -> None:
        copy.fill(POISON)
        if on_release is not None:
            on_release()

    return read_only(copy), release


def checked_request(layer: int, experts: Sequence[int], counts: Mapping[int, int]) -> tuple[int, ...]:
    """Return the expert ids of a request as plain ints, after every check that needs no I/O.

    `counts` maps each layer of the model that has experts to how many it has.
    """
    ids = tuple(map(operator.index, experts))
    if len(set(ids)) != len(ids):
        twice = sorted(expert for expert in set(ids) if ids.count(expert) > 1)
        raise ValueError(f"request for layer {layer} names experts more than once: {twice}")
    if layer not in counts:
        raise ExpertError(
            "no experts of this layer here", layer=layer, advice=f"Layers with experts: {_ranges(sorted(counts))}"
        )
    if ids and not (min(ids) >= 0 and max(ids) < counts[layer]):
        raise ExpertError(
            "no such expert",
            layer=layer,
            expert=next(expert for expert in ids if not 0 <= expert < counts[layer]),
            advice=f"The layer has experts 0 to {counts[layer] - 1}",
        )
    return ids


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as "1-92" or "1-3, 7"; "none" for an empty list."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "none"
