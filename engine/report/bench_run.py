"""The body of `k3-run bench`: load a model once, then time prompts and generations on it.

A test is repeated on sequences of random token ids, each repetition on another sequence, after one repetition
that is not counted. Ids depend only on the seed, the lengths of the test and the repetition, so that two runs, or
two chunk sizes, use the same experts. Text and sampling play no part. The memory's rate is measured around each
repetition and the drives' rate before each test; shares are of these.

A rate is called a drive's only if drives delivered the bytes: see `_reads_from`. Main thread only.
"""

from __future__ import annotations

import contextlib
import platform
import random
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

from k3 import kernels
from k3.base.drive_info import device_read_bytes
from k3.base.errors import UnsupportedError
from k3.base.memory_limit import gb, memory_limit
from k3.base.streams import say
from k3.engine.definition.settings import ModelSettings, SettingsError
from k3.engine.forward.model import Model
from k3.engine.launch.launched import opened_model
from k3.engine.launch.model_files import OpenedModel
from k3.engine.report.bench_table import Format, Machine, ReadsFrom, Result, Sample, Table, Workload, open_table
from k3.engine.report.bytes_per_pass import Traffic, chunk_sizes, parameter_count
from k3.engine.report.machine_rates import MEMORY_BYTES, MemoryMeter, drive_rate
from k3.engine.run.generation import read_warnings
from k3.engine.run.ready import ready_model
from k3.engine.run.session import Session
from k3.model.keys import Encoding
from k3.store.source import ExpertSource

FROM_DEVICE_SHARE_MIN = 0.9
"""Least share of requested bytes that a block device must have delivered for a rate to be a drive's."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Lengths to measure, and the way to measure them.

    A length of zero makes no test. Depths apply to all tests, chunks to prompts.
    """

    model: ModelSettings
    prompts: tuple[int, ...]
    gens: tuple[int, ...]
    depths: tuple[int, ...]
    chunks: tuple[int, ...]
    repetitions: int
    warm_up: bool
    seed: int
    form: Format


def run_bench(settings: BenchSettings) -> None:
    """Run all tests and print their table. K3Error; KeyboardInterrupt after the results so far were printed."""
    tests = plan_tests(settings)
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(opened_model(settings.model))
        check_room(tests, opened.config.max_positions)
        # The meter comes before the model, so that the memory plan counts the meter's memory.
        meter = stack.enter_context(_memory_meter(settings.model.threads or kernels.get_threads()))
        ready = stack.enter_context(
            ready_model(
                opened, settings.model,
                capacity=max(test.depth + test.tokens for test in tests), chunk=max(settings.chunks),
            )
        )  # fmt: skip
        table = open_table(settings.form, sys.stdout)
        measuring = _Measuring(opened, ready.model, ready.experts, settings, table, meter)
        try:
            for test in tests:
                measuring.run(test)
        finally:
            table.end()
        for warning in read_warnings(ready.experts, ready.weights, direct=settings.model.direct):
            say(f"warning: {warning}\n")


def plan_tests(settings: BenchSettings) -> list[Workload]:
    """Return the tests in the order in which they are run. SettingsError when there are none."""
    tests = [
        Workload(prompt, 0, depth, chunk)
        for depth in settings.depths
        for prompt in settings.prompts
        for chunk in settings.chunks
        if prompt
    ]
    tests += [Workload(0, gen, depth, 1) for depth in settings.depths for gen in settings.gens if gen]
    if not tests:
        raise SettingsError("nothing to measure: no prompt (-p) and no generation (-n) longer than 0")
    return tests


def check_room(tests: list[Workload], max_positions: int) -> None:
    """Raise SettingsError for a test that the model's context does not hold."""
    for test in tests:
        if test.depth + test.tokens > max_positions:
            raise SettingsError(
                f"{test.name} needs {test.depth + test.tokens} tokens, more than the model's context of "
                f"{max_positions} (max_position_embeddings)"
            )


def _memory_meter(threads: int) -> MemoryMeter:
    """Return a meter. UnsupportedError where there is no memory for its buffers."""
    limit = memory_limit()
    if limit.free_bytes < MEMORY_BYTES:
        raise UnsupportedError(
            f"measuring memory takes {gb(MEMORY_BYTES)}, and {limit.set_by} leaves {gb(limit.free_bytes)}"
        )
    return MemoryMeter(threads)


