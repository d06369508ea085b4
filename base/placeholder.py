"""Placeholders: files that a download left instead of the file itself.

Pure; safe to use from any thread.
"""

from __future__ import annotations

_PLACEHOLDERS = (
    (
        b"version https://git-lfs",
        "is a git-lfs pointer, not the file itself",
        "Run `git lfs pull` in its folder",
    ),
    (b"<!doctype", "is a web page, not the file itself", "Fetch it again; a login may be needed"),
    (b"<html", "is a web page, not the file itself", "Fetch it again; a login may be needed"),
)


def placeholder(start: bytes) -> tuple[str, str] | None:
    """Return problem and advice for a file that begins like a placeholder, None for any other."""
    for magic, problem, advice in _PLACEHOLDERS:
        if start[: len(magic)].lower() == magic:
            return problem, advice
    return None
