"""Decoding and prefill with experts from the drive and from memory, against what the drive and memory deliver.

    python bench/streaming.py --container HOME [--rounds 3] [--tokens 8] [--prefetch 16] [--chunks 8,32,64]

Every round measures once: plain O_DIRECT reads of the same experts into huge-page slots (the drive's rate), the
same leases without a model (the source's rate), memory's rate, decoding with all experts cached, and decoding
with no cache (a few working slots) in three modes: without look-ahead, with it, and with an oracle that knows
what each layer will ask for, which shows what the scheduling is able to. Then prefill, in chunks of each size.
The same tokens everywhere, so the same experts. Medians are printed, of ratios those of the rounds; the last line
is JSON.

`of_limit` is the time per token over the greater of two: the bytes that were asked for at the drive's rate, and
the cached time. `of_shared_limit` is that over what a perfect schedule reaches where the two slow each other:
the step as it is beside plain reads, with what these read meanwhile, then the rest at the drive's rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from k3 import kernels
from k3.base.huge_pages import HugePages
from k3.base.page_buffers import huge_buffer, populate
from k3.container.reader import Container
from k3.engine.definition.model_options import ModelOptions
from k3.engine.forward.lookahead import Array, LookAhead
from k3.engine.forward.model import Model
from k3.engine.forward.observer import Observers, PassObserver
from k3.engine.forward.state import State
from k3.engine.report.machine_rates import MemoryMeter
from k3.engine.run.trace_observers import LastRouting
from k3.model.architecture import ModelConfig
from k3.model.tensor_names import needed_names
from k3.store.lending.file_source import DEFAULT_THREADS, PART_BYTES, WORKING_SLOTS, FileSource
from k3.store.protocol.plane_sizes import slot_bytes_for
from k3.store.source import ExpertSource, LeaseStream, SourceStats

Asked = dict[int, list[int]]
"""The experts that one pass asks for: layer -> experts."""


class Switch:
    """An `ExpertSource` that is whichever one is set: the model is loaded once, for all of them."""

    def __init__(self) -> None:
        self.source: ExpertSource | None = None

    def _current(self) -> ExpertSource:
        assert self.source is not None
        return self.source

    def lease(self, layer: int, experts: Sequence[int]) -> LeaseStream:
        """See `ExpertSource.lease`."""
        return self._current().lease(layer, experts)

    def prefetch(self, layer: int, experts: Sequence[int]) -> Callable[[], None]:
        """See `ExpertSource.prefetch`."""
        return self._current().prefetch(layer, experts)

    def stats(self) -> SourceStats:
        """See `ExpertSource.stats`."""
        return self._current().stats()

    def huge_pages(self) -> HugePages:
        """See `ExpertSource.huge_pages`."""
        return self._current().huge_pages()

    def close(self) -> None:
        """See `ExpertSource.close`."""
        self._current().close()


class Oracle(LookAhead):
    """Look-ahead that knows: `asked` is what the pass at hand asks for."""

    asked: Asked

    def likeliest(self, layer: int, choice: Array) -> Sequence[int]:
        """Return what the layer will ask for, as much as there is room for."""
        return self.asked[layer][: self._most]


class Rig:
    """One loaded model over a container, and tokens to run through it."""

    def __init__(self, home: Path, tokens: int, seed: int = 1) -> None:
        self.container = Container.open(home)
        self.config = ModelConfig.from_raw(self.container.config, home / "config.json")
        self.switch = Switch()
        names = needed_names(self.container.tensor_names(), self.config)
        with closing(self.container.begin_load(names)) as reading:
            self.model = Model(self.container, self.config, self.switch, ModelOptions(), reading)
            self.model.load()
        self.ids: list[int] = np.random.default_rng(seed).integers(0, self.config.vocab, tokens).tolist()
        self.layers = [layer for layer in self.config.layers if layer in self.config.moe_layers]
        self.slot_bytes = max(
            slot_bytes_for(self.container.expert_layout(layer).payload_bytes) for layer in self.layers
        )
        self.all_bytes = self.slot_bytes * sum(self.container.expert_count(layer) for layer in self.layers)
        self.asked: list[Asked] = []  # per token, of the first run
        self._seen = LastRouting()

    @contextmanager
    def using(self, look_ahead: LookAhead | None = None, **options: object) -> Iterator[FileSource]:
        """Return a file source in the switch."""
        source = FileSource(self.container, **options)  # type: ignore[arg-type]
        self.switch.source = source
        observers: list[PassObserver] = [self._seen] if look_ahead is None else [look_ahead, self._seen]
        self.model.observer = Observers(observers)
        try:
            yield source
        finally:
            source.close()

    def run(self, chunk: int, before: Callable[[int], None] = lambda number: None) -> list[float]:
        """Seconds of each pass over the tokens, `chunk` at a time, from an empty state."""
        state, seconds = State(self.config, len(self.ids)), []
        for number, start in enumerate(range(0, len(self.ids), chunk)):
            before(number)
            began_s = time.perf_counter()
            self.model.forward(self.ids[start : start + chunk], state)
            seconds.append(time.perf_counter() - began_s)
            if chunk == 1 and len(self.asked) < len(self.ids):
                self.asked.append(self._routed())
        return seconds

    def _routed(self) -> Asked:
        return {layer: routing.wanted() for layer, routing in self._seen.routing.items()}

    def requests(self) -> list[tuple[int, list[int]]]:
        """Everything that the tokens one by one ask for, in order."""
        return [(layer, experts) for asked in self.asked for layer, experts in asked.items()]

    @property
    def dense_bytes(self) -> int:
        """Dense weights that a decoded token reads."""
        return self.model.resident_bytes - self.model.embedding_bytes


def raw_rate(rig: Rig, beside: Callable[[], object] | None = None) -> float:
    """Bytes per second of reading all requests' experts, nothing else: with a source's threads and parts.

    With `beside`, they are read over and over while that is done.
    """
    stride = -(-rig.slot_bytes // 4096) * 4096
    slots = huge_buffer(WORKING_SLOTS * stride)
    populate(slots)
    parts = []
    keys = [(layer, expert) for layer, experts in rig.requests() for expert in experts]
    for number, key in enumerate(keys):
        place = number % WORKING_SLOTS * stride
        for extent in rig.container.expert_extents(*key):
            for at in range(0, extent.stored_bytes, PART_BYTES):
                nbytes = min(PART_BYTES, extent.stored_bytes - at)
                parts.append((extent.path, extent.offset + at, place, nbytes))
                place += nbytes
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in {part[0] for part in parts}}
    todo, lock = iter(parts) if beside is None else itertools.cycle(parts), threading.Lock()
    failures: list[BaseException] = []
    read_bytes = [0] * DEFAULT_THREADS
    enough = threading.Event()

    def work(number: int) -> None:
        try:
            while not enough.is_set():
                with lock:
                    part = next(todo, None)
                if part is None:
                    return
                path, offset, place, nbytes = part
                assert os.preadv(files[path], [slots[place : place + nbytes].data], offset) == nbytes
                read_bytes[number] += nbytes
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(DEFAULT_THREADS)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    if beside is not None:
        try:
            beside()
        finally:
            enough.set()
    for thread in threads:
        thread.join()
    taken_s = time.perf_counter() - began_s
    for file in files.values():
        os.close(file)
    if failures:
        raise failures[0]
    return sum(read_bytes) / taken_s


def source_rate(rig: Rig) -> float:
    """Bytes per second of leasing all requests' experts, digests on, the next request made before one is taken."""
    with rig.using(working_slots=2 * WORKING_SLOTS) as source:
        for lease in list(source.lease(rig.layers[0], range(2 * WORKING_SLOTS))):  # touch every slot
            lease.release()
        before = source.stats().read_bytes
        began_s = time.perf_counter()
        streams: list[LeaseStream] = []
        for layer, experts in rig.requests():
            streams.append(source.lease(layer, experts))
            if len(streams) == 2:
                for lease in streams.pop(0):
                    lease.release()
        for stream in streams:
            for lease in stream:
                lease.release()
        return (source.stats().read_bytes - before) / (time.perf_counter() - began_s)


