"""The start of `k3-run`: everything that can be refused is refused, and the weights are on their way. A text's
vocabulary is read beside the weights; what is wrong with it ends the load.

Only then is `engine/run.py` imported, which goes on, and with it NumPy, the kernels and the model: the drive reads
meanwhile. What a run asks for by an option of its own (a saved state, a trace) is imported where it is asked for.
Main thread only.
"""

from __future__ import annotations

import contextlib
import importlib
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from k3.container.console import Progress
from k3.container.memory_limit import Limit, memory_limit
from k3.container.reader import Container
from k3.engine.finding import FoundModel, begin_loading, find_model
from k3.engine.plan import MemoryPlan, dense_bytes, plan_memory
from k3.engine.prompt import Prompt, checked_capacity, read_prompt
from k3.engine.report import Report
from k3.engine.settings import RunSettings, SettingsError
from k3.engine.targets import check_distinct, check_outside_model
from k3.engine.trace import FileTracer, Tracer

if TYPE_CHECKING:
    from k3.engine.logits_file import LogitsFile
    from k3.engine.state_file import SavedState
    from k3.store.route_trace import RouteTraceWriter

TURN_S = 0.0005
"""Most that a thread waits for the interpreter while weights are read: those that read, populate and check need it
between two pieces, and Python's own 5 ms is more than a drive takes for a piece."""

VOCABULARY_BYTES = 100_000_000
"""What the vocabulary of a whole model takes in memory, about."""

IMPORTS_BYTES = 20_000_000
"""What is still to be imported takes in memory, about."""


class LoadProgress:
    """While dense weights are read: shows how far they are, and has threads wait no longer than `TURN_S` for the
    interpreter. Notes in the report how long it took."""

    def __init__(self, found: FoundModel, report: Report, *, as_json: bool) -> None:
        self._source = found.source
        self._report = report
        self._began_s = time.monotonic()
        self._turn_s = sys.getswitchinterval()
        sys.setswitchinterval(TURN_S)
        self._bar = Progress(
            "loading", sum(dense_bytes(self._source, name) for name in found.names), as_json=as_json
        )

    def read(self, name: str) -> None:
        """A tensor is in memory."""
        self._bar.advance(dense_bytes(self._source, name))

    def loaded(self) -> None:
        """All of them are, or there will be no more."""
        self.close()
        self._report.load_s = time.monotonic() - self._began_s

    def close(self) -> None:
        """It is over; a second call does nothing."""
        self._bar.close()
        sys.setswitchinterval(self._turn_s)


@dataclass(frozen=True, slots=True)
class Started:
    """A run that nothing refuses any more. What it holds is closed by `run`. A container's dense weights are being
    read; of any other source's `progress` is to be told."""

    settings: RunSettings
    found: FoundModel
    plan: MemoryPlan
    prompt: Prompt
    capacity: int
    stop_ids: frozenset[int]
    saved: SavedState | None
    tracer: Tracer
    logits: LogitsFile | None
    routes: RouteTraceWriter | None
    report: Report
    progress: LoadProgress


def run(settings: RunSettings) -> None:
    """Do what the settings say. Raises K3Error."""
    check_distinct(settings)
    with contextlib.ExitStack() as stack:
        found = find_model(settings.model)
        stack.callback(found.close)
        check_outside_model(settings, found.source)
        for warning in found.warnings:
            sys.stderr.write(f"warning: {warning}\n")
        saved = _saved(found, settings)
        if saved is not None:
            stack.enter_context(saved)
        report = Report()

        def begin(plan: MemoryPlan) -> LoadProgress:
            progress = LoadProgress(found, report, as_json=settings.as_json)
            stack.callback(progress.close)
            begin_loading(found, plan, on_read=progress.read, on_loaded=progress.loaded)
            if found.loading is not None:
                stack.callback(found.loading.close)  # before the display, which it moves
            return progress

        stop_ids = frozenset() if settings.ignore_eos else frozenset(found.eos_ids())
        early = _early_plan(found, settings)
        progress = None if early is None else begin(early)
        prompt = read_prompt(found, settings, saved)
        capacity = checked_capacity(len(prompt.ids), settings, found.config.max_positions)
        tracer = stack.enter_context(_tracer(settings))
        logits = _logits(settings)
        if logits is not None:
            stack.enter_context(logits)
        routes = stack.enter_context(_routes(found, settings))
        report.resumed_tokens = 0 if saved is None else saved.taken
        report.prompt_tokens = len(prompt.ids) - report.resumed_tokens
        plan = _plan(found, settings, _limit() if early is None else early.limit, capacity)
        progress = progress or begin(plan)
        from k3.engine.run import go_on  # takes as long to import as everything before

        started = Started(
            settings, found, plan, prompt, capacity, stop_ids, saved, tracer, logits, routes, report, progress
        )
        go_on(started)


