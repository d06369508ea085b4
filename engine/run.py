"""The body of `k3-run`: one prompt in, one continuation out, every token printed as soon as it is known.

The order of events: everything that can be refused is refused, the weights are loaded, the prompt is taken
in, then tokens are chosen and printed until a stop token or the asked number. An error on the way ends the
printed line first, so that what was generated before it stays readable, and says that generation stopped. With
--state the timeline may go on from a saved one, and is saved whatever ends it. Main thread only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from k3.container.console import Progress
from k3.container.dense_load import DenseLoad
from k3.container.errors import K3Error, UnsupportedError
from k3.container.huge_pages import HugePages
from k3.engine.keeping import Keeper, check_continues, open_saved
from k3.engine.logits_file import LogitsFile
from k3.engine.notices import Notices
from k3.engine.opening import FoundModel, find_model, load_model, model_options, open_route_trace
from k3.engine.output import JsonOutput, Output, TextOutput
from k3.engine.plan import dense_bytes
from k3.engine.report import Report, peak_rss_bytes
from k3.engine.sampler import Sampler
from k3.engine.session import Session, check_ids
from k3.engine.settings import RunSettings, SettingsError
from k3.engine.state_file import Binding, PromptForm, SavedState
from k3.engine.targets import check_distinct, check_outside_model
from k3.engine.tokenizer import Tokenizer
from k3.engine.trace import FileTracer, Tracer
from k3.engine.writing import write_error
from k3.store.route_trace import RouteTraceWriter
from k3.store.source import ExpertSource

_CHARACTER_TOKENS = 8
"""More tokens than a character is spread over."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to begin with; `tokenizer` only when the conversation is in text. `resumed`: they are a saved
    state's, none were given."""

    ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    resumed: bool = False

    @property
    def form(self) -> PromptForm:
        """What the conversation is in."""
        return "ids" if self.tokenizer is None else "text"


@dataclass(slots=True)
class Generated:
    """What came out. `stop` is "eos" or "length"."""

    ids: list[int] = field(default_factory=list)
    stop: str = "length"


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
        prompt = read_prompt(found, settings, saved)
        capacity = checked_capacity(len(prompt.ids), settings, found.config.max_positions)
        stop_ids = frozenset() if settings.ignore_eos else frozenset(found.eos_ids())
        tracer = stack.enter_context(_tracer(settings))
        logits = stack.enter_context(LogitsFile(settings.logits)) if settings.logits else None
        routes = stack.enter_context(_routes(found, settings))
        resumed = 0 if saved is None else saved.taken
        report = Report(resumed_tokens=resumed, prompt_tokens=len(prompt.ids) - resumed)
        session, experts = _open_session(found, settings, capacity, tracer, routes, report)
        stack.callback(experts.close)
        if saved is not None:
            began_s = time.monotonic()
            session.restore(saved)
            report.load_s += time.monotonic() - began_s
        before = prompt.ids[-_CHARACTER_TOKENS:] if prompt.resumed else ()
        output: Output = (JsonOutput if settings.as_json else TextOutput)(prompt.tokenizer, before)
        generated = Generated()
        keeper = Keeper(
            settings.state, prompt.form, saved, session, lambda: (*prompt.ids, *generated.ids)
        )  # fmt: skip
        with keeper, Notices(output), _reported(output, generated):
            _generate(session, prompt, settings, stop_ids, logits, output, report, generated, keeper)
            keeper.save()
            _finish_report(report, experts)
            output.finish(generated.ids, generated.stop, report, settings.sampler)
        for warning in read_warnings(experts, found.loading, direct=settings.model.direct):
            sys.stderr.write(f"warning: {warning}\n")
        if logits is not None:
            logits.publish()


@contextlib.contextmanager
def _reported(output: Output, generated: Generated) -> Iterator[None]:
    """An error inside ends the printed line, and says how far the generation came."""
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
    except OSError as error:  # everything else that can fail so is typed by now; this is stdout
        raise _output_failed(error, len(generated.ids)) from error


def _saved(found: FoundModel, settings: RunSettings) -> SavedState | None:
    """The state that the run goes on from, open and checked, if there is one."""
    if settings.state is None:
        return None
    options = model_options(settings.model)
    return open_saved(settings.state, Binding.of(found.source.identity, found.config, options), found.config)


def read_prompt(found: FoundModel, settings: RunSettings, saved: SavedState | None) -> Prompt:
    """The prompt as checked ids, all of the timeline: what a saved state has taken in is the beginning of it.

    SettingsError for ids outside the vocabulary and for a prompt of nothing, ResumeError when it does not go on
    from the saved state.
    """
    if settings.ids is None and settings.text is None:
        if saved is None:
            raise SettingsError(
                "--state: there is no such file yet, and no prompt to begin with", path=settings.state,
                advice="Give a prompt",
            )  # fmt: skip
        return Prompt(saved.tokens, found.tokenizer() if saved.prompt == "text" else None, resumed=True)
    prompt = _given_prompt(found, settings)
    if saved is not None:
        check_continues(saved, prompt.ids)
    return prompt


def _given_prompt(found: FoundModel, settings: RunSettings) -> Prompt:
    if settings.ids is not None:
        try:
            check_ids(settings.ids, found.config.vocab)
        except ValueError as error:
            raise SettingsError(f"--ids: {error}") from None
        return Prompt(settings.ids, None)
    assert settings.text is not None
    tokenizer = found.tokenizer()
    ids = tuple(tokenizer.encode(settings.text))
    if not ids:
        raise SettingsError("the prompt is empty", advice="Give a text, --prompt-file or --ids")
    return Prompt(ids, tokenizer)


