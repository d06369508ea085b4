"""CHANGELOG.md and the formats' documents name the versions that the code has."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from k3.container import layout
from k3.engine.run import state_file
from k3.store.protocol import wire
from k3.store.routing import route_trace

ROOT = Path(__file__).parents[2]
POLICY = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("## Unreleased")[0]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("container format", layout.VERSION), ("store protocol", wire.VERSION), ("state file", state_file.VERSION),
        ("routing trace", route_trace.VERSION),
    ],
)  # fmt: skip
def test_the_policy_names_the_numbers_of_the_code(name: str, number: int) -> None:
    row = re.search(rf"^\| {name}, (\d+) \| `([^`]+)` \|", POLICY, re.MULTILINE)
    assert row
    assert int(row[1]) == number
    title = (ROOT / row[2]).read_text(encoding="utf-8").partition("\n")[0]
    assert title.endswith(f"version {number}")


def test_package_and_c_client_have_their_versions_once() -> None:
    assert f'\nversion = "{version("k3-store")}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    header = (ROOT / "store" / "include" / "k3_store.h").read_text(encoding="utf-8")
    assert f"#define K3_STORE_VERSION {wire.VERSION}\n" in header
