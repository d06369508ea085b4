"""`Session`: one timeline. Tokens in, logits out.

A session owns a `State` whose size is fixed at the start, and refuses tokens that do not fit in it. One thread
uses it. After an error inside the model its state is in the middle of a pass, so it refuses to continue.

A session can be saved; another session of the same model can load it and continue with the same bits
(docs/state_file.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from k3.base.errors import UnsupportedError
from k3.engine.forward.model import Model
from k3.engine.forward.state import State
from k3.engine.launch.timeline import check_ids
from k3.engine.run.state_file import Binding, PromptForm, SavedState, write_state

Array = npt.NDArray[np.float32]


class Session:
    """A timeline of at most `capacity` tokens; prompts are taken in `chunk` tokens at a time."""

    def __init__(self, model: Model, capacity: int, chunk: int) -> None:
        if capacity < 1 or chunk < 1:
            raise ValueError(f"{capacity=} and {chunk=} must be positive")
        self._model = model
        self._state = State(model.config, capacity)
        self._chunk = chunk
        self._broken = False
        self._ids: list[int] = []
        self._logits: Array | None = None

    @property
    def position(self) -> int:
        """Tokens taken in so far."""
        return self._state.position

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens taken in so far."""
        return tuple(self._ids)

    @property
    def logits(self) -> Array | None:
        """The logits [vocab] after the last token; None before the first."""
        return self._logits

    @property
    def broken(self) -> bool:
        """True after an error inside a pass: the state cannot be used any more."""
        return self._broken

    @property
    def state(self) -> State:
        """The state of the timeline."""
        return self._state

    def prefill(self, ids: Sequence[int], on_logits: Callable[[Array], None] | None = None) -> Array:
        """Take in `ids`, at least one, and return the logits [vocab] after the last.

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
            self._ids.extend(piece)
            self._logits = logits[-1]
            if on_logits is not None:
                on_logits(logits)
        last: Array = logits[-1]
        return last

    def step(self, token: int) -> Array:
        """Take in one token and return the logits [vocab] after it. Errors as in `prefill`."""
        return self.prefill([token])

    def save(self, path: Path, *, later: Sequence[int] = (), prompt: PromptForm = "ids") -> None:
        """Write the session to `path`; the file appears when it is whole.

        `later` are tokens of the timeline that were not taken in, `prompt` is the form that it began in; both are
        only kept. ValueError when there is nothing to save; DriveError, SpaceError.
        """
        self._check_whole()
        check_ids(later, self._model.config.vocab)
        if self._logits is None:
            raise ValueError("no token has been taken in, so there is nothing to save")
        binding = Binding.of(self._model.identity, self._model.config, self._model.options)
        tokens = [*self._ids, *later]
        write_state(path, self._state, self._model.config, binding, tokens, self._logits, prompt)

    def load(self, path: Path) -> tuple[int, ...]:
        """Become the session that was saved to `path`, and return the tokens that it had not taken in.

        Only before the first token: ValueError otherwise. UnsupportedError when it does not fit, and the errors
        of `state_file.SavedState`. No pass is made; `logits` are those that were saved.
        """
        binding = Binding.of(self._model.identity, self._model.config, self._model.options)
        with SavedState(path, binding, self._model.config) as saved:
            self.restore(saved)
            return saved.tokens[saved.taken :]

    def restore(self, saved: SavedState) -> None:
        """Do what `load` does, from a file that is open already."""
        self._check_whole()
        if self._ids:
            raise ValueError("a session can be loaded only before its first token")
        self._check_room(saved.taken)
        self._broken = True
        self._logits = saved.restore(self._state)
        self._ids.extend(saved.tokens[: saved.taken])
        self._broken = False

    def _check(self, ids: Sequence[int]) -> None:
        self._check_whole()
        if len(ids) == 0:
            raise ValueError("no tokens")
        check_ids(ids, self._model.config.vocab)
        self._check_room(len(ids))

    def _check_whole(self) -> None:
        if self._broken:
            raise ValueError("an error stopped this session in the middle of a pass, so it cannot continue")

    def _check_room(self, tokens: int) -> None:
        if self._state.position + tokens > self._state.capacity:
            raise UnsupportedError(
                f"{tokens} tokens after {self._state.position} exceed the context of "
                f"{self._state.capacity} tokens that this session was opened with"
            )
