"""The option --state in one run: load the state, and save it when docs/state_file.md section 5 says so.

Main thread only.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from k3.base.direct_io import drive_error
from k3.base.errors import K3Error
from k3.base.streams import say
from k3.engine.definition.settings import SettingsError
from k3.engine.run.deferred_signals import HeldInterrupts
from k3.engine.run.session import Session
from k3.engine.run.state_file import Binding, PromptForm, SavedState, check_writable
from k3.model.architecture import ModelConfig


def open_saved(path: Path, binding: Binding, config: ModelConfig, *, writable: bool) -> SavedState | None:
    """Open the state in `path`, if the file exists and belongs to this model; None without a file.

    `writable` also checks that a state can be written there. SettingsError for a path that is no regular file,
    and the errors of `SavedState` and of writing.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if writable:
            check_writable(path)
        return None
    except OSError as error:
        raise drive_error("cannot read the state", error, path) from error
    if not stat.S_ISREG(mode):
        raise SettingsError("--state: this is not a regular file", path=path, advice="Give a file")
    if writable:
        check_writable(path)
    return SavedState(path, binding, config)


class Keeper:
    """Saves the timeline of one run, unless the file holds it already. Does nothing without a file."""

    def __init__(
        self,
        path: Path | None,
        form: PromptForm,
        saved: SavedState | None,
        session: Session,
        timeline: Callable[[], Sequence[int]],
    ) -> None:
        """Save to `path` the tokens that `timeline` returns, taken in or not; `saved` is the file's state now."""
        self.interrupts = HeldInterrupts(path is not None)
        self._path = path
        self._form: PromptForm = form
        self._kept = None if saved is None else (saved.taken, saved.tokens, saved.prompt)
        self._failed = False  # saving has begun and did not end well
        self._session = session
        self._timeline = timeline

    def save(self) -> None:
        """Save the timeline as it is now. DriveError, SpaceError."""
        session, tokens = self._session, tuple(self._timeline())
        new = (session.position, tokens, self._form)
        if self._path is None or session.position == 0 or new == self._kept:
            return
        self._failed = True
        session.save(self._path, later=tokens[session.position :], prompt=self._form)
        self._kept, self._failed = new, False

    def __enter__(self) -> Keeper:
        self.interrupts.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Save what can be saved when an error passes. That saving fails too is printed, and not raised."""
        try:
            if kind is not None and self._path is not None and not self._failed:
                self._rescue(self._path)
        finally:
            self.interrupts.__exit__(kind, value, trace)

    def _rescue(self, path: Path) -> None:
        """Save the state after an error, if the last pass was finished, and print the outcome."""
        if self._session.broken:
            there = "" if self._kept is None else f"; {path} still has the state of {self._kept[0]} tokens"
            say(f"the last pass was not finished, so the state was not saved{there}\n")
            return
        try:
            self.save()
        except K3Error as error:
            say(f"warning: {error}\n")
            return
        if self._session.position:
            say(f"state of {self._session.position} tokens saved in {path}\n")
