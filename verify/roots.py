"""Finds a container's roots without giving up at the first that is not there.

Unlike the reader, which needs all of them, a check wants to know which are missing, which changed places, and
what can still be looked at. Whether a root.json is sound is the structure check's business; here a damaged one
only means that a root is taken to be where the manifest says. A place that cannot be looked at (no rights, a drive
that fails) is not an empty one: a root that was not found is then unreadable, not absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3.base.errors import DamageError, DriveError
from k3.base.presence import is_directory, is_there
from k3.base.regular_file import read_small_file
from k3.base.safe_text import NAME_CHARACTERS_MAX
from k3.base.strict_json import parse_object
from k3.container.layout import EXPERTS_DIRECTORY, ROOT_NAME
from k3.container.manifest import Manifest
from k3.container.reader import SMALL_FILE_BYTES_MAX, listed_places, recorded_places
from k3.verify.finding import Finding, Kind, finding_of

_MOUNT = "Mount the drive, or name its directory with --dirs"


def find_roots(home: Path, manifest: Manifest, places: Sequence[Path]) -> tuple[list[Path | None], list[Finding]]:
    """Return the directory of each root by number, None where there is none, and a finding for each of those.

    A drive root is looked for by the UUID in its root.json: in `places`, at its recorded path, and at the paths
    of the other roots, since drives may be mounted the other way round. A source root is the place that holds
    most of its files; a download cache's folder stands for each of its revisions.
    """
    hints = recorded_places(home, manifest)
    places, unlisted = listed_places(places)
    claims = {candidate: _claims(candidate) for candidate in [*places, *hints]}
    refused = [*unlisted, *(claim.refused for claim in claims.values() if claim.refused is not None)]
    by_uuid: dict[str, Path] = {}
    for candidate, claim in claims.items():
        by_uuid.setdefault(claim.root, candidate)
    located: list[Path | None] = []
    findings = []
    for number, root in enumerate(manifest.roots):
        directory: Path | None = home
        hint = hints[number]
        try:
            if root.kind == "drive":
                directory = by_uuid.get(root.uuid) or _by_hint(hint, claims[hint], manifest)
            elif root.kind == "source":
                directory = _fullest(number, manifest, [*places, hint])
        except DriveError as error:
            directory = None
            refused.append(error)
        located.append(directory)
        if directory is None:
            findings.append(_not_there(number, manifest, hint, claims[hint], refused))
        elif root.kind == "drive" and (error_here := claims[directory].refused) is not None:
            # Its root.json may be read by the next try: a drive that refuses once is told all the same.
            findings.append(finding_of(error_here, Kind.UNREADABLE, root=number))
    return located, findings


@dataclass(frozen=True, slots=True)
class _Claim:
    """The container and root UUIDs that a directory's root.json gives; empty where it gives none.

    `refused` is the error of a file that could not be read; that there is none is no error.
    """

    container: str = ""
    root: str = ""
    refused: DriveError | None = None


def _by_hint(hint: Path, claim: _Claim, manifest: Manifest) -> Path | None:
    """Return the recorded place, if it looks like a root of this container whose root.json is damaged or lost."""
    if claim.root in {root.uuid for root in manifest.roots}:
        return None  # it is another root
    if claim.container == manifest.container or claim.root == "":
        return hint if is_directory(hint / EXPERTS_DIRECTORY) else None
    return None  # it is another container's


def _fullest(number: int, manifest: Manifest, places: Sequence[Path]) -> Path | None:
    names = [file.path for file in manifest.files if file.root == number]
    counts = [sum(_may_be_there(place / name) for name in names) for place in places]
    best = max(range(len(places)), key=lambda index: (counts[index], -index))
    return places[best] if counts[best] or not names else None


def _may_be_there(path: Path) -> bool:
    """Return False only if nothing is at `path`. The check of a file tells that it cannot be looked at."""
    try:
        return is_there(path)
    except DriveError:
        return True


def _not_there(
    number: int, manifest: Manifest, hint: Path, claim: _Claim, refused: Iterable[DriveError]
) -> Finding:
    root = manifest.roots[number]
    problem = f"root {number} ({root.kind} {root.uuid}) is not there"
    for error in refused:  # it may well be there
        return finding_of(
            DriveError(f"root {number} ({root.kind} {root.uuid}) was not found: {error.problem}", path=error.path,
                       advice=error.advice), Kind.UNREADABLE, root=number,
        )  # fmt: skip
    if root.kind == "source":
        problem += ": no directory holds any of its files"
    elif claim.container not in ("", manifest.container):
        problem += f": its place holds a root of container {claim.container}"
    elif claim.root:
        problem += f": its place holds root {claim.root}"
    return Finding(Kind.INCOMPLETE, problem, path=str(hint), root=number, advice=_MOUNT)


def _claims(directory: Path) -> _Claim:
    path = directory / ROOT_NAME
    try:
        if not is_there(path):
            return _Claim()
        data = read_small_file(path, SMALL_FILE_BYTES_MAX, DamageError)
        document = parse_object(data, what="root.json", path=path, error=DamageError, advice=_MOUNT)
    except DriveError as error:
        return _Claim(refused=error)
    except DamageError:  # the structure check says why
        return _Claim()
    container, root = (str(document.get(key, ""))[:NAME_CHARACTERS_MAX] for key in ("container", "root"))
    return _Claim(container, root)
