"""Notes: facts that a user should read once and that are no error, such as a file system that lacks a feature.

They are collected where they arise and printed by `cli_support.run`. Safe from any thread.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()
_noted: set[str] = set()
_waiting: list[str] = []


def note_once(key: str, text: str) -> None:
    """Keep `text` for printing, unless this process has already noted something with this `key`."""
    with _lock:
        if key not in _noted:
            _noted.add(key)
            _waiting.append(text)


def take_notes() -> list[str]:
    """Return the notes not yet returned, oldest first; the caller prints them."""
    with _lock:
        taken = list(_waiting)
        _waiting.clear()
        return taken


def forget_notes() -> None:
    """Forget all notes, so that each may be noted again."""
    with _lock:
        _noted.clear()
        _waiting.clear()