class _Measuring:
    """A loaded model, and the table of its results."""

    def __init__(
        self,
        opened: OpenedModel,
        model: Model,
        experts: ExpertSource,
        settings: BenchSettings,
        table: Table,
        meter: MemoryMeter,
    ) -> None:
        self._opened = opened
        self._model = model
        self._experts = experts
        self._settings = settings
        self._table = table
        self._meter = meter
        self._moe_layers = [layer for layer in model.config.layers if layer in model.config.moe_layers]
        self._machine = _machine(opened, model, settings.model, self._moe_layers)
        expert_bytes = opened.source.expert_layout(self._moe_layers[0]).payload_bytes if self._moe_layers else 0
        self._traffic = Traffic(
            model.config,
            multiplied_bytes=model.resident_bytes - model.embedding_bytes,
            embedding_row_bytes=model.embedding_bytes // model.config.vocab,
            expert_bytes=expert_bytes,
        )

    def run(self, test: Workload) -> None:
        """Measure one test and print its row; after an interruption, a row of the repetitions so far."""
        began = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        drive = self._drive_rate()
        samples: list[Sample] = []
        device_before = device_read_bytes()
        try:
            for repetition in range(0 if self._settings.warm_up else 1, self._settings.repetitions + 1):
                sample = self._sample(test, repetition)
                if repetition == 0:
                    device_before = device_read_bytes()
                else:
                    samples.append(sample)
        finally:
            if samples:
                origin = self._reads_from(sum(sample.read_bytes for sample in samples), device_before)
                repetitions = self._settings.repetitions
                self._table.row(Result(self._machine, test, began, repetitions, samples, drive, origin))
            if len(samples) < self._settings.repetitions and self._settings.form != "json":
                sys.stderr.write(f"\n{test.name}: {len(samples)} of {self._settings.repetitions} repetitions\n")

    def _sample(self, test: Workload, repetition: int) -> Sample:
        """Time one repetition."""
        dice = random.Random(f"{self._settings.seed} {test.prompt} {test.gen} {test.depth} {repetition}")
        ids = [dice.randrange(self._model.config.vocab) for _ in range(test.depth + test.tokens)]
        session = Session(self._model, len(ids), test.batch)
        if test.depth:
            session.prefill(ids[: test.depth])
        rate_before = self._meter.bytes_per_s()
        before = self._experts.stats()
        began_ns = time.monotonic_ns()
        if test.prompt:
            session.prefill(ids[test.depth :])
        else:
            for token in ids[test.depth :]:
                session.step(token)
        elapsed_ns = time.monotonic_ns() - began_ns
        after = self._experts.stats()
        hits = after.hits - before.hits
        asked = hits + after.joined - before.joined + after.misses - before.misses
        return Sample(
            elapsed_ns=elapsed_ns,
            moved_bytes=self._traffic.run_bytes(chunk_sizes(test.tokens, test.batch), test.depth, asked),
            read_bytes=after.read_bytes - before.read_bytes,
            wait_ns=after.wait_ns - before.wait_ns,
            asked=asked,
            hits=hits,
            memory_rate=(rate_before + self._meter.bytes_per_s()) / 2,
        )

    def _drive_rate(self) -> float | None:
        """Return the drives' rate, None where this process does not read them or O_DIRECT does not work."""
        if not self._opened.source.has_extents or not self._moe_layers:
            return None
        rate = drive_rate(self._opened.source, self._moe_layers, seed=self._settings.seed)
        return rate.bytes_per_s if rate is not None and rate.direct else None

    def _reads_from(self, read_bytes: int, device_before: int | None) -> ReadsFrom:
        """Return the source of the experts that were read.

        It is "drive" only if a block device is known to have delivered the bytes, past the page cache.
        """
        if self._opened.attachment is not None:
            return "daemon"
        if not read_bytes:
            return "memory"
        device_after = device_read_bytes()
        if not all(self._experts.stats().direct.values()):
            return "page cache"
        if device_before is not None and device_after is not None:
            came = device_after - device_before >= FROM_DEVICE_SHARE_MIN * read_bytes
            return "drive" if came else "page cache"
        return "drive"


def _machine(opened: OpenedModel, model: Model, settings: ModelSettings, moe_layers: list[int]) -> Machine:
    """Return what is the same for all tests of a run."""
    source, config = opened.source, model.config
    expert_bytes = sum(
        source.expert_count(layer) * source.expert_layout(layer).payload_bytes for layer in moe_layers
    )
    return Machine(
        version=f"k3-store {version('k3-store')}",
        cpu=_cpu_name(),
        variant=kernels.cpu_variant(),
        threads=kernels.get_threads(),
        model_path=str(_place(settings)),
        model_type=_model_type(opened, len(config.layers), config.layer_count),
        model_bytes=model.resident_bytes + expert_bytes,
        parameters=parameter_count(config),
        cache_type=config.mla.cache,
        exact=settings.exact,
        direct=settings.direct,
    )


def _model_type(opened: OpenedModel, layers: int, of_layers: int) -> str:
    """Return for example "Kimi K3 4/92 layers int8": the layers that are run, and the encoding of most weights."""
    share = "" if layers == of_layers else f" {layers}/{of_layers} layers"
    names = {Encoding.RAW: "as stored", Encoding.F32: "f32", Encoding.INT8: "int8", Encoding.INT4: "int4"}
    return f"Kimi K3{share} {names[_encoding(opened)]}"


def _encoding(opened: OpenedModel) -> Encoding:
    """Return the encoding of an attention matrix in the first layer that is run, which --bits decides."""
    name = next(name for name in opened.names if name.endswith("self_attn.o_proj.weight"))
    return opened.source.dense(name).encoding


def _place(settings: ModelSettings) -> Path:
    """Return the path by which the model was given."""
    place = settings.store or settings.container
    return settings.snapshot[0] if place is None else place


def _cpu_name() -> str:
    """Return the processor's name as the kernel gives it, else the architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
