"""`--state FILE` in one run: what it is loaded from, whether the prompt goes on from it, and when it is saved.

docs/state_file.md section 5 is what this module does. Main thread only.
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
    """Open the state in `path`, sound and of this model; None when there is no file yet.

    `writable` also checks that a state can be written there. SettingsError for what is no file, and the errors of
    `SavedState` and of writing.
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
    """Saves the timeline of one run to its file, if it is not there yet. Without a file, does nothing."""

    def __init__(
        self,
        path: Path | None,
        form: PromptForm,
        saved: SavedState | None,
        session: Session,
        timeline: Callable[[], Sequence[int]],
    ) -> None:
        """`timeline` tells all tokens there are by now, taken in or not; `saved` is what the file holds."""
        self.interrupts = HeldInterrupts(path is not None)
        self._path = path
        self._form: PromptForm = form
        self._kept = None if saved is None else (saved.taken, saved.tokens, saved.prompt)
        self._failed = False  # saving was tried, and did not come to its end
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
        """An error is on its way: save what can be. That this fails too is said, and goes no further."""
        try:
            if kind is not None and self._path is not None and not self._failed:
                self._rescue(self._path)
        finally:
            self.interrupts.__exit__(kind, value, trace)

    def _rescue(self, path: Path) -> None:
        if self._session.broken:
            there = "" if self._kept is None else f"; {path} has that of {self._kept[0]} tokens"
            say(f"the pass was not finished, so its state is not saved{there}\n")
            return
        try:
            self.save()
        except K3Error as error:
            say(f"warning: {error}\n")
            return
        if self._session.position:
            say(f"state of {self._session.position} tokens saved in {path}\n")
