"""The body of `k3-run`: one prompt in, one continuation out, every token printed as soon as it is known.

What comes before is `engine/starting.py`. From there on: the model is made while its weights are on their way, the
prompt is taken in, then tokens are chosen and printed until a stop token or the asked number. An error on the way
ends the printed line first, so that what was generated before it stays readable, and says that generation stopped.
With --state the timeline may go on from a saved one, and is saved whatever ends it. Main thread only.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from k3.container.dense_load import DenseLoad
from k3.container.errors import K3Error, UnsupportedError
from k3.container.huge_pages import HugePages
from k3.engine.keeping import Keeper
from k3.engine.logits_file import LogitsFile
from k3.engine.notices import Notices
from k3.engine.opening import open_model
from k3.engine.output import JsonOutput, Output, TextOutput
from k3.engine.prompt import Prompt
from k3.engine.report import Report, peak_rss_bytes
from k3.engine.sampler import Sampler
from k3.engine.session import Session
from k3.engine.settings import RunSettings
from k3.engine.writing import write_error
from k3.store.source import ExpertSource

if TYPE_CHECKING:
    from k3.engine.starting import Started

_CHARACTER_TOKENS = 8
"""More tokens than a character is spread over."""


@dataclass(slots=True)
class Generated:
    """What came out. `stop` is "eos" or "length"."""

    ids: list[int] = field(default_factory=list)
    stop: str = "length"


def go_on(started: Started) -> None:
    """Take in the prompt and generate. Raises K3Error."""
    settings, found, saved, prompt = started.settings, started.found, started.saved, started.prompt
    report, logits = started.report, started.logits
    model, experts = open_model(
        found,
        settings.model,
        started.plan,
        tracer=started.tracer,
        routes=started.routes,
        on_read=started.progress.read,
    )
    with contextlib.closing(experts):
        if found.loading is None:
            started.progress.loaded()
        session = Session(model, started.capacity, settings.chunk)
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
            _generate(session, prompt, settings, started.stop_ids, logits, output, report, generated, keeper)
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
