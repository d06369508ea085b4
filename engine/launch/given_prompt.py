"""Checks of a prompt that need neither vocabulary nor saved state: ids, length, small files. Main thread."""

from __future__ import annotations

from k3.engine.definition.settings import RunSettings, SettingsError
from k3.engine.launch.model_files import OpenedModel
from k3.engine.launch.timeline import check_ids


def check_given(opened: OpenedModel, settings: RunSettings) -> None:
    """Refuse a prompt for its ids or its length, and a model whose small files for it are missing.

    SettingsError for the prompt; ConfigError for files of the vocabulary or of generation that are missing or not
    sound.
    """
    if not settings.ignore_eos:
        opened.eos_ids()
    if settings.ids is None and settings.text is None:
        return
    if settings.ids is not None:
        check_given_ids(settings.ids, opened)
    elif not opened.has_vocabulary:
        opened.tokenizer()  # raises, naming the file that is missing
    tokens = 1 if settings.ids is None else len(settings.ids)
    checked_capacity(tokens, settings, opened.config.max_positions)


def check_given_ids(ids: tuple[int, ...], opened: OpenedModel) -> None:
    """Raise SettingsError for an id outside the vocabulary."""
    try:
        check_ids(ids, opened.config.vocab)
    except ValueError as error:
        raise SettingsError(f"--ids: {error}") from None


def checked_capacity(prompt_tokens: int, settings: RunSettings, max_positions: int) -> int:
    """Return the tokens that the timeline must hold: prompt and generation.

    SettingsError when they exceed the model's context or --max-tokens.
    """
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
