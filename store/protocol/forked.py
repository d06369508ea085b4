"""Objects that a forked child must not use: a child calls their `inherited` before anything else.

A child shares the descriptors of its parent, and an operation of it on them would be the parent's. The locks of
what it inherits may be held by threads that it does not have, so `inherited` must take none.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inheritable(Protocol):
    """An object of one process."""

    def inherited(self) -> None:
        """Let go of what belongs to the parent. Called in a forked child before anything else runs there."""


_owned: weakref.WeakSet[Inheritable] = weakref.WeakSet()


def belongs_to_this_process(item: Inheritable) -> None:
    """Let `item.inherited` be called in children that are forked from now on, as long as it lives."""
    _owned.add(item)


def _tell_all() -> None:
    for item in tuple(_owned):
        item.inherited()
    _owned.clear()


os.register_at_fork(after_in_child=_tell_all)