def cached_decode(rig: Rig) -> dict[str, float]:
    """Measure one token after the other with all experts in memory: seconds and bytes touched per token.

    Both rates are also measured while plain reads of experts go on: on some machines memory and drive share what
    moves bytes.
    """
    with rig.using(cache_bytes=rig.all_bytes, verify="first") as source:
        rig.run(1)
        before = source.stats()
        seconds = rig.run(1)
        slowed: list[float] = []
        slowed_rate = raw_rate(rig, lambda: slowed.extend(rig.run(1)))
        assert source.stats().read_bytes == before.read_bytes
    experts = statistics.mean(sum(len(ids) for ids in asked.values()) for asked in rig.asked)
    payload_bytes = rig.container.expert_layout(rig.layers[0]).payload_bytes
    return {
        "s": statistics.median(seconds),
        "bytes": rig.dense_bytes + experts * payload_bytes,
        "slowed_s": statistics.median(slowed),
        "slowed_rate": slowed_rate,
    }


def streaming_decode(rig: Rig, mode: str, prefetch: int) -> dict[str, float]:
    """One token after the other with nothing cached. `mode` is "off", "on" or "oracle"."""
    top_k = rig.config.moe.top_k
    look_ahead: LookAhead | None = None
    if mode == "on":
        look_ahead = LookAhead(rig.switch, prefetch, top_k, rig.model.layers)
    elif mode == "oracle":
        look_ahead = Oracle(rig.switch, prefetch, top_k, rig.model.layers)

    def before(number: int) -> None:
        if isinstance(look_ahead, Oracle):
            look_ahead.asked = rig.asked[number]

    with rig.using(look_ahead, prefetch_slots=prefetch if look_ahead else 0) as source:
        rig.run(1, before)  # touches every slot
        before_stats, began_s = source.stats(), time.perf_counter()
        rig.run(1, before)
        taken_s, stats = time.perf_counter() - began_s, source.stats()
    tokens = len(rig.ids)
    layout = rig.container.expert_layout(rig.layers[0])
    asked = statistics.mean(sum(len(ids) for ids in asked.values()) for asked in rig.asked)
    return {
        "s": taken_s / tokens,
        "read_bytes": (stats.read_bytes - before_stats.read_bytes) / tokens,
        "asked_bytes": asked * layout.payload_bytes,
        "prefetched": (stats.prefetched - before_stats.prefetched) / tokens,
        "prefetch_hits": (stats.prefetch_hits - before_stats.prefetch_hits) / tokens,
        "wait_s": (stats.wait_ns - before_stats.wait_ns) / 1e9 / tokens,
    }


