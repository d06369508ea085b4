"""The second half of a `k3-run`: read the request, build the model, generate, print each token at once.

`engine/launch/launched.py` is the first half. The request is read and the memory planned while weights load. The
model then takes in the prompt and generates until a stop token or the number asked for. An error first ends the
printed line, so that earlier output stays readable, and says that generation stopped. With --state the run may
continue a saved timeline, which is saved however the run ends. Main thread only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from k3.base.errors import K3Error, UnsupportedError
from k3.base.streams import say
from k3.engine.definition.run_report import Report, peak_rss_bytes
from k3.engine.definition.settings import RunSettings
from k3.engine.launch.launched import Launched
from k3.engine.launch.memory_plan import plan_memory
from k3.engine.run.logits_file import LogitsFile
from k3.engine.run.model_builder import built_model
from k3.engine.run.run_request import Request, read_request
from k3.engine.run.sampler import Sampler
from k3.engine.run.session import Session
from k3.engine.run.sinks import open_sinks
from k3.engine.run.state_keeper import Keeper
from k3.engine.run.store_log import Notices
from k3.engine.run.token_output import JsonOutput, Output, TextOutput
from k3.engine.run.write_failure import write_error
from k3.model.model_source import TensorLoad
from k3.store.source import ExpertSource

MAX_TOKENS_PER_CHARACTER = 8


@dataclass(slots=True)
class Generated:
    """The tokens generated so far. `stop` is "eos" or "length"."""

    ids: list[int] = field(default_factory=list)
    stop: str = "length"


def generate(launched: Launched, settings: RunSettings) -> None:
    """Read the request, plan memory, build the model, take in the prompt and generate. Raises K3Error."""
    opened = launched.opened
    with read_request(opened, settings) as request, open_sinks(opened, settings) as sinks:
        plan = plan_memory(
            opened, settings.model, launched.limit,
            capacity=request.capacity, chunk=settings.chunk, every_logit=settings.logits is not None,
        )  # fmt: skip
        plan.check()
        with built_model(opened, settings.model, launched.weights, plan, sinks) as built:
            session = Session(built.model, request.capacity, settings.chunk)
            _run_session(session, built.experts, request, settings, sinks.logits, launched.weights)
            for warning in read_warnings(built.experts, launched.weights, direct=settings.model.direct):
                say(f"warning: {warning}\n")
        if sinks.logits is not None:
            sinks.logits.publish()


def _run_session(
    session: Session,
    experts: ExpertSource,
    request: Request,
    settings: RunSettings,
    logits: LogitsFile | None,
    weights: TensorLoad,
) -> None:
    """Restore the saved state, generate, save the state, print the report."""
    prompt, saved = request.prompt, request.saved
    report = Report(resumed_tokens=request.resumed_tokens, prompt_tokens=len(prompt.ids) - request.resumed_tokens)
    if saved is not None:
        began_s = time.monotonic()
        session.restore(saved)
        report.load_s = time.monotonic() - began_s
    before = prompt.ids[-MAX_TOKENS_PER_CHARACTER:] if prompt.resumed else ()
    output: Output = (JsonOutput if settings.as_json else TextOutput)(prompt.tokenizer, before)
    generated = Generated()
    keeper = Keeper(settings.state, prompt.form, saved, session, lambda: (*prompt.ids, *generated.ids))
    generation = _Generation(session, request, settings, logits, output, report, generated, keeper)
    with keeper, Notices(output), _reported(output, generated):
        generation.prefill()
        generation.decode()
        keeper.save()
        report.load_s += weights.load_s
        _finish_report(report, experts)
        output.finish(generated.ids, generated.stop, report, settings.sampler)


@contextlib.contextmanager
def _reported(output: Output, generated: Generated) -> Iterator[None]:
    """End the printed line when an error passes, and add the number of tokens generated."""
    try:
        yield
    except (K3Error, KeyboardInterrupt, MemoryError) as error:
        output.interrupt()
        stopped = f"generation stopped after {len(generated.ids)} tokens"
        if isinstance(error, K3Error):
            error.problem = f"{stopped}: {error.problem}"
        if isinstance(error, MemoryError):
            raise UnsupportedError(
                f"{stopped}: the system gave no more memory",
                advice="Use a smaller expert cache (--expert-gb) or chunk",
            ) from error
        raise
    except OSError as error:  # any other OSError is a K3Error by now; only a stdout write gets here
        raise _output_failed(error, len(generated.ids)) from error


@dataclass(frozen=True, slots=True)
class _Generation:
    """A prompt and its continuation. For a logits file the last token is taken in too, since it has a row."""

    session: Session
    request: Request
    settings: RunSettings
    logits: LogitsFile | None
    output: Output
    report: Report
    generated: Generated
    keeper: Keeper

    def prefill(self) -> None:
        """Take in the prompt, chunk by chunk, and save the state."""
        rest = self.request.prompt.ids[self.session.position :]
        began_s = time.monotonic()
        try:
            for start in range(0, len(rest), self.settings.chunk):
                piece = rest[start : start + self.settings.chunk]
                self.session.prefill(piece, None if self.logits is None else self.logits.append)
                self.keeper.interrupts.check()
        finally:
            self.report.prefill_s = time.monotonic() - began_s
        self.keeper.save()  # taking in a prompt may have taken hours

    def decode(self) -> None:
        """Choose tokens, print each, and take it in."""
        sampler = Sampler(self.settings.sampler, len(self.request.prompt.ids))
        row, ids = self.session.logits, self.generated.ids
        assert row is not None
        began_s = time.monotonic()
        try:
            while len(ids) < self.settings.generate:
                token = sampler.choose(row)
                ids.append(token)
                self.report.generated_tokens += 1
                is_stop = token in self.request.stop_ids
                if is_stop:
                    self.generated.stop = "eos"
                self.output.token(token, is_stop=is_stop)
                last = is_stop or len(ids) == self.settings.generate
                if last and self.logits is None:
                    return
                row = self.session.step(token)
                self.report.decode_passes += 1
                if self.logits is not None:
                    self.logits.append(row[None])
                if last:
                    return
                self.keeper.interrupts.check()
        finally:
            self.report.decode_s = time.monotonic() - began_s


def _output_failed(error: OSError, generated: int) -> Exception:
    """Return the error to raise when stdout refuses a token: a closed pipe is returned unchanged."""
    if isinstance(error, BrokenPipeError):
        return error
    # Buffered text cannot be written either; at exit the interpreter must not try again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return write_error(f"generation stopped after {generated} tokens: cannot write", error, Path("stdout"))


def read_warnings(experts: ExpertSource, weights: TensorLoad, *, direct: bool) -> list[str]:
    """Return warnings about slow or repeated reads of experts and dense weights."""
    stats = experts.stats()
    warnings = [
        f"experts in {directory} were read through the page cache: its file system does not take O_DIRECT"
        for directory, is_direct in stats.direct.items()
        if direct and not is_direct
    ]
    if stats.retries:
        warnings.append(f"{stats.retries} reads of experts failed and succeeded when repeated")
    if weights.retries:
        warnings.append(f"{weights.retries} reads of dense weights failed and succeeded when repeated")
    granted = experts.huge_pages() + weights.huge_pages()
    if granted.refused:
        warnings.append(granted.line())
    return warnings


def _finish_report(report: Report, experts: ExpertSource) -> None:
    """Enter the counters of the expert source."""
    stats = experts.stats()
    report.read_bytes = stats.read_bytes
    report.read_wait_s = stats.wait_ns / 1e9
    report.cache_hits = stats.hits
    report.cache_misses = stats.misses
    report.prefetched, report.prefetch_hits = stats.prefetched, stats.prefetch_hits
    report.read_retries = stats.retries
    report.checked_bytes, report.unchecked_bytes = stats.checked_bytes, stats.unchecked_bytes
    report.peak_rss_bytes = peak_rss_bytes()
