"""What a timeline begins with: a prompt as checked token ids that there is room for. Main thread only."""

from __future__ import annotations

from dataclasses import dataclass

from k3.engine.definition.settings import RunSettings, SettingsError
from k3.engine.definition.tokenizer import Tokenizer
from k3.engine.launch.given_prompt import check_given_ids
from k3.engine.launch.model_files import OpenedModel
from k3.engine.launch.timeline import check_continues
from k3.engine.run.state_file import PromptForm, SavedState


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


def read_prompt(opened: OpenedModel, settings: RunSettings, saved: SavedState | None) -> Prompt:
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
        return Prompt(saved.tokens, opened.tokenizer() if saved.prompt == "text" else None, resumed=True)
    prompt = _given_prompt(opened, settings)
    if saved is not None:
        check_continues(saved.tokens[: saved.taken], prompt.ids, saved.path)
    return prompt


def _given_prompt(opened: OpenedModel, settings: RunSettings) -> Prompt:
    if settings.ids is not None:
        check_given_ids(settings.ids, opened)
        return Prompt(settings.ids, None)
    assert settings.text is not None
    tokenizer = opened.tokenizer()
    ids = tuple(tokenizer.encode(settings.text))
    if not ids:
        raise SettingsError("the prompt is empty", advice="Give a text, --prompt-file or --ids")
    return Prompt(ids, tokenizer)
