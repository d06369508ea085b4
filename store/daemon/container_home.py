"""Which container a daemon serves: the one whose manifest lies in one of its directories, or the one named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3.base.errors import NotAContainerError, UnsupportedError
from k3.base.presence import is_there
from k3.container.layout import JOURNAL_NAME
from k3.model.kinds import MANIFEST_NAME


def find_home(directories: Sequence[Path], named: Path | None) -> Path:
    """Return the home of the container to serve.

    `named` wins. Else exactly one of `directories` must hold a manifest (or an unfinished repack's journal, which
    opening will name). NotAContainerError for none, UnsupportedError for several, DriveError for a directory that
    cannot be looked into.
    """
    if named is not None:
        return named
    homes = [path for path in directories if is_there(path / MANIFEST_NAME)]
    homes = homes or [path for path in directories if is_there(path / JOURNAL_NAME)]
    if not homes:
        shown = ", ".join(map(str, directories)) or "no directory at all"
        raise NotAContainerError(
            f"no container's manifest.json in {shown}",
            advice="Name the directory that has it among --dirs, or with --container",
        )
    if len({path.resolve() for path in homes}) > 1:
        raise UnsupportedError(
            f"several containers: {', '.join(map(str, homes))}", advice="Say which one to serve with --container"
        )
    return homes[0]
