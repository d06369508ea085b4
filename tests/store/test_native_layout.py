"""Holds up: Python, C++ and the type stub agree on the ring's bytes and the module's names."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import k3.store
from k3.store import _store
from k3.store.protocol import ring_layout


def test_the_header_words_are_where_python_says() -> None:
    layout = _store.layout()
    assert layout["magic"] == ring_layout.MAGIC
    for name in ("magic", "entries", "request_tail", "request_head", "completion_tail", "completion_head",
                 "daemon_asleep", "client_asleep", "state"):  # fmt: skip
        assert layout[f"RingHeader.{name}"] == getattr(ring_layout, f"{name.upper()}_AT"), name
    assert layout["header_bytes"] == ring_layout.HEADER_BYTES


def test_the_entries_are_built_as_python_says() -> None:
    layout = _store.layout()
    for name, offset in ring_layout.REQUEST_FIELDS.items():
        assert layout[f"Request.{name}"] == offset, name
    for name, offset in ring_layout.COMPLETION_FIELDS.items():
        assert layout[f"Completion.{name}"] == offset, name
    assert layout["request_bytes"] == ring_layout.REQUEST.size
    assert layout["completion_bytes"] == ring_layout.COMPLETION.size
    named = sum(key.startswith("Completion.") for key in layout)
    assert named == len(ring_layout.COMPLETION_FIELDS)


def test_sizes_and_limits() -> None:
    layout = _store.layout()
    entries = ring_layout.DEFAULT_ENTRIES
    assert layout["default_entries"] == entries
    assert layout["requests_at"] == ring_layout.REQUESTS_AT
    assert layout["completions_at"] == ring_layout.completions_at(entries)
    assert layout["ring_bytes"] == ring_layout.ring_bytes(entries)
    assert layout["entries_max"] == ring_layout.ENTRIES_MAX
    assert layout["clients_max"] == ring_layout.CLIENTS_MAX
    assert layout["slots_max"] == ring_layout.SLOTS_MAX


def test_the_stub_names_what_the_module_has() -> None:
    stub = ast.parse((Path(inspect.getfile(k3.store)).parent / "_store.pyi").read_text())
    declared: dict[str, set[str]] = {}
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            declared[node.name] = set()
        elif isinstance(node, ast.ClassDef):
            functions = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            fields = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}  # type: ignore[union-attr]
            declared[node.name] = functions | fields
    assert set(declared) == {name for name in dir(_store) if not name.startswith("__")}
    for name, members in declared.items():
        if members:
            public = {member for member in dir(getattr(_store, name)) if not member.startswith("_")}
            assert {member for member in members if not member.startswith("_")} == public, name
