"""What a timeline begins with: a prompt as checked token ids that there is room for. Main thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3.engine.settings import RunSettings, SettingsError

if TYPE_CHECKING:
    from k3.engine.finding import FoundModel
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
        from k3.engine.keeping import check_continues

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


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """ValueError naming the first id that is not in [0, vocab)."""
    for place, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise ValueError(f"token id {token} at place {place} is outside the vocabulary of {vocab}")
