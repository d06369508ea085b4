"""The request of a repack: everything that a user asked for, as one checked value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3.base.errors import ResumeError, SourceError
from k3.model.kinds import is_container
from k3.model.tensor_recipe import Recipe

DEFAULT_RECIPE = Recipe()


@dataclass(frozen=True, slots=True)
class RepackRequest:
    """Source directories, destination and choices; paths as the user gave them.

    `drives` are the directories that take expert pieces, empty for home alone; `shares` belong to them, None to
    measure. `layers` restricts the container to some decoder layers. `jobs` is the number of shards that are
    streamed at once, None to choose; it changes no byte of the container.
    """

    sources: tuple[Path, ...]
    home: Path
    drives: tuple[Path, ...] = ()
    shares: tuple[int, ...] | None = None
    recipe: Recipe = DEFAULT_RECIPE
    in_place: bool = False
    layers: tuple[int, ...] | None = None
    direct: bool = True
    bytes_per_s: int | None = None
    verify_full: bool = False
    jobs: int | None = None

    def root_directories(self) -> tuple[Path, ...]:
        """Directories by root number: home, then the drives that are not home."""
        home = self.home.resolve()
        return (self.home, *(drive for drive in self.drives if drive.resolve() != home))

    def root_shares(self, drive_shares: Sequence[int]) -> tuple[int, ...]:
        """Shares by root number, from the shares of `drives` (or of home, when there are no drives)."""
        home = self.home.resolve()
        drives = self.drives or (self.home,)
        of_home = sum(share for drive, share in zip(drives, drive_shares, strict=True) if drive.resolve() == home)
        others = [share for drive, share in zip(drives, drive_shares, strict=True) if drive.resolve() != home]
        return (of_home, *others)

    def check_places(self, snapshot_directories: Sequence[Path]) -> None:
        """Refuse destinations inside the source and the reverse: a container never touches its source."""
        for place in (*self.root_directories(), *snapshot_directories):
            try:
                str(place.resolve()).encode()
            except UnicodeEncodeError:
                raise SourceError("the path is not text, so no manifest can name it", path=place) from None
        for target in self.root_directories():
            resolved = target.resolve()
            for parent in resolved.parents:
                if parent != self.home.resolve() and is_container(parent):
                    raise ResumeError(
                        f"the destination lies inside the finished container {parent}",
                        path=target,
                        advice="Choose a directory outside of it; a finished container is never changed",
                    )
            for source in snapshot_directories:
                origin = source.resolve()
                if resolved == origin or origin in resolved.parents:
                    raise SourceError(
                        f"the destination lies inside the source {source}",
                        path=target,
                        advice="Choose a directory outside of the snapshot; the source is never written to",
                    )
                if resolved in origin.parents and any(target.glob("config.json")):
                    raise SourceError(
                        f"the source {source} lies inside the destination, which holds a snapshot itself",
                        path=target,
                        advice="Choose an empty directory",
                    )
