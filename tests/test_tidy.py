"""Holds up the rules of CONTRIBUTING.md that no linter knows: prose, timing and paths.

`tidy_baseline.json` counts what broke a rule when the rule came: a file may only get better, a new one starts at
none. `python -m tests.test_tidy` writes it anew after something was mended.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BASELINE = Path(__file__).with_name("tidy_baseline.json")

COLUMNS_MAX = 115
TABLE_COLUMNS_MAX = 140
HANG_GUARD_S = 10.0
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "time"}
RIDDLES = re.compile(r"(What|How|Whether|Where|Whoever)\b")
MAY_RIDDLE = re.compile(rf"[\"']\s*{RIDDLES.pattern}")
MAY_TIME = re.compile(r"\btime\.|\bwait_until\b")
"""Files without a match are not parsed: that takes longer than all else here."""
SLEEPS = re.compile(r"\bsleep\([^)]")
MACHINE_PATHS = re.compile("|".join(["/wor" + r"k/(main|team|shared)", r"\.\./shar" + "ed", "/roo" + "t/"]))
"""Places of the machines on which this was written."""


@cache
def tracked() -> tuple[Path, ...]:
    """Every file that git knows and that is text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return tuple(path for path in paths if path.is_file() and "vectors" not in path.parts)


@cache
def text_of(path: Path) -> str | None:
    """Return what a file says, or None when it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def riddles(path: Path) -> Iterator[str]:
    """Docstrings that begin with a question's word instead of saying what is done or what it is."""
    text = text_of(path)
    if path.suffix != ".py" or text is None or not MAY_RIDDLE.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring, line = ast.get_docstring(node) or "", getattr(node, "lineno", 1)
            if RIDDLES.match(docstring):
                yield f"{line}: {docstring.splitlines()[0]}"
        for below in ast.iter_child_nodes(node):  # a string under an assignment says what its name means
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                said = below.value.value
                is_first = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body[0] is below
                if isinstance(said, str) and RIDDLES.match(said) and not is_first:
                    yield f"{below.lineno}: {said.splitlines()[0]}"


def wide_prose(path: Path) -> Iterator[str]:
    """Lines and rows of tables that are too long to be read, but for code, links and tables that code writes."""
    text = text_of(path)
    if path.suffix != ".md" or text is None:
        return
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if in_code or "](http" in line or (line.startswith("|") and "attacks" in path.parts):
            continue
        if len(line) > (TABLE_COLUMNS_MAX if line.startswith("|") else COLUMNS_MAX):
            yield f"{number}: {len(line)} columns"


def machine_paths(path: Path) -> Iterator[str]:
    """Lines that name a place of one machine."""
    text = text_of(path)
    if text is None or not MACHINE_PATHS.search(text):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATHS.search(line):
            yield f"{number}: {line.strip()}"


def timed_asserts(path: Path) -> Iterator[str]:
    """Yield assertions that something took less than a few seconds: a busy machine breaks them without a fault."""
    text = text_of(path)
    if path.suffix != ".py" or "tests" not in path.parts or text is None or not MAY_TIME.search(text):
        return
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or any(
            "campaign" in ast.unparse(d) for d in function.decorator_list
        ):
            continue
        timed: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _is_timed(node.value, timed):
                timed.update(target.id for target in node.targets if isinstance(target, ast.Name))
        for node in ast.walk(function):
            if isinstance(node, ast.Assert):
                yield from (
                    f"{node.lineno}: {ast.unparse(node.test)}"
                    for compared in ast.walk(node.test)
                    if isinstance(compared, ast.Compare) and _bounds_time(compared, timed)
                )


def sleeps(path: Path) -> Iterator[str]:
    """Sleeping in a test: a machine may take longer, and a quicker one waits for nothing."""
    text = text_of(path)
    if path.suffix != ".py" or "tests" not in path.parts or "support" in path.parts or text is None:
        return
    for number, line in enumerate(text.splitlines(), 1):
        if SLEEPS.search(line):
            yield f"{number}: {line.strip()}"


