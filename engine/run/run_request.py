"""The request of a run, checked against the model: prompt, context, stop tokens, saved state. Main thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from k3.engine.definition.model_options import model_options
from k3.engine.definition.settings import RunSettings
from k3.engine.launch.given_prompt import checked_capacity
from k3.engine.launch.model_files import OpenedModel
from k3.engine.run.prompt import Prompt, read_prompt
from k3.engine.run.state_file import Binding, SavedState
from k3.engine.run.state_keeper import open_saved


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the model can fulfil.

    `capacity` is the number of tokens that the timeline must hold, `saved` the state that it continues.
    """

    prompt: Prompt
    capacity: int
    stop_ids: frozenset[int]
    saved: SavedState | None

    @property
    def resumed_tokens(self) -> int:
        """Tokens that the saved state has taken in."""
        return 0 if self.saved is None else self.saved.taken


@contextlib.contextmanager
def read_request(opened: OpenedModel, settings: RunSettings, *, writable: bool = True) -> Iterator[Request]:
    """Read the vocabulary, the prompt and the saved state, which stays open until the end of the block.

    `writable` also checks that a state can be saved, by creating a file for a moment. SettingsError for a prompt
    that is empty or too long, ResumeError for one that does not continue the state, and the errors of the
    vocabulary's files and of the state's.
    """
    with contextlib.ExitStack() as stack:
        saved = None
        if settings.state is not None:
            binding = Binding.of(opened.source.identity, opened.config, model_options(settings.model))
            saved = open_saved(settings.state, binding, opened.config, writable=writable)
            if saved is not None:
                stack.enter_context(saved)
        stop_ids = frozenset() if settings.ignore_eos else frozenset(opened.eos_ids())
        prompt = read_prompt(opened, settings, saved)
        capacity = checked_capacity(len(prompt.ids), settings, opened.config.max_positions)
        yield Request(prompt, capacity, stop_ids, saved)
