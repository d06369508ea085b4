"""Where a run writes besides stdout, and that it damages no model and no other file of its own.

The files that --logits, --trace, --route-trace and --state name are compared by what they are, not by how they are
spelled: links, relative paths and second mounts lead to the same directory. Looks at directories, writes
nothing; main thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from k3.engine.definition.settings import ModelSettings, RunSettings, SettingsError
from k3.model.model_source import ModelSource

_Identity = tuple[int, int]  # device and inode
_ELSEWHERE = "Give a place outside the model"


def check_distinct(settings: RunSettings) -> None:
    """SettingsError when two options name one file, or one of them a whole disk."""
    seen: dict[str, str] = {}
    for option, path in _targets(settings):
        status = _status(path)
        if status is not None and stat.S_ISBLK(status.st_mode):
            raise SettingsError(f"{option}: this is a block device", path=path, advice="Give a file")
        for key in (os.path.realpath(path), *([] if status is None else [str(_identity(status))])):
            other = seen.setdefault(key, option)
            if other != option:
                raise SettingsError(
                    f"{other} and {option} name the same file", path=path, advice="Give each its own file"
                )


def check_outside_model(settings: RunSettings, source: ModelSource) -> None:
    """SettingsError when an option names a place inside the model's directories, or a file of the model."""
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
    named = (
        ("--logits", settings.logits), ("--trace", settings.trace), ("--route-trace", settings.route_trace),
        ("--state", settings.state),
    )  # fmt: skip
    return [(option, path) for option, path in named if path is not None]


def _named_directories(settings: ModelSettings) -> tuple[Path, ...]:
    """Return directories that belong to the model by the settings alone.

    A cache's folder above a snapshot; with --store, the container to fall back on, which is not open yet.
    """
    fallback = (
        () if settings.container is None or settings.store is None else (settings.container, *settings.roots)
    )
    return (*settings.snapshot, *fallback)


def _files(source: ModelSource, directories: Iterable[Path]) -> Iterator[Path]:
    """Yield files of the model, which may be links to somewhere else: a download's blobs."""
    yield from source.files()
    for directory in directories:
        if os.access(directory, os.R_OK):  # a daemon's may be closed to this user
            yield from directory.iterdir()


def _is_stream(path: Path) -> bool:
    """Whether a device or a pipe is there: writing into it changes no file."""
    status = _status(path)
    return status is not None and not stat.S_ISREG(status.st_mode)


def _status(path: Path) -> os.stat_result | None:
    """What is there, None for nothing, or nothing that this user can reach and so write to."""
    try:
        return path.stat()
    except OSError:
        return None


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino
