"""What a timeline begins with: a prompt as checked token ids that there is room for. Main thread only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3.engine.settings import RunSettings, SettingsError
from k3.engine.timeline import check_continues, check_ids

if TYPE_CHECKING:
    from k3.engine.finding import OpenedModel
    from k3.engine.state_file import PromptForm, SavedState
    from k3.engine.tokenizer import Tokenizer


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


def check_given(opened: OpenedModel, settings: RunSettings) -> None:
    """Refuse a prompt as far as that needs no vocabulary and no saved state: ids, length, missing small files.

    SettingsError; ConfigError for files of the vocabulary or of generation that are missing or not sound.
    """
    if not settings.ignore_eos:
        opened.eos_ids()
    if settings.ids is None and settings.text is None:
        return
    if settings.ids is not None:
        _check_ids(settings.ids, opened)
    elif not opened.has_vocabulary:
        opened.tokenizer()  # says which file is missing
    tokens = 1 if settings.ids is None else len(settings.ids)
    checked_capacity(tokens, settings, opened.config.max_positions)


def _check_ids(ids: tuple[int, ...], opened: OpenedModel) -> None:
    try:
        check_ids(ids, opened.config.vocab)
    except ValueError as error:
        raise SettingsError(f"--ids: {error}") from None


def _given_prompt(opened: OpenedModel, settings: RunSettings) -> Prompt:
    if settings.ids is not None:
        _check_ids(settings.ids, opened)
        return Prompt(settings.ids, None)
    assert settings.text is not None
    tokenizer = opened.tokenizer()
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
