"""`DenseLoad`: dense tensors of a container, read in the background; each can be used as soon as it is checked.

One region of huge pages holds them all. Reading threads fill it read by read in the order of use, with O_DIRECT
and straight to each tensor's place. One thread faults in pages ahead of them, since a direct read into untouched
memory faults them in one by one. One thread follows and compares every extent with its digest. Only then can a
tensor be taken, as a view: nothing is copied, and no unchecked byte is handed out. NumPy is imported by the first
`take`, so that a load can begin before that import.

A read that fails, or whose bytes differ from the digest, is repeated once (`retries` counts). The first tensor, in
the order of use, that fails again ends the load: its error is raised by every `take` that would have to wait.

`take` may be called from any thread, `close` from the one that made the load. Invariants, under the one lock:

* A read's pages are faulted in by exactly one thread, and are present before it is executed. * A read belongs to
the thread that executes it until it has landed; from then on to the checking thread. * A tensor in `_ready`, by
the number of its last extent, has been checked; nothing is ever written to it again.
"""

from __future__ import annotations

import copy
import enum
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from k3.base import checksum
from k3.base.direct_io import ReadFile
from k3.base.errors import DamageError, DriveError, K3Error
from k3.base.huge_pages import HugePages, huge_pages
from k3.base.notes import note_once
from k3.base.page_buffers import huge_memory, populate
from k3.container.catalog import CatalogTensor
from k3.container.dense_plan import READ_BYTES, PlacedExtent, plan_dense
from k3.model.model_source import EncodedTensor

if TYPE_CHECKING:
    from k3.base.direct_io import Bytes

READERS = 4
"""Number of reading threads, and so of reads in flight."""

OpenFile = Callable[[Path, bool], ReadFile]


def open_file(path: Path, direct: bool) -> ReadFile:
    """Open a data file; a test may give a load another function."""
    return ReadFile(path, direct=direct)


class DenseFiles(Protocol):
    """The part of a container that a load needs."""

    def tensor(self, name: str) -> CatalogTensor:
        """Return a dense tensor's catalog entry. Raises KeyError when there is none."""

    def file_path(self, number: int) -> Path:
        """Return the path of data file `number`."""


class _Pages(enum.Enum):
    ABSENT = enum.auto()
    CLAIMED = enum.auto()
    PRESENT = enum.auto()


