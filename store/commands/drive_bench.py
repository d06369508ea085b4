"""`k3-store bench`: measures random reads of expert size past the page cache.

Each drive alone and all together, by depth; then the same through the daemon.

What the drive did not do is not reported: a file that O_DIRECT does not work on, reads that the kernel says never
reached a block device, and experts that the daemon had in its cache are errors (UnsupportedError), not numbers.
Nothing is written. Called by the command's main thread; its reading threads end before it returns.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from k3.base.direct_io import ReadFile, span_bytes
from k3.base.drive_info import device_read_bytes
from k3.base.errors import DaemonError, UnsupportedError
from k3.base.page_buffers import huge_buffer
from k3.container.reader import Container
from k3.model.keys import Extent
from k3.store.client.socket_link import Link, ask_status, reading_status
from k3.store.protocol.ring_layout import Op, Source, Status

FROM_DEVICE_SHARE_MIN = 0.9
HIT_SHARE_MAX = 0.1
SAMPLE_EXPERTS = 4096
STALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement. `where` is a root's directory, "all drives" or "daemon"."""

    where: str
    depth: int
    reads: int
    read_bytes: int
    seconds: float
    from_device: bool | None  # None: the kernel does not say

    @property
    def gb_per_s(self) -> float:
        """The rate."""
        return self.read_bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How long each measurement takes and at which depths; `seed` chooses the experts."""

    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    seconds: float = 2.0
    seed: int = 0


class RawBench:
    """Reads of a container's own files by threads that each do one pread after the other."""

    def __init__(self, container: Container, options: BenchOptions) -> None:
        self._options = options
        self._extents: dict[Path, list[Extent]] = {}
        dice = random.Random(options.seed)
        everything = [
            (layer, expert)
            for layer in container.expert_layers()
            for expert in range(container.expert_count(layer))
        ]
        for layer, expert in dice.sample(everything, min(SAMPLE_EXPERTS, len(everything))):
            for extent in container.expert_extents(layer, expert):
                root = next(r.directory for r in container.roots if extent.path.is_relative_to(r.directory))
                self._extents.setdefault(root, []).append(extent)

    @property
    def drives(self) -> list[Path]:
        """Roots that hold experts."""
        return sorted(self._extents)

    def run(self, on_row: Callable[[Row], None]) -> None:
        """Every drive at every depth, then all of them at once. UnsupportedError for reads from a cache."""
        for drive in self.drives:
            for depth in self._options.depths:
                on_row(self._measure(str(drive), [drive], depth))
        if len(self.drives) > 1:
            for depth in self._options.depths:
                on_row(self._measure("all drives", self.drives, depth))

    def _measure(self, where: str, drives: Sequence[Path], depth: int) -> Row:
        stop_s = time.monotonic() + self._options.seconds
        readers = [
            _Reader(self._extents[drive], stop_s, random.Random(f"{self._options.seed} {drive} {number}"))
            for drive in drives
            for number in range(depth)
        ]
        before = device_read_bytes()
        began_s = time.monotonic()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        seconds = time.monotonic() - began_s
        for reader in readers:
            if reader.failure is not None:
                raise reader.failure
        read_bytes = sum(reader.read_bytes for reader in readers)
        reads = sum(reader.reads for reader in readers)
        return Row(
            where, depth, reads, read_bytes, seconds, _from_device(where, read_bytes, before, device_read_bytes())
        )


class _Reader(threading.Thread):
    """Reads random extents until the time is over."""

    def __init__(self, extents: Sequence[Extent], stop_s: float, dice: random.Random) -> None:
        super().__init__(daemon=True)
        self._extents = extents
        self._stop_s = stop_s
        self._dice = dice
        self.reads = 0
        self.read_bytes = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        """See the class."""
        buffer = huge_buffer(max(span_bytes(extent.offset, extent.stored_bytes) for extent in self._extents))
        try:
            with ExitStack() as stack:
                files: dict[Path, ReadFile] = {}
                while time.monotonic() < self._stop_s:
                    extent = self._dice.choice(self._extents)
                    file = files.get(extent.path)
                    if file is None:
                        file = files[extent.path] = stack.enter_context(ReadFile(extent.path))
                        if not file.direct:
                            raise UnsupportedError(
                                "O_DIRECT does not work here, so these reads would measure the page cache",
                                path=extent.path,
                                advice="Put the container on a file system that can (ext4, xfs)",
                            )
                    file.read(extent.offset, extent.stored_bytes, buffer)
                    self.reads += 1
                    self.read_bytes += extent.stored_bytes
        except Exception as error:  # whatever it is, it belongs to the thread that waits for this one
            self.failure = error


