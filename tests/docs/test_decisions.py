"""docs/decisions/: every decision has its number, date and status, and its row in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"
FILES = sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")
HEAD = re.compile(r"# (\d{4})\. ([^\n]+)\n\n- Date: (\d{4}-\d{2}-\d{2})\n- Status: ([^\n]+)\n\n## ")
ROW = re.compile(r"^\| \[(\d{4})\]\(([^)]+)\) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
SECTIONS = ["Context", "Choice", "Consequences", "Evidence"]
STATUS = re.compile(r"accepted|superseded by \[(\d{4})\]\(([^)]+)\)")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_decision_has_its_head_and_sections(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    head = HEAD.match(text)
    assert head, "begins with '# NNNN. Title', '- Date: YYYY-MM-DD', '- Status: …' and a section"
    number, title, _, status = head.groups()
    assert path.name.startswith(f"{number}-")
    assert not title.endswith(".")
    told = STATUS.fullmatch(status)
    assert told, "the status is 'accepted' or 'superseded by [NNNN](file)'"
    assert told[2] is None or (told[2].startswith(told[1]) and (DECISIONS / told[2]).is_file())
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections == [name for name in SECTIONS if name in sections]
    assert "Choice" in sections


def test_the_index_has_a_row_for_each_in_order() -> None:
    rows = ROW.findall((DECISIONS / "README.md").read_text(encoding="utf-8"))
    heads = []
    for path in FILES:
        head = HEAD.match(path.read_text(encoding="utf-8"))
        assert head
        heads.append((head[1], path.name, head[3], head[2]))
    assert rows == heads
    numbers = [int(row[0]) for row in rows]
    assert numbers == list(range(1, len(numbers) + 1)), "numbers are used once, without gaps"
