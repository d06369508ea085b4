"""Checks on the tokens of a timeline. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3.base.errors import ResumeError

_NO_WAY_BACK = "A state cannot go back: the memory of its KDA layers has no undo"


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise ValueError naming the first id that is not in [0, vocab)."""
    for place, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise ValueError(f"token id {token} at place {place} is outside the vocabulary of {vocab}")


def check_continues(taken: Sequence[int], prompt: Sequence[int], path: Path) -> None:
    """Raise ResumeError unless the tokens `taken` in by the state in `path` are the first of the prompt's."""
    for place, (had, wanted) in enumerate(zip(taken, prompt, strict=False)):
        if had != wanted:
            raise ResumeError(
                f"the prompt is another one than the state's from token {place} on: "
                f"{wanted}, and the state took in {had} there ({len(taken)} tokens in all)",
                path=path,
                advice=f"{_NO_WAY_BACK}. Give the prompt that it goes on from, leave the prompt out to go on "
                "where it stopped, or name another file",
            )
    if len(prompt) < len(taken):
        raise ResumeError(
            f"the prompt ends after {len(prompt)} tokens, and the state has already taken in {len(taken)}",
            path=path,
            advice=f"{_NO_WAY_BACK}. Leave the prompt out to go on where it stopped, or name another file",
        )
