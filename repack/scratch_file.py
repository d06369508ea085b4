"""A scratch file for experts whose tensors lie far apart in the source.

Published shards keep an expert's tensors together, and then nothing is ever spilled. Other layouts (all w1 first,
then all w2, or an expert over two shards) would need a whole layer in memory; their parts wait here instead.
Each part is digested while it comes from the source, and checked when it is read back.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from k3.base import checksum
from k3.base.direct_io import Bytes, drive_error
from k3.base.errno_advice import Operation
from k3.base.errors import DamageError
from k3.base.new_file import create_nameless
from k3.base.pages import page_ceil
from k3.model.keys import ExpertKey
from k3.repack.jobs import Jobs, read_order
from k3.repack.plan import ExpertRoute, Plan, Route


@dataclass(slots=True)
class _Spilled:
    slot: int
    arrived_bytes: int = 0
    parts: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # payload offset -> size, digest
    hashers: dict[int, checksum.Hasher] = field(default_factory=dict)  # payload offset -> of a part that comes


class Scratch:
    """The scratch file, made on first use and without a name, so that a killed run leaves none.

    Used from the streaming thread only.
    """

    def __init__(self, path: Path, slot_bytes: int) -> None:
        self._path = path
        self._slot_bytes = page_ceil(slot_bytes)
        self._fd = -1
        self._experts: dict[ExpertKey, _Spilled] = {}
        self._free: list[int] = []
        self._slots = 0

    def __contains__(self, key: ExpertKey) -> bool:
        return key in self._experts

    def open_expert(self, key: ExpertKey) -> None:
        """Give an expert a slot."""
        if self._fd < 0:
            try:
                self._fd = create_nameless(self._path.parent, "scratch")
            except OSError as error:
                raise drive_error(
                    "cannot make the scratch file", error, self._path, operation=Operation.MAKE
                ) from error
        slot = self._free.pop() if self._free else self._slots
        self._slots = max(self._slots, slot + 1)
        self._experts[key] = _Spilled(slot)

    def write(self, key: ExpertKey, payload_offset: int, begun_bytes: int, data: Bytes, last: bool) -> int:
        """Append source bytes of the part at `payload_offset`, of which `begun_bytes` are there already.

        Returns how many bytes of the expert have arrived in all.
        """
        spilled = self._experts[key]
        position = spilled.slot * self._slot_bytes + payload_offset + begun_bytes
        if begun_bytes == 0:
            spilled.hashers[payload_offset] = checksum.Hasher()
        spilled.hashers[payload_offset].update(data.data)
        done = 0
        while done < len(data):
            try:
                done += os.pwrite(self._fd, data[done:].data, position + done)
            except OSError as error:
                raise drive_error(
                    "cannot write", error, self._path, position + done, operation=Operation.WRITE
                ) from error
        spilled.arrived_bytes += len(data)
        if last:
            digest = spilled.hashers.pop(payload_offset).digest()
            spilled.parts[payload_offset] = (begun_bytes + len(data), digest)
        return spilled.arrived_bytes

    def take(self, key: ExpertKey, into: Bytes) -> None:
        """Read a complete expert back into `into` and free its slot. DamageError if a part has changed."""
        spilled = self._experts.pop(key)
        base = spilled.slot * self._slot_bytes
        for offset, (nbytes, digest) in spilled.parts.items():
            part = into[offset : offset + nbytes]
            done = 0
            while done < nbytes:
                try:
                    count = os.preadv(self._fd, [part[done:].data], base + offset + done)
                except OSError as error:
                    raise drive_error("cannot read", error, self._path, base + offset + done) from error
                if count == 0:
                    raise DamageError("scratch file is truncated", path=self._path, offset=base + offset + done)
                done += count
            if checksum.digest(np.ascontiguousarray(part).data) != digest:
                raise DamageError(
                    "scratch file does not hold what was written to it", path=self._path, layer=key.layer,
                    expert=key.expert, offset=base + offset, advice="Check this drive, then run the command again",
                )  # fmt: skip
        self._free.append(spilled.slot)

    def close(self) -> None:
        """Give the scratch file's space back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def scratch_bytes(plan: Plan, jobs: Jobs) -> int:
    """Return the most bytes that the scratch file will hold when all shards of a plan are streamed. Pure."""
    if plan.in_place or not plan.layers:
        return 0
    slot = page_ceil(max(layer.layout.payload_bytes for layer in plan.layers.values()))
    missing: dict[ExpertKey, int] = {}
    in_memory: set[ExpertKey] = set()
    slots = peak = 0
    routes: dict[int, deque[Route]] = {}
    for read in read_order(
        [(number, shard.size_bytes) for number, shard in enumerate(plan.snapshot.shards)], jobs
    ):
        if read.offset == 0:
            routes[read.number] = deque(plan.routes(read.number))
        left = routes[read.number]
        end = read.offset + read.nbytes
        while left and left[0].offset < end:
            route = left[0]
            arrived = min(route.offset + route.nbytes, end) - max(route.offset, read.offset)
            if isinstance(route.to, ExpertRoute) and arrived:
                key = route.to.key
                if key not in missing:
                    missing[key] = plan.layers[key.layer].layout.payload_bytes
                    if len(in_memory) < jobs.resident_experts:
                        in_memory.add(key)
                    else:
                        slots += 1
                        peak = max(peak, slots)
                missing[key] -= arrived
                if missing[key] == 0:
                    if key in in_memory:
                        in_memory.remove(key)
                    else:
                        slots -= 1
            if route.offset + route.nbytes > end:
                break
            left.popleft()
    return peak * slot