def prefill(rig: Rig, chunk: int, prefetch: int = 0) -> dict[str, float]:
    """Take the tokens in `chunk` at a time with nothing cached; return seconds and bytes read per token."""
    look_ahead = LookAhead(rig.switch, prefetch, rig.config.moe.top_k, rig.model.layers) if prefetch else None
    with rig.using(look_ahead, prefetch_slots=prefetch) as source:
        seconds = rig.run(chunk)
        return {"s": sum(seconds) / len(rig.ids), "read_bytes": source.stats().read_bytes / len(rig.ids)}


def decode_round(rig: Rig, memory: MemoryMeter, prefetch: int) -> dict[str, float]:
    """All figures of one round of decoding, as plain numbers."""
    figures = {"memory_rate": memory.bytes_per_s(), "drive_rate": raw_rate(rig), "source_rate": source_rate(rig)}
    figures["source_of_drive"] = figures["source_rate"] / figures["drive_rate"]
    cached = cached_decode(rig)
    figures |= {f"cached_{name}": value for name, value in cached.items() if name != "bytes"}
    figures["cached_of_memory"] = cached["bytes"] / cached["s"] / figures["memory_rate"]
    figures["slowed_of_drive"] = cached["slowed_rate"] / figures["drive_rate"]
    for mode in ("off", "on", "oracle"):
        told = streaming_decode(rig, mode, prefetch)
        drive_s = told["asked_bytes"] / figures["drive_rate"]
        left_bytes = max(0, told["asked_bytes"] - cached["slowed_s"] * cached["slowed_rate"])
        shared_s = cached["slowed_s"] + left_bytes / figures["drive_rate"]
        figures |= {f"{mode}_{name}": value for name, value in told.items()}
        figures[f"{mode}_of_limit"] = told["s"] / max(drive_s, cached["s"])
        figures[f"{mode}_of_shared_limit"] = told["s"] / shared_s
    return figures


def main() -> None:
    """Print medians and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--container", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prefetch", type=int, default=16)
    parser.add_argument("--chunks", default="", help="sizes of chunks to try prefill with")
    parser.add_argument("--prompt", type=int, default=64)
    arguments = parser.parse_args()
    rig = Rig(arguments.container, arguments.tokens)
    with rig.using(cache_bytes=rig.all_bytes):
        rig.run(1)  # learn the routing
    rounds: list[dict[str, float]] = []
    with MemoryMeter(kernels.get_threads()) as memory:
        for _ in range(arguments.rounds):
            rounds.append(decode_round(rig, memory, arguments.prefetch))
    told = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]} if rounds else {}
    chunks = [int(size) for size in arguments.chunks.split(",") if size]
    if chunks:
        rig = Rig(arguments.container, arguments.prompt)
        for size in chunks:
            for prefetch in (0, arguments.prefetch):
                figures = prefill(rig, size, prefetch)
                name = f"chunk {size}" + (f", prefetch {prefetch}" if prefetch else "")
                told |= {f"{name}: {key}": value for key, value in figures.items()}
    for name, value in told.items():
        print(f"{name:<40}{value:>16,.4f}" if value < 1e6 else f"{name:<40}{value / 1e9:>13.3f} GB")
    stamp = datetime.now(timezone.utc).date().isoformat()
    print(json.dumps({"date": stamp, "variant": kernels.cpu_variant(), "rounds": rounds, "medians": told}))


if __name__ == "__main__":
    main()