def measure_daemon(path: Path, options: BenchOptions, on_row: Callable[[Row], None]) -> None:
    """Lease random experts through the daemon, `depth` at a time. UnsupportedError when its cache answered."""
    link = Link.open(path, "k3-store bench")
    try:
        layers = link.descriptor().layers
        keys = [(number, expert) for number, layer in layers.items() for expert in range(layer.experts)]
        random.Random(options.seed + 1).shuffle(keys)
        for number, depth in enumerate(options.depths):
            if depth > link.welcome.quota:
                raise UnsupportedError(
                    f"depth {depth} is more than the {link.welcome.quota} leases that a client may have", path=path
                )
            # Each depth has experts of its own, so that none has the leavings of the one before.
            mine = keys[
                number * len(keys) // len(options.depths) : (number + 1) * len(keys) // len(options.depths)
            ]
            before = _read_from_devices(path)
            row = _lease_all(link, path, mine, depth, options.seconds)
            after = _read_from_devices(path)
            came = _from_device("the daemon", row.read_bytes, before, after)
            on_row(Row("daemon", depth, row.reads, row.read_bytes, row.seconds, came))
    finally:
        link.close()


def _read_from_devices(path: Path) -> int | None:
    """Bytes that the daemon has read from block devices so far; None where its kernel does not say."""
    status = ask_status(path)
    with reading_status(path):
        found: int | None = status["device_read_bytes"]
    return found


def _lease_all(link: Link, path: Path, keys: Sequence[tuple[int, int]], depth: int, seconds: float) -> Row:
    """Until the time is over or every key was had once."""
    began_s = time.monotonic()
    waiting = iter(keys)
    outstanding = reads = hits = read_bytes = 0
    more = True
    while more or outstanding:
        while more and outstanding < depth:
            key = next(waiting, None) if time.monotonic() - began_s < seconds else None
            if key is None:
                more = False
                break
            link.ring.submit(0, Op.LEASE, key[0], [key[1]])
            outstanding += 1
        if not outstanding:
            break
        if link.ring.wait(STALL_S, link.socket.fileno()) != "completions":
            raise DaemonError(f"the daemon went silent: {link.ended() or 'no answer'}", path=path)
        for completion in link.ring.poll(depth):
            outstanding -= 1
            if completion.status != Status.OK:
                raise DaemonError(
                    f"the daemon answered with status {completion.status}", path=path, layer=completion.layer,
                    expert=completion.expert, advice="Look at k3-store status",
                )  # fmt: skip
            link.ring.release([completion.slot], [completion.generation])
            if completion.source == Source.ARENA:
                hits += 1
            else:
                reads += 1
                read_bytes += completion.payload_bytes
    if hits > HIT_SHARE_MAX * (hits + reads):
        raise UnsupportedError(
            f"{hits} of {hits + reads} experts came from the daemon's cache, so this measures no drive", path=path,
            advice="Measure a daemon that was just started, or one with a smaller --cache-gb",
        )  # fmt: skip
    return Row("daemon", depth, reads, read_bytes, time.monotonic() - began_s, None)


def _from_device(where: str, read_bytes: int, before: int | None, after: int | None) -> bool | None:
    """Whether a block device did the work. UnsupportedError when the kernel says that it did not."""
    if before is None or after is None or read_bytes == 0:
        return None
    if after - before < FROM_DEVICE_SHARE_MIN * read_bytes:
        raise UnsupportedError(
            f"of {read_bytes} bytes that {where} read, only {after - before} came from a block device: "
            "the rest was in a page cache, and is no measurement",
            advice="Measure on a local drive with a file system that honours O_DIRECT",
        )
    return True
