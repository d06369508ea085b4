"""Checks on the tokens of a timeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3.base.errors import ResumeError

_NO_WAY_BACK = "A state cannot go back: KDA layers keep no earlier memory"


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise ValueError naming the first id that is not in [0, vocab)."""
    for place, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise ValueError(f"token id {token} at place {place} is outside the vocabulary of {vocab}")


def check_continues(taken: Sequence[int], prompt: Sequence[int], path: Path) -> None:
    """Raise ResumeError unless the prompt begins with the tokens that a saved state has taken in.

    `taken` are those tokens, `path` the state's file.
    """
    for place, (had, wanted) in enumerate(zip(taken, prompt, strict=False)):
        if had != wanted:
            raise ResumeError(
                f"the prompt differs from the saved state from token {place} on: {wanted}, and the state took in "
                f"{had} there ({len(taken)} tokens in all)",
                path=path,
                advice=f"{_NO_WAY_BACK}. Give a prompt that continues it, leave the prompt out to continue where "
                "it stopped, or name another file",
            )
    if len(prompt) < len(taken):
        raise ResumeError(
            f"the prompt ends after {len(prompt)} tokens, and the state has already taken in {len(taken)}",
            path=path,
            advice=f"{_NO_WAY_BACK}. Leave the prompt out to continue where it stopped, or name another file",
        )