def _limit() -> Limit:
    """The memory that there is for a run, without what its imports will take."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        importlib.import_module("k3.engine.run")  # it takes 125 MB of address space, which have to count
    limit = memory_limit()
    if "k3.engine.run" in sys.modules:
        return limit
    return replace(limit, free_bytes=max(0.0, limit.free_bytes - IMPORTS_BYTES))


def _plan(found: FoundModel, settings: RunSettings, limit: Limit, capacity: int) -> MemoryPlan:
    return plan_memory(
        found.source, found.config, found.names, settings.model, limit,
        capacity=capacity, chunk=settings.chunk, every_logit=settings.logits is not None,
    )  # fmt: skip


def _early_plan(found: FoundModel, settings: RunSettings) -> MemoryPlan | None:
    """A plan with room for any number of tokens that the text can have, if it fits; None to wait for the number.

    To read the vocabulary of a whole model takes 0.4 s, in which a drive reads a gigabyte. A run that goes on from
    a state, or writes to files, waits: they are looked at with the prompt, and may be refused.
    """
    names = (settings.state, settings.logits, settings.trace, settings.route_trace)
    if not isinstance(found.source, Container) or settings.text is None or any(names):
        return None
    if not found.has_vocabulary:
        return None
    try:  # a token is at least a byte
        most = checked_capacity(len(settings.text.encode()), settings, found.config.max_positions)
    except SettingsError:  # too many, if every byte is one: their number decides
        return None
    limit = _limit()
    plan = _plan(found, settings, replace(limit, free_bytes=limit.free_bytes - VOCABULARY_BYTES), most)
    return plan if plan.fits else None


def _saved(found: FoundModel, settings: RunSettings) -> SavedState | None:
    """The state that the run goes on from, open and checked, if there is one."""
    if settings.state is None:
        return None
    from k3.engine.keeping import open_saved
    from k3.engine.opening import model_options
    from k3.engine.state_file import Binding

    options = model_options(settings.model)
    return open_saved(settings.state, Binding.of(found.source.identity, found.config, options), found.config)


def _logits(settings: RunSettings) -> LogitsFile | None:
    """The file of --logits, open, if there is to be one."""
    if settings.logits is None:
        return None
    from k3.engine.logits_file import LogitsFile

    return LogitsFile(settings.logits)


@contextlib.contextmanager
def _tracer(settings: RunSettings) -> Iterator[Tracer]:
    tracer = Tracer() if settings.trace is None else FileTracer(settings.trace)
    try:
        yield tracer
    finally:
        tracer.close()


@contextlib.contextmanager
def _routes(found: FoundModel, settings: RunSettings) -> Iterator[RouteTraceWriter | None]:
    """The routing trace, if one is wanted; published at the end, also when the user ends the run."""
    if settings.route_trace is None:
        yield None
        return
    from k3.engine.opening import open_route_trace

    with open_route_trace(found, settings.route_trace) as routes:
        try:
            yield routes
        except KeyboardInterrupt:
            if not routes.torn:
                routes.publish()
            raise
        routes.publish()
