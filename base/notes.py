"""What a user should be told once and what ends nothing: a place that lacks a feature, say.

Notes are collected where they arise and printed by `console.run`. Safe from any thread.
"""

from __future__ import annotations

import threading

_lock = threading.Lock()
_told: set[str] = set()
_waiting: list[str] = []


def note_once(key: str, text: str) -> None:
    """Keep `text` to be told, unless something with this `key` has been noted in this process already."""
    with _lock:
        if key not in _told:
            _told.add(key)
            _waiting.append(text)


def take_notes() -> list[str]:
    """Return the notes that nobody has told yet, oldest first; they are the caller's to tell."""
    with _lock:
        taken = list(_waiting)
        _waiting.clear()
        return taken


def forget_notes() -> None:
    """Begin anew: every note may be told again."""
    with _lock:
        _told.clear()
        _waiting.clear()
