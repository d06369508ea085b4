"""The tokens that a timeline begins with: a prompt as checked token ids. Main thread only."""

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
    """Token ids to begin with.

    `tokenizer` is None when the conversation is in token ids. `resumed` is True when no prompt was given and the
    ids are those of a saved state.
    """

    ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    resumed: bool = False

    @property
    def form(self) -> PromptForm:
        """The form of the conversation: token ids or text."""
        return "ids" if self.tokenizer is None else "text"


def read_prompt(opened: OpenedModel, settings: RunSettings, saved: SavedState | None) -> Prompt:
    """Return the whole timeline as checked ids, beginning with the tokens that a saved state has taken in.

    SettingsError for ids outside the vocabulary and for an empty prompt, ResumeError when the prompt does not
    continue the saved state.
    """
    if settings.ids is None and settings.text is None:
        if saved is None:
            raise SettingsError(
                "--state: the file does not exist, and there is no prompt to begin with", path=settings.state,
                advice="Give a prompt",
            )  # fmt: skip
        return Prompt(saved.tokens, opened.tokenizer() if saved.prompt == "text" else None, resumed=True)
    prompt = _given_prompt(opened, settings)
    if saved is not None:
        check_continues(saved.tokens[: saved.taken], prompt.ids, saved.path)
    return prompt


def _given_prompt(opened: OpenedModel, settings: RunSettings) -> Prompt:
    """Return the prompt of the settings. SettingsError when it is empty or has ids outside the vocabulary."""
    if settings.ids is not None:
        check_given_ids(settings.ids, opened)
        return Prompt(settings.ids, None)
    assert settings.text is not None
    tokenizer = opened.tokenizer()
    ids = tuple(tokenizer.encode(settings.text))
    if not ids:
        raise SettingsError("the prompt is empty", advice="Give a text, --prompt-file or --ids")
    return Prompt(ids, tokenizer)
