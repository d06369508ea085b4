"""A file in every root of an unfinished repack that says which run the root belongs to.

A drive that is not mounted leaves an empty directory in its place. Without a mark, a run that goes on would take
that for lost files and make them again, on the drive below. So the marks are written before the first byte of
data, home's last: once home has its mark, every root must show the mark of the same run. They are removed when
the container is complete, home's last again.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from k3.base.direct_io import sync_directory
from k3.base.errors import IncompleteError, ResumeError
from k3.base.presence import is_named, is_there
from k3.base.regular_file import read_small_file
from k3.base.strict_json import parse_object
from k3.container.layout import JOURNAL_NAME, PARTIAL_SUFFIX
from k3.repack.publish import write_small
from k3.repack.repack_request import RepackRequest

MARK_NAME = f"k3-repack-root{PARTIAL_SUFFIX}"
_FORMAT = "k3-repack-root"
_VERSION = 1
_MARK_BYTES_MAX = 64 << 10
_ANEW = "Remove the unfinished container and repack again; the source is untouched"
_MOUNT = "Mount its drive, then repeat the command; nothing was written"


@dataclass(frozen=True, slots=True)
class RootMark:
    """One root's mark: the run, which root of it this is, and where the run's home and all its roots are."""

    run: str
    number: int
    home: str
    roots: tuple[str, ...]  # relative to home

    def render(self) -> bytes:
        """Return the file's bytes."""
        return (json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=2) + "\n").encode()


def read_mark(directory: Path) -> RootMark | None:
    """Return the mark in a directory, None without one. ResumeError when it cannot be understood."""
    path = directory / MARK_NAME
    if not is_named(path):
        return None
    try:
        data = read_small_file(path, _MARK_BYTES_MAX, ResumeError)
        fields = parse_object(
            data, what="the mark of an unfinished repack", path=path, error=ResumeError, advice=_ANEW
        )
        if (fields.pop("format"), fields.pop("version")) != (_FORMAT, _VERSION):
            raise ValueError("another format or version")
        mark = RootMark(**{**fields, "roots": tuple(map(str, fields["roots"]))})
        if not (isinstance(mark.run, str) and isinstance(mark.home, str) and type(mark.number) is int):
            raise ValueError("values of other types")
    except (ValueError, TypeError, KeyError) as error:
        raise ResumeError(
            f"the mark of an unfinished repack cannot be understood: {error}",
            path=path,
            advice=_ANEW,
        ) from error
    return mark


def check_marks(request: RepackRequest) -> None:
    """Refuse to go on, or to begin, where a root is not there or belongs to another run. Reads only.

    IncompleteError names a root that is not there; ResumeError one of another run, or in another root's place.
    """
    directories = request.root_directories()
    if is_there(request.home / JOURNAL_NAME):
        mark = read_mark(request.home)
        if mark is not None and mark.roots == relative_roots(request):  # else the journal refuses the request
            _check_continued(request, mark)
        return
    for directory in directories:
        mark = read_mark(directory)
        if mark is None:
            continue
        if Path(mark.home) == request.home.resolve() or mark.number == 0:
            raise IncompleteError(
                f"root {mark.number} of an unfinished repack is here, but not its journal in home, {mark.home}",
                path=directory,
                advice=f"{_MOUNT}. To begin anew, empty the roots",
            )
        raise _belongs_elsewhere(directory, mark)


def _check_continued(request: RepackRequest, wanted: RootMark) -> None:
    for number, directory in enumerate(request.root_directories()):
        mark = read_mark(directory)
        if mark is None:
            there = "it has no mark of this run" if is_there(directory) else "the directory does not exist"
            raise IncompleteError(
                f"root {number} of the unfinished repack is not there: {there}",
                path=directory,
                advice=f"{_MOUNT}. To begin anew without it, empty the other roots",
            )
        if mark.run != wanted.run:
            raise _belongs_elsewhere(directory, mark)
        if mark.number != number:
            raise ResumeError(
                f"this is root {mark.number} of the unfinished repack, not root {number}",
                path=directory,
                advice="Two drives have changed places: mount each where it was; nothing was written",
            )


def _belongs_elsewhere(directory: Path, mark: RootMark) -> ResumeError:
    return ResumeError(
        f"this is root {mark.number} of another unfinished repack, whose home is {mark.home}",
        path=directory,
        advice="Mount the right drive, finish the other repack, or choose another directory; nothing was written",
    )


def mark_roots(request: RepackRequest, directories: Mapping[int, Path]) -> None:
    """Write the marks of a run that begins, home's last. DriveError, SpaceError."""
    run, home, roots = str(uuid.uuid4()), str(request.home.resolve()), relative_roots(request)
    for number in sorted(written_roots(request, directories), reverse=True):
        write_small(directories[number] / MARK_NAME, RootMark(run, number, home, roots).render())


def is_marked(home: Path) -> bool:
    """Tell whether all roots of the run have their marks."""
    return read_mark(home) is not None


def remove_marks(directories: Mapping[int, Path]) -> None:
    """Remove the marks of a run that is complete, home's last."""
    for number in sorted(directories, reverse=True):
        mark = directories[number] / MARK_NAME
        if is_named(mark):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mark)  # noqa: PTH108 - one system call that tests can watch on every Python
            sync_directory(directories[number])


def written_roots(request: RepackRequest, directories: Mapping[int, Path]) -> list[int]:
    """Numbers of the roots that are written to: all, or home alone when experts stay in the source."""
    return [0] if request.in_place else sorted(directories)


def relative_roots(request: RepackRequest) -> tuple[str, ...]:
    """Every root's directory, seen from home."""
    home = request.home.resolve()
    return tuple(os.path.relpath(path.resolve(), home) for path in request.root_directories())
