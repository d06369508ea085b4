"""Holds up that an error's line says of what it speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3.base.errors import DriveError, ShardError, SourceError
from k3.base.regular_file import regular_size


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ShardError("is a web page", path="/x/y", advice="Fetch it"), "file /x/y is a web page. Fetch it"),
        (ShardError("has a hole", path="/x", tensor="t", offset=0), "file /x, tensor t, offset 0 has a hole"),
        (SourceError("does not exist; it holds b", path="/a"), "file /a does not exist; it holds b"),
        (DriveError("cannot be locked", path="/a"), "file /a cannot be locked"),
        (DriveError("cannot read: Input/output error", path="/a"), "cannot read: Input/output error (file /a)"),
        (SourceError("is nowhere"), "is nowhere"),
        (SourceError("island is not there", path="/a"), "island is not there (file /a)"),
    ],
)  # fmt: skip
def test_a_problem_that_begins_with_a_verb_has_the_place_as_its_subject(error: Exception, line: str) -> None:
    assert str(error) == line


def test_a_dangling_link_is_named_first(tmp_path: Path) -> None:
    link = tmp_path / "model.safetensors"
    link.symlink_to("gone")
    with pytest.raises(ShardError) as caught:
        regular_size(link)
    assert str(caught.value).startswith(f"file {link} is a dangling link: its target ")
