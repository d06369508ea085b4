"""The state of a destination before a run: empty, unfinished, the container asked for, another, or foreign files.

A finished container is recognised or refused, never changed; foreign files are refused by name. Reads only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3.base.errors import NotAContainerError, ResumeError
from k3.base.presence import is_directory, is_named, is_there
from k3.checkpoint.snapshot import Snapshot
from k3.container.layout import (
    EXPERTS_DIRECTORY,
    JOURNAL_NAME,
    PARTIAL_SUFFIX,
    RESERVED_NAMES,
    ROOT_NAME,
)
from k3.container.manifest import Manifest
from k3.container.reader import Container, read_manifest
from k3.repack.plan import Plan
from k3.repack.publish import layer_ranges
from k3.repack.repack_request import RepackRequest
from k3.repack.same_source import first_unlike
from k3.repack.small_files import SmallFiles, check_present


def recognise(request: RepackRequest, snapshot: Snapshot, small_files: SmallFiles) -> Manifest:
    """Return the manifest of the finished container in home. ResumeError if it is not the one asked for."""
    manifest = read_manifest(request.home)
    recipe = request.recipe
    shares = request.root_shares(request.shares or (1,) * len(request.drives or (None,)))
    plan = Plan(snapshot, recipe, shares, in_place=request.in_place)
    asked: dict[str, Any] = {
        "bits": recipe.bits, "mla_bits": recipe.mla_bits, "head_bits": recipe.head_bits,
        "in_place": request.in_place,
        "shards": [[shard.name, shard.size_bytes] for shard in snapshot.shards],
        "directories": len(plan.roots), "layers": layer_ranges(plan),
    }  # fmt: skip
    there: dict[str, Any] = {
        **manifest.quantization,
        "in_place": is_in_place(manifest),
        "shards": [[shard.name, shard.bytes] for shard in manifest.source],
        "directories": len(manifest.roots),
        "layers": manifest.geometry.layers,
    }
    if request.shares is not None and not request.in_place:
        asked["shares"], there["shares"] = list(request.root_shares(request.shares)), list(manifest.shares)
    published = {shard.name: shard.sha256 for shard in manifest.source}
    for shard in snapshot.shards:
        if shard.blob_sha256 is not None and published.get(shard.name, shard.blob_sha256) != shard.blob_sha256:
            asked[f"sha256 of {shard.name}"] = shard.blob_sha256
            there[f"sha256 of {shard.name}"] = published[shard.name]
    if any(asked[key] != there[key] for key in asked):
        raise _other_parameters(request, asked, there)
    small_files.check_finished(manifest, request.home)
    if not request.verify_full:  # which compares them, and names all differences
        check_present(manifest, request.home)
    container = Container.open(request.home, (*request.root_directories()[1:], *snapshot.directories))
    try:
        unlike = first_unlike(container, snapshot)
    finally:
        container.close()
    if unlike is not None:
        raise ResumeError(
            f"a finished container of another source is here: {unlike} differs from the snapshot's",
            path=request.home,
            advice="Choose another directory; a finished container is never changed",
        )
    if not request.in_place:
        asked = {f"root {n}": str(path.resolve()) for n, path in enumerate(request.root_directories())}
        there = {f"root {located.number}": str(located.directory.resolve()) for located in container.roots}
        if asked != there:
            raise _other_parameters(request, asked, there)
    return manifest


def _other_parameters(request: RepackRequest, asked: Mapping[str, Any], there: Mapping[str, Any]) -> ResumeError:
    details = "; ".join(
        f"{key}: {there[key]!r} there, {asked[key]!r} asked for" for key in asked if asked[key] != there[key]
    )
    return ResumeError(
        f"a finished container with other parameters is here: {details[:1000]}",
        path=request.home,
        advice="Choose another directory; a finished container is never changed",
    )


def is_in_place(manifest: Manifest) -> bool:
    """Return whether a container's experts are in the snapshot's own files."""
    return any(root.kind == "source" for root in manifest.roots)


def refuse_foreign_files(request: RepackRequest, small_files: SmallFiles) -> None:
    """Files that the run would write over, without a journal: they are somebody else's."""
    if is_there(request.home / JOURNAL_NAME):
        return
    for directory in request.root_directories():
        if is_there(directory) and not is_directory(directory):
            raise NotAContainerError("the destination is not a directory", path=directory)
        ours = {ROOT_NAME}
        if directory == request.home:
            ours |= {*RESERVED_NAMES, *small_files.names} - {EXPERTS_DIRECTORY}
        there = [name for name in ours | {name + PARTIAL_SUFFIX for name in ours} if is_named(directory / name)]
        experts = directory / EXPERTS_DIRECTORY
        if is_directory(experts):
            there += [f"{EXPERTS_DIRECTORY}/{path.name}" for path in experts.iterdir()]
        if there:
            raise NotAContainerError(
                f"the directory holds {min(there)}, which belongs to no unfinished repack of this home",
                path=directory,
                advice="Choose an empty directory, or remove what is there yourself",
            )
