"""Checks that the files a run writes damage neither the model nor each other.

The files of --logits, --trace, --route-trace and --state are compared by device and inode, not by spelling:
links, relative paths and second mounts lead to the same directory. Looks at directories and writes nothing; main
thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from k3.engine.definition.settings import ModelSettings, RunSettings, SettingsError
from k3.model.model_source import ModelSource

_Identity = tuple[int, int]  # device and inode
_ELSEWHERE = "Give a path outside the model"


def check_distinct(settings: RunSettings) -> None:
    """Raise SettingsError when two options name one file, or one of them a block device."""
    seen: dict[str, str] = {}
    for option, path in _targets(settings):
        status = _status(path)
        if status is not None and stat.S_ISBLK(status.st_mode):
            raise SettingsError(f"{option}: this is a block device", path=path, advice="Give a file")
        for key in (os.path.realpath(path), *([] if status is None else [str(_identity(status))])):
            other = seen.setdefault(key, option)
            if other != option:
                raise SettingsError(
                    f"{other} and {option} name the same file",
                    path=path,
                    advice="Give each option a file of its own",
                )


def check_outside_model(settings: RunSettings, source: ModelSource) -> None:
    """Raise SettingsError when an option names a file of the model, or a place inside its directories."""
    targets = [(option, path) for option, path in _targets(settings) if not _is_stream(path)]
    if not targets:
        return
    directories = (*_named_directories(settings.model), *source.directories)
    places = {_identity(status): place for place in directories if (status := _status(place)) is not None}
    files = {
        _identity(status): file for file in _files(source, directories) if (status := _status(file)) is not None
    }
    for option, path in targets:
        resolved = Path(os.path.realpath(path))
        named = Path(os.path.realpath(path.parent))  # a link inside the model is part of it, wherever it leads
        for directory in (*resolved.parents, named, *named.parents):
            status = _status(directory)
            place = None if status is None else places.get(_identity(status))
            if place is not None:
                raise SettingsError(
                    f"{option}: this lies inside {place}, which belongs to the model", path=path, advice=_ELSEWHERE
                )
        status = _status(path)
        file = None if status is None else files.get(_identity(status))
        if file is not None:
            raise SettingsError(f"{option}: this is the model's file {file}", path=path, advice=_ELSEWHERE)


def _targets(settings: RunSettings) -> list[tuple[str, Path]]:
    """Return the files that the settings name, each with its option."""
    named = (
        ("--logits", settings.logits), ("--trace", settings.trace), ("--route-trace", settings.route_trace),
        ("--state", settings.state),
    )  # fmt: skip
    return [(option, path) for option, path in named if path is not None]


def _named_directories(settings: ModelSettings) -> tuple[Path, ...]:
    """Return directories that belong to the model by the settings alone.

    These are the folder of a download cache above a snapshot and, with --store, the container to fall back on,
    which is not open yet.
    """
    fallback = (
        () if settings.container is None or settings.store is None else (settings.container, *settings.roots)
    )
    return (*settings.snapshot, *fallback)


def _files(source: ModelSource, directories: Iterable[Path]) -> Iterator[Path]:
    """Yield the files of the model; they may be links to places outside, such as a download's blobs."""
    yield from source.files()
    for directory in directories:
        if os.access(directory, os.R_OK):  # a daemon's may be closed to this user
            yield from directory.iterdir()


def _is_stream(path: Path) -> bool:
    """Return True for a device or a pipe: writing into it changes no file."""
    status = _status(path)
    return status is not None and not stat.S_ISREG(status.st_mode)


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a path, None if nothing is there or this user cannot reach it."""
    try:
        return path.stat()
    except OSError:
        return None


def _identity(status: os.stat_result) -> _Identity:
    """Return device and inode."""
    return status.st_dev, status.st_ino