def checked_capacity(prompt_tokens: int, settings: RunSettings, max_positions: int) -> int:
    """Tokens that the timeline must hold. SettingsError when that is more than it may be."""
    capacity = prompt_tokens + settings.generate
    limit, name = max_positions, "the model's context (max_position_embeddings)"
    if settings.max_tokens is not None:
        if settings.max_tokens > max_positions:
            raise SettingsError(f"--max-tokens {settings.max_tokens} is more than {name} of {max_positions}")
        limit, name = settings.max_tokens, "--max-tokens"
    if capacity > limit:
        raise SettingsError(
            f"a prompt of {prompt_tokens} tokens and {settings.generate} to generate make {capacity}, "
            f"more than {name} of {limit}",
            advice="Nothing was cut; shorten the prompt or ask for fewer tokens",
        )
    return capacity


def _open_session(
    found: FoundModel,
    settings: RunSettings,
    capacity: int,
    tracer: Tracer,
    routes: RouteTraceWriter | None,
    report: Report,
) -> tuple[Session, ExpertSource]:
    """Open the one timeline of a model whose loading, shown by a progress bar, may go on behind it."""
    began_s = time.monotonic()
    total_bytes = sum(dense_bytes(found.source, name) for name in found.names)
    progress = Progress("loading", total_bytes, as_json=settings.as_json)

    def loaded() -> None:
        progress.close()
        report.load_s = time.monotonic() - began_s

    try:
        model, experts = load_model(
            found, settings.model, capacity=capacity, chunk=settings.chunk,
            every_logit=settings.logits is not None, tracer=tracer, routes=routes,
            on_read=lambda name: progress.advance(dense_bytes(found.source, name)), on_loaded=loaded,
        )  # fmt: skip
    except BaseException:
        progress.close()
        raise
    return Session(model, capacity, settings.chunk), experts


def _generate(
    session: Session,
    prompt: Prompt,
    settings: RunSettings,
    stop_ids: frozenset[int],
    logits_file: LogitsFile | None,
    output: Output,
    report: Report,
    generated: Generated,
    keeper: Keeper,
) -> None:
    """Prefill and decode. With a logits file also the last token is taken in, for its row."""
    sampler = Sampler(settings.sampler, len(prompt.ids))
    rest = prompt.ids[session.position :]
    began_s = time.monotonic()
    try:
        for start in range(0, len(rest), settings.chunk):
            piece = rest[start : start + settings.chunk]
            session.prefill(piece, None if logits_file is None else logits_file.append)
            keeper.interrupts.check()
    finally:
        report.prefill_s = time.monotonic() - began_s
    row = session.logits
    assert row is not None
    keeper.save()  # a prompt can have taken hours
    began_s = time.monotonic()
    try:
        while len(generated.ids) < settings.generate:
            token = sampler.choose(row)
            generated.ids.append(token)
            report.generated_tokens += 1
            if token in stop_ids:
                generated.stop = "eos"
            output.token(token, is_stop=token in stop_ids)
            last = generated.stop == "eos" or len(generated.ids) == settings.generate
            if last and logits_file is None:
                return
            row = session.step(token)
            report.decode_passes += 1
            if logits_file is not None:
                logits_file.append(row[None])
            if last:
                return
            keeper.interrupts.check()
    finally:
        report.decode_s = time.monotonic() - began_s


def _output_failed(error: OSError, generated: int) -> Exception:
    """What to raise when stdout refuses a token. A closed pipe is the reader's choice and stays as it is."""
    if isinstance(error, BrokenPipeError):
        return error
    # What is still buffered cannot be written either; the interpreter must not try again when it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return write_error(f"generation stopped after {generated} tokens: cannot write", error, Path("stdout"))


def read_warnings(experts: ExpertSource, loading: DenseLoad | None, *, direct: bool) -> list[str]:
    """What a user should know of how weights were read. `loading` is the dense ones' load, if one was made."""
    stats = experts.stats()
    warnings = [
        f"experts in {directory} were read through the page cache: its file system does not take O_DIRECT"
        for directory, is_direct in stats.direct.items()
        if direct and not is_direct
    ]
    if stats.retries:
        warnings.append(f"{stats.retries} reads of experts failed at first and were right the second time")
    if loading is not None and loading.retries:
        warnings.append(f"{loading.retries} reads of dense weights failed at first and were right the second time")
    granted = experts.huge_pages() + (HugePages() if loading is None else loading.huge_pages())
    if granted.refused:
        warnings.append(granted.line())
    return warnings


def _finish_report(report: Report, experts: ExpertSource) -> None:
    stats = experts.stats()
    report.read_bytes = stats.read_bytes
    report.read_wait_s = stats.wait_ns / 1e9
    report.cache_hits = stats.hits
    report.cache_misses = stats.misses
    report.prefetched, report.prefetch_hits = stats.prefetched, stats.prefetch_hits
    report.read_retries = stats.retries
    report.checked_bytes, report.unchecked_bytes = stats.checked_bytes, stats.unchecked_bytes
    report.peak_rss_bytes = peak_rss_bytes()


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
    with open_route_trace(found, settings.route_trace) as routes:
        try:
            yield routes
        except KeyboardInterrupt:
            if not routes.torn:
                routes.publish()
            raise
        routes.publish()
