"""The directory layouts that a Hugging Face download can have on disk.

    models--org--name/blobs/<sha256>                     the bytes
    models--org--name/snapshots/<revision>/<file>        links: ../../blobs/<sha256>
    models--org--name/refs/main                          the name of a revision

A blob's name is a digest of its bytes, by which they can be proven (downloads.py), so links are read. But a path
is never replaced by its target: the target has neither the file's name nor its neighbours.

Reads directories and links only; safe to use from any thread.
"""

from __future__ import annotations

import os
from pathlib import Path

from k3.base.direct_io import drive_error
from k3.base.errors import SourceError
from k3.base.safe_text import shown_name
from k3.model.model_config import CONFIG_NAME

_LISTED_MAX = 8


def snapshot_directory(path: Path) -> Path:
    """Return the directory of a snapshot's files, given that directory or a cache folder above it.

    A `models--…` folder or its `snapshots` folder stands for its one revision. The result is absolute; links are
    not resolved. Raises SourceError when there is no such directory, no revision, or more than one.
    """
    path = path.absolute()
    entries = dict(list_directory(path))
    if CONFIG_NAME in entries:
        return path
    if path.name == "snapshots":
        revisions_in = path
    elif entries.get("snapshots"):
        revisions_in = path / "snapshots"
    else:
        return path
    revisions = [name for name, is_directory in list_directory(revisions_in) if is_directory]
    if len(revisions) == 1:
        return revisions_in / revisions[0]
    if not revisions:
        raise SourceError(
            "there is no revision in this folder", path=revisions_in, advice="Download the model first"
        )
    main = revisions_in.parent / "refs" / "main"
    raise SourceError(
        f"there are {len(revisions)} revisions in this folder: {_listed(revisions)}",
        path=revisions_in,
        advice=f"Name the folder of one revision; {main} says which is the newest that was asked for",
    )


def possible_snapshots(path: Path) -> list[Path]:
    """Return `path` and, if it is a cache folder, the directories of all its revisions, by name.

    The caller looks in them for files whose names it knows. A path that is no directory has no revisions. Raises
    DriveError when the system refuses to list them.
    """
    revisions_in = path if path.name == "snapshots" else path / "snapshots"
    try:
        return [
            path,
            *(revisions_in / name for name, is_directory in list_directory(revisions_in) if is_directory),
        ]
    except SourceError:
        return [path]


def list_directory(path: Path) -> list[tuple[str, bool]]:
    """Return (name, True for a directory) of every entry of `path`, by name.

    Raises SourceError when there is no such directory, DriveError when it cannot be listed.
    """
    advice = "Name the directory that holds config.json and the shards"
    try:
        with os.scandir(path) as entries:
            return sorted((entry.name, _is_directory(entry)) for entry in entries)
    except FileNotFoundError as error:
        raise SourceError("there is no such directory", path=path, advice=advice) from error
    except NotADirectoryError as error:
        raise SourceError("is a file where a directory is expected", path=path, advice=advice) from error
    except OSError as error:
        raise drive_error("cannot read", error, path) from error


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a loop of links; it is refused where the file is opened


def describe_directory(path: Path) -> str:
    """Return the content of a directory in a few words, for a message that something else was expected there."""
    entries = list_directory(path)
    files = [name for name, is_directory in entries if not is_directory]
    folders = [f"{name}/" for name, is_directory in entries if is_directory]
    if not entries:
        return "it is empty"
    return f"it holds {_listed(folders + files)}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(shown_name(name) for name in names[:_LISTED_MAX])
    more = len(names) - _LISTED_MAX
    return f"{shown} and {more} more" if more > 0 else shown