def _is_timed(value: ast.AST, timed: set[str]) -> bool:
    """Tell whether an expression reads a clock, or a name that holds such a reading."""
    for node in ast.walk(value):
        if isinstance(node, ast.Attribute) and node.attr in CLOCKS and isinstance(node.value, ast.Name):
            if node.value.id == "time":
                return True
        elif (isinstance(node, ast.Name) and node.id in timed) or (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "wait_until"
        ):
            return True
    return False


def _bounds_time(compared: ast.Compare, timed: set[str]) -> bool:
    """Tell whether a comparison holds a reading of the clock below a constant of a few seconds."""
    sides = [compared.left, *compared.comparators]
    for left, operator, right in zip(sides, compared.ops, sides[1:], strict=False):
        below, above = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
        if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and _is_timed(below, timed):
            try:
                bound = float(eval(compile(ast.Expression(above), "bound", "eval"), {"__builtins__": {}}))
            except (NameError, TypeError, ValueError):
                continue  # no constant: a deadline
            if bound < HANG_GUARD_S:
                return True
    return False


RULES: dict[str, Callable[[Path], Iterator[str]]] = {
    "riddles": riddles,
    "wide_prose": wide_prose,
    "machine_paths": machine_paths,
    "timed_asserts": timed_asserts,
    "sleeps": sleeps,
}


def offences(rule: str) -> dict[str, list[str]]:
    """Return what breaks a rule, by file."""
    found = {path.relative_to(ROOT).as_posix(): list(RULES[rule](path)) for path in tracked()}
    return {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize("rule", RULES)
def test_nothing_breaks_the_rule_that_did_not_before(rule: str) -> None:
    allowed: dict[str, int] = json.loads(BASELINE.read_text())[rule]
    worse = {name: lines for name, lines in offences(rule).items() if len(lines) > allowed.get(name, 0)}
    assert not worse, "\n".join(f"{name}:{line}" for name, lines in worse.items() for line in lines)


TIMED = """
def test() -> None:
    began_s = time.monotonic()
    took_s = time.monotonic() - began_s
    assert {}
"""


@pytest.mark.parametrize(
    ("condition", "is_refused"),
    [
        ("took_s < 0.1", True), ("0.2 <= took_s < 0.4", True), ("5 * 0.2 > took_s", True),
        ("time.monotonic() - began_s <= 2", True), ("wait_until(idle) < 0.1", True),
        ("took_s >= 0.2", False), ("took_s < 60", False), ("time.monotonic() < deadline", False), ("1 < 2", False),
    ],
)  # fmt: skip
def test_a_bound_on_time_is_seen(tmp_path: Path, condition: str, is_refused: bool) -> None:
    file = tmp_path / "tests" / "test_it.py"
    file.parent.mkdir()
    file.write_text(TIMED.format(condition))
    assert bool(list(timed_asserts(file))) == is_refused


NAP = "time.sle" + "ep(0.1)"


def test_a_sleep_is_seen_but_in_what_tests_share(tmp_path: Path) -> None:
    for name, found in (
        ("tests/test_it.py", [f"1: {NAP}"]),
        ("tests/support/it.py", []),
        ("it.py", []),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{NAP}\n")
        assert list(sleeps(path)) == found


def test_what_is_seen_in_prose_and_docstrings(tmp_path: Path) -> None:
    code, page = tmp_path / "code.py", tmp_path / "page.md"
    code.write_text('"""How it is."""\nA = 1\n"""Whether it is."""\ndef f():\n    """Return what it is."""\n')
    page.write_text(f"{'x' * 116}\n|{'x' * 138}|\n|{'x' * 139}|\n```\n{'x' * 200}\n```\n{'x' * 115}\n")
    assert list(riddles(code)) == ["1: How it is.", "3: Whether it is."]
    assert list(wide_prose(page)) == ["1: 116 columns", "3: 141 columns"]


if __name__ == "__main__":
    counts = {rule: {name: len(lines) for name, lines in offences(rule).items()} for rule in RULES}
    BASELINE.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")