class DenseLoad:
    """A load, which begins when it is created. A context manager; leaving it closes the load."""

    def __init__(
        self,
        container: DenseFiles,
        names: Sequence[str],
        *,
        on_read: Callable[[str], None] | None = None,
        on_end: Callable[[], None] | None = None,
        read_bytes_max: int = READ_BYTES,
        opener: OpenFile = open_file,
    ) -> None:
        """Begin to read `names`, in this order.

        `on_read` is called with each tensor that was checked, `on_end` once at the end, also when the load fails
        or is closed; both from a thread of the load, before the tensor can be taken. Raises UnsupportedError for a
        tensor that does not lie on whole pages, MemoryError or RuntimeError when the system gives no memory or no
        threads.
        """
        self._container = container
        self._entries = {name: container.tensor(name) for name in names}
        self._plan = plan_dense([self._entries[name] for name in names], read_bytes_max)
        self._region = huge_memory(self._plan.nbytes)
        self._on_read, self._on_end = on_read, on_end
        self._opener = opener
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # a read landed, its pages are present, or the load ended
        self._checked = threading.Condition(self._lock)  # a tensor can be taken, or the load ended
        reads = len(self._plan.reads)
        self._pages = [_Pages.ABSENT] * reads
        self._landed: list[bool] = [False] * reads
        self._failed: dict[int, Exception] = {}
        self._next = 0
        self._ready: dict[str, int] = {}
        self._failure: Exception | None = None
        self._stopped = False
        self._files: dict[int, ReadFile] = {}
        self._readers_left = READERS
        self.retries = 0
        self.began_s = time.monotonic()
        self.ended_s: float | None = None
        self._threads: list[threading.Thread] = []
        try:
            for body in (self._populate_ahead, self._check_all, *[self._execute_reads] * READERS):
                thread = threading.Thread(target=body, name="k3-dense", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # the system gives no more threads, or Ctrl-C
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self._plan.nbytes

    @property
    def load_s(self) -> float:
        """Seconds from the beginning of the load to the end of reading, or until now while it lasts."""
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.began_s

    def huge_pages(self) -> HugePages:
        """Return the bytes of the region that are in huge pages, and the bytes for which those were requested."""
        return huge_pages([self._region])

    def take(self, name: str) -> EncodedTensor:
        """Return a tensor after it was read and checked. Each can be taken once, by any thread.

        Raises what ended the load if it ended before this tensor; ValueError when it was closed.
        """
        with self._lock:
            while name not in self._ready and self._failure is None and not self._stopped:
                self._checked.wait()
            if name not in self._ready:
                if self._failure is not None:
                    raise copy.copy(self._failure)  # two threads must not share one traceback
                raise ValueError(f"the load was closed before {name} was taken")
            place = self._ready.pop(name)
        return self._tensor(name, place)

    def close(self) -> None:
        """Stop reading, and wait for the reads in flight. Tensors that were taken stay valid."""
        self._stop()
        for thread in self._threads:
            thread.join()
        self._ready.clear()
        self._close_files()  # the last reading thread has closed them, unless not all were started

    def __enter__(self) -> DenseLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._arrived.notify_all()
            self._checked.notify_all()

    # Pages

    def _populate_ahead(self) -> None:
        for number in range(len(self._plan.reads)):
            try:
                self._make_present(number, wait=False)
            except Exception:  # the thread that executes this read gets the same error and reports it
                return
            if self._stopped:
                return

    def _make_present(self, number: int, *, wait: bool) -> None:
        """Fault in a read's pages unless another thread did or (without `wait`) is doing it."""
        with self._lock:
            while self._pages[number] is _Pages.CLAIMED and wait:
                self._arrived.wait()
            if self._pages[number] is not _Pages.ABSENT:
                return
            self._pages[number] = _Pages.CLAIMED
        read = self._plan.reads[number]
        outcome = _Pages.ABSENT
        try:
            populate(self._region[read.start : read.end])
            outcome = _Pages.PRESENT
        finally:
            with self._lock:
                self._pages[number] = outcome
                self._arrived.notify_all()

    # Reading

    def _execute_reads(self) -> None:
        """Execute the planned reads in order, until none is left. Errors go to the checking thread."""
        try:
            while (number := self._take_read()) is not None:
                failure: Exception | None = None
                try:
                    self._make_present(number, wait=True)
                    read = self._plan.reads[number]
                    file = self._file(read.file)
                    file.read(read.offset, read.nbytes, self._region[read.start : read.end])
                except Exception as error:
                    failure = error
                with self._lock:
                    self._landed[number] = True
                    if failure is not None:
                        self._failed[number] = failure
                    self._arrived.notify_all()
        finally:
            self._leave()

    def _take_read(self) -> int | None:
        with self._lock:
            if self._stopped or self._next == len(self._plan.reads):
                return None
            self._next += 1
            return self._next - 1

    def _file(self, number: int) -> ReadFile:
        """Return a data file, opened once for all reading threads."""
        with self._lock:
            file = self._files.get(number)
            if file is None:
                file = self._files[number] = self._opener(self._container.file_path(number), True)
            return file

    def _leave(self) -> None:
        """End a reading thread; the last one closes the files."""
        with self._lock:
            self._readers_left -= 1
            if self._readers_left == 0:
                self._close_files()

    def _close_files(self) -> None:
        """Close the data files. A fault that the drive reports then is noted; digests have proven the bytes."""
        while self._files:
            try:
                self._files.popitem()[1].close()
            except DriveError as error:
                note_once(f"close {error.path}", f"{error}. What was read of the file matched its digests")

    # Checking

    def _check_all(self) -> None:
        """Check the extents in order and hand out their tensors. Any error ends the load."""
        failure: Exception | None
        try:
            number = 0
            for place, placed in enumerate(self._plan.extents):
                number = self._check(placed, number)
                if place + 1 == len(self._plan.extents) or self._plan.extents[place + 1].tensor != placed.tensor:
                    self._hand_out(placed.tensor, place, is_last=place + 1 == len(self._plan.extents))
            failure = None
        except _StoppedError:
            failure = None
        except Exception as error:
            failure = error
        try:
            self._end()
        except Exception as error:
            failure = failure or error
        with self._lock:
            self._failure = failure
        self._stop()

    def _check(self, placed: PlacedExtent, number: int) -> int:
        """Compare an extent that begins in read `number` with its digest, after waiting for its reads.

        Returns the number of the read in which the next extent begins.
        """
        hasher = checksum.Hasher()
        position = placed.start
        while position < placed.end:
            self._await_read(number, placed)
            read = self._plan.reads[number]
            stop = min(read.end, placed.end)
            hasher.update(self._region[position:stop])
            position = stop
            if stop == read.end:
                number += 1
        if hasher.digest() != placed.extent.digest:
            extent = placed.extent
            self._read_again(placed, extent.offset, placed.start, extent.stored_bytes)
            if checksum.digest(self._region[placed.start : placed.end]) != extent.digest:
                raise DamageError(
                    "tensor does not match its digest", path=self._container.file_path(extent.file),
                    tensor=placed.tensor, offset=extent.offset,
                    advice="Run k3-verify, then repack the damaged file from the source",
                )  # fmt: skip
        return number

    def _await_read(self, number: int, placed: PlacedExtent) -> None:
        """Wait until a read has landed; repeat it if it failed."""
        with self._lock:
            while not self._landed[number] and not self._stopped:
                self._arrived.wait()
            if self._stopped:
                raise _StoppedError
            failure = self._failed.pop(number, None)
        if isinstance(failure, DriveError):
            read = self._plan.reads[number]
            self._read_again(placed, read.offset, read.start, read.nbytes)
        elif failure is not None:
            raise failure

    def _read_again(self, placed: PlacedExtent, offset: int, start: int, nbytes: int) -> None:
        """Read once more through a new descriptor. Raises DriveError naming the tensor that is being checked."""
        try:
            with self._opener(self._container.file_path(placed.extent.file), True) as file:
                file.read(offset, nbytes, self._region[start : start + nbytes])
        except K3Error as error:
            error.tensor = placed.tensor
            raise
        self.retries += 1

    def _hand_out(self, name: str, place: int, *, is_last: bool) -> None:
        """Let a tensor, whose last extent is number `place`, be taken."""
        if self._on_read is not None:
            self._on_read(name)
        if is_last:  # before it can be taken, so that `on_end` precedes the last `take`
            self._end()
        with self._lock:
            self._ready[name] = place
            self._checked.notify_all()

    def _tensor(self, name: str, place: int) -> EncodedTensor:
        """Return a checked tensor, whose last extent is number `place`, as arrays."""
        from k3.model.encoded_tensor import encoded_tensor

        entry = self._entries[name]
        if entry.scales is None:
            weights, scales = self._view(self._plan.extents[place]), None
        else:
            weights, scales = (self._view(self._plan.extents[at]) for at in (place - 1, place))
        return encoded_tensor(name, entry.encoding, entry.dtype, entry.shape, weights, scales)

    def _view(self, placed: PlacedExtent) -> Bytes:
        import numpy as np

        payload = self._region[placed.start : placed.start + placed.extent.payload_bytes]
        return np.frombuffer(payload.toreadonly(), dtype=np.uint8)

    def _end(self) -> None:
        """Note the time and call `on_end`, the first time."""
        if self.ended_s is None:
            self.ended_s = time.monotonic()
            if self._on_end is not None:
                self._on_end()


class _StoppedError(Exception):
    """Unwinds the checking thread after the load was closed."""
