"""`Session`: one timeline. Prompt in, logits out, one token after the other.

A session owns a `State` of a size fixed at the start and refuses what would not fit in it. It is used by one
thread. After an error inside the model its state is half-way through a pass, so it refuses to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from k3.container.errors import UnsupportedError
from k3.engine.model import Model
from k3.engine.state import State

Array = npt.NDArray[np.float32]


class Session:
    """A timeline of at most `capacity` tokens; prompts are taken `chunk` tokens at a time."""

    def __init__(self, model: Model, capacity: int, chunk: int) -> None:
        if capacity < 1 or chunk < 1:
            raise ValueError(f"{capacity=} and {chunk=} make no session")
        self._model = model
        self._state = State(model.config, capacity)
        self._chunk = chunk
        self._broken = False

    @property
    def position(self) -> int:
        """Tokens taken in so far."""
        return self._state.position

    @property
    def state(self) -> State:
        """What the timeline remembers."""
        return self._state

    def prefill(self, ids: Sequence[int], on_logits: Callable[[Array], None] | None = None) -> Array:
        """Take in `ids`, at least one, and return the logits [vocab] that follow the last.

        With `on_logits` every position's logits are computed and passed on, chunk by chunk, [S, vocab].
        ValueError for ids outside the vocabulary, UnsupportedError when they do not fit.
        """
        self._check(ids)
        logits: Array = np.empty((0, self._model.config.vocab), np.float32)
        for start in range(0, len(ids), self._chunk):
            piece = ids[start : start + self._chunk]
            self._broken = True
            logits = self._model.forward(piece, self._state, every_logit=on_logits is not None)
            self._broken = False
            if on_logits is not None:
                on_logits(logits)
        last: Array = logits[-1]
        return last

    def step(self, token: int) -> Array:
        """Take in one token and return the logits [vocab] that follow it. Errors as in `prefill`."""
        return self.prefill([token])

    def _check(self, ids: Sequence[int]) -> None:
        if self._broken:
            raise ValueError("this session met an error in the middle of a pass and cannot go on")
        if len(ids) == 0:
            raise ValueError("no tokens")
        check_ids(ids, self._model.config.vocab)
        if self._state.position + len(ids) > self._state.capacity:
            raise UnsupportedError(
                f"{len(ids)} tokens after {self._state.position} exceed the context of "
                f"{self._state.capacity} tokens that this session was opened with"
            )


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """ValueError naming the first id that is not in [0, vocab)."""
    for place, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise ValueError(f"token id {token} at place {place} is outside the vocabulary of {vocab}")
