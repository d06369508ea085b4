"""Finds a container's roots without giving up at the first that is not there.

Unlike the reader, which needs all of them, a check wants to know which are missing, which changed places, and
what can still be looked at. Whether a root.json is sound is the structure check's business; here a damaged one
only means that a root is taken to be where the manifest says.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from k3.container.hf_cache import possible_snapshots
from k3.container.layout import EXPERTS_DIRECTORY, ROOT_NAME
from k3.container.manifest import Manifest
from k3.container.reader import recorded_places
from k3.verify.finding import Finding, Kind

_MOUNT = "Mount the drive, or name its directory with --dirs"


def find_roots(home: Path, manifest: Manifest, places: Sequence[Path]) -> tuple[list[Path | None], list[Finding]]:
    """The directory of each root by number, None where there is none, and a finding for each of those.

    A drive root is looked for by the UUID in its root.json: in `places`, at its recorded path, and at the paths
    of the other roots, since drives may be mounted the other way round. A source root is the place that holds
    most of its files; a download cache's folder stands for each of its revisions.
    """
    hints = recorded_places(home, manifest)
    places = [directory for place in places for directory in possible_snapshots(place)]
    by_uuid: dict[str, Path] = {}
    for candidate in [*places, *hints]:
        by_uuid.setdefault(_claims(candidate)[1], candidate)
    located: list[Path | None] = []
    findings = []
    for number, root in enumerate(manifest.roots):
        directory: Path | None = home
        if root.kind == "drive":
            directory = by_uuid.get(root.uuid) or _by_hint(hints[number], manifest)
        elif root.kind == "source":
            directory = _fullest(number, manifest, [*places, hints[number]])
        located.append(directory)
        if directory is None:
            findings.append(_not_there(number, manifest, hints[number]))
    return located, findings


def _by_hint(hint: Path, manifest: Manifest) -> Path | None:
    """The recorded place, if it looks like a root of this container whose root.json is damaged or lost."""
    container, uuid = _claims(hint)
    if uuid in {root.uuid for root in manifest.roots}:
        return None  # it is another root
    if container == manifest.container or uuid == "":
        return hint if (hint / EXPERTS_DIRECTORY).is_dir() else None
    return None  # it is another container's


def _fullest(number: int, manifest: Manifest, places: Sequence[Path]) -> Path | None:
    names = [file.path for file in manifest.files if file.root == number]
    counts = [sum((place / name).exists() for name in names) for place in places]
    best = max(range(len(places)), key=lambda index: (counts[index], -index))
    return places[best] if counts[best] or not names else None


def _not_there(number: int, manifest: Manifest, hint: Path) -> Finding:
    root = manifest.roots[number]
    container, uuid = _claims(hint)
    problem = f"root {number} ({root.kind} {root.uuid}) is not there"
    if root.kind == "source":
        problem += ": no directory holds any of its files"
    elif container not in ("", manifest.container):
        problem += f": its place holds a root of container {container}"
    elif uuid:
        problem += f": its place holds root {uuid}"
    return Finding(Kind.INCOMPLETE, problem, path=str(hint), root=number, advice=_MOUNT)


def _claims(directory: Path) -> tuple[str, str]:
    """The container and root UUIDs that a directory's root.json gives; empty where it gives none."""
    try:
        document = json.loads((directory / ROOT_NAME).read_bytes())
    except (OSError, ValueError):
        return "", ""
    if not isinstance(document, dict):
        return "", ""
    return str(document.get("container", "")), str(document.get("root", ""))
