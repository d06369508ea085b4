"""LMDB 0.9 data files, parsed from bytes in memory and without LMDB.

LMDB maps a file and trusts its pages: one that is damaged, forged or truncated while it is mapped kills the
process by a signal. Here every page number, offset, size and key is checked against its bounds before it is used,
so that any bytes at all give a record or a DamageError.

Immutable; may be used from any thread. Supports what this project writes: plain keys with one value each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from k3.base.errors import DamageError

MAGIC = 0xBEEFC0DE
FILE_VERSION = 1
PAGE_SIZES = tuple(1 << power for power in range(9, 17))
DEPTH_MAX = 32
"""Largest depth of a tree: LMDB's own cursors have no room for more."""

_NO_PAGE = (1 << 64) - 1
_PAGE = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_OVERFLOW = struct.Struct("<QHHI")  # number, pad, flags, count of pages
_NODE = struct.Struct("<HHHH")  # low and high half of a size or page number, flags, key bytes
_TREE = struct.Struct("<IHHQQQQQ")  # page size, flags, depth, branch, leaf and overflow pages, entries, root
_META = struct.Struct(f"<II16x{2 * _TREE.size}xQQ")  # magic, version, (address, size, trees), last page, commit
_TREES_AT = _PAGE.size + 24
_LONG = struct.Struct("<Q")
_BRANCH, _LEAF, _OVERFLOWS, _IS_META = 1, 2, 4, 8
_KINDS = _BRANCH | _LEAF | _OVERFLOWS | _IS_META | 0x60  # 0x20 and 0x40: duplicate keys, which we never write
_IS_LONG, _TREE_RECORD = 1, 2


@dataclass(frozen=True, slots=True)
class _Child:
    """A page to visit: its level (1 for leaves), and the bounds of the keys below it."""

    page: int
    level: int
    low: bytes
    high: bytes | None


OnDamage = Callable[[DamageError], None]


@dataclass(frozen=True, slots=True)
class _Root:
    """The record of one tree: its depth, its number of entries, and its topmost page."""

    flags: int
    depth: int
    entries: int
    page: int


class Node(NamedTuple):
    """A record of a leaf, or a child of a branch; its bytes are known to be inside the page."""

    key: bytes
    flags: int
    number: int  # in a leaf: bytes of the value; in a branch: the child's page
    value_at: int  # offset in the file


class PageTree:
    """The newest state that the file's two meta pages describe. Raises DamageError when neither is usable."""

    def __init__(self, data: bytes, path: Path) -> None:
        self.path = path
        sizes = [size for size in PAGE_SIZES if _page_size_at(data, size) == size]
        found = [meta for offset in (0, *sizes[:1]) if (meta := _meta(data, offset)) is not None]
        if not found:
            raise DamageError("the file has no valid meta page", path=path, offset=0)
        self.sound_meta_pages = len(found)
        _, last_page, page_bytes, self._main = max(found)
        if (last_page + 1) * page_bytes > len(data):
            needed_bytes = (last_page + 1) * page_bytes
            raise DamageError(f"file is truncated: {len(data)} bytes instead of {needed_bytes}", path=path)
        self._pages = _Pages(data, path, page_bytes, last_page)

    def database(self, name: bytes) -> Database | None:
        """Return the named database, None when there is none. Raises DamageError when its record is invalid."""
        found = Database(self._pages, _root(self._main)).find(name)
        if found is None:
            return None
        if found.flags != _TREE_RECORD or found.number != _TREE.size:
            raise self._pages.damage("has a record where a database is expected", found.value_at)
        return Database(self._pages, _root(self._pages.data[found.value_at : found.value_at + _TREE.size]))


class Database:
    """One tree of the file: plain keys in ascending order, one value each."""

    def __init__(self, pages: _Pages, root: _Root) -> None:
        empty = root.page == _NO_PAGE and root.depth == 0 and root.entries == 0
        if root.flags or not (empty or 1 <= root.depth <= DEPTH_MAX):
            raise pages.damage("has a database with flags or a depth that are never written", None)
        self._pages = pages
        self._root = root

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, None when there is none. Raises DamageError."""
        node = self.find(key)
        return None if node is None else self._pages.value(node)

    def items(self, lost: OnDamage | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Yield every record in key order; each is the one that `get` finds under its key.

        Raises DamageError for the first page or record that is invalid. With `lost`, that is called with each such
        error instead, and the records behind it are skipped.
        """
        count = 0
        for item in self._walk(_raise if lost is None else lost):
            count += 1
            yield item
        if count != self._root.entries:
            (_raise if lost is None else lost)(
                self._pages.damage(f"has {count} of {self._root.entries} records", None)
            )

    def find(self, key: bytes) -> Node | None:
        """Return the node of a key, None when there is none. Visits one page a level."""
        pages, page = self._pages, self._root.page
        for level in range(self._root.depth, 0, -1):
            leaf = level == 1
            at, offsets = pages.nodes(page, leaf=leaf)
            low, high = (0, len(offsets)) if leaf else (1, len(offsets))  # a branch's first key counts as empty
            while low < high:
                middle = (low + high) // 2
                node = pages.node(at, offsets, middle, leaf=leaf)
                if leaf and node.key == key:
                    return node
                if node.key <= key:
                    low = middle + 1
                else:
                    high = middle
            if leaf:
                return None
            page = pages.node(at, offsets, low - 1, leaf=False).number
        return None

    def _walk(self, lost: OnDamage) -> Iterator[tuple[bytes, bytes]]:
        """Yield every record. Keys must ascend, inside the bounds that the branches above them set."""
        seen: set[int] = set()
        stack = [_Child(self._root.page, self._root.depth, b"", None)] if self._root.depth else []
        while stack:
            child = stack.pop()
            try:
                if child.page in seen:
                    raise self._pages.damage(f"reaches page {child.page} twice", None)
                seen.add(child.page)
                at, offsets = self._pages.nodes(child.page, leaf=child.level == 1)
            except DamageError as error:
                lost(error)
                continue
            if child.level == 1:
                yield from self._leaf(at, offsets, child, lost)
            else:
                stack += reversed(self._children(at, offsets, child, lost))

    def _leaf(
        self, at: int, offsets: tuple[int, ...], place: _Child, lost: OnDamage
    ) -> Iterator[tuple[bytes, bytes]]:
        before = b""
        for index in range(len(offsets)):
            try:
                node = self._pages.node(at, offsets, index, leaf=True)
                if (
                    node.key <= before
                    or node.key < place.low
                    or (place.high is not None and node.key >= place.high)
                ):
                    raise self._pages.damage("has a key that is out of order", node.value_at)
                value = self._pages.value(node)
            except DamageError as error:
                lost(error)
                continue
            before = node.key
            yield node.key, value

    def _children(self, at: int, offsets: tuple[int, ...], place: _Child, lost: OnDamage) -> list[_Child]:
        """Return the children of a branch, each with the bounds of the keys below it."""
        children: list[_Child] = []
        for index in range(len(offsets)):
            try:
                node = self._pages.node(at, offsets, index, leaf=False)
                key = node.key if index else place.low
                before = children[-1].low if children else place.low
                if index and (key <= before or (place.high is not None and key >= place.high)):
                    raise self._pages.damage("has a key that is out of order", node.value_at)
            except DamageError as error:
                lost(error)
                continue
            if children:
                children[-1] = replace(children[-1], high=key)
            children.append(_Child(node.number, place.level - 1, key, place.high))
        return children


class _Pages:
    """A file's pages, checked: a node it returns is inside its page, and the page inside the file."""

    def __init__(self, data: bytes, path: Path, page_bytes: int, last_page: int) -> None:
        self.data = data
        self._path = path
        self._page_bytes = page_bytes
        self._last_page = last_page

    def nodes(self, page: int, *, leaf: bool) -> tuple[int, tuple[int, ...]]:
        """Return a page's offset in the file, and its nodes' offsets in the page."""
        at = self._place(page)
        number, _, flags, lower, upper = _PAGE.unpack_from(self.data, at)
        if number != page or flags & _KINDS != (_LEAF if leaf else _BRANCH):
            raise self.damage(f"has no {'leaf' if leaf else 'branch'} where page {page} should be one", at)
        count = (lower - _PAGE.size) // 2
        if lower % 2 or count < 1 or not lower <= upper <= self._page_bytes:
            raise self.damage(f"has invalid bounds in page {page}", at)
        return at, struct.unpack_from(f"<{count}H", self.data, at + _PAGE.size)

    def node(self, at: int, offsets: tuple[int, ...], index: int, *, leaf: bool) -> Node:
        """Return a node of the page at offset `at`; its header, key and content are inside the page."""
        offset = offsets[index]
        if offset < _PAGE.size + 2 * len(offsets) or offset + _NODE.size > self._page_bytes:
            raise self.damage("has a record outside of its page", at)
        low, high, flags, key_bytes = _NODE.unpack_from(self.data, at + offset)
        key_at = at + offset + _NODE.size
        value_at = key_at + key_bytes
        number = low | high << 16
        if not leaf:
            number, stored_bytes = number | flags << 32, 0
        else:
            stored_bytes = _LONG.size if flags & _IS_LONG else number
        if value_at + stored_bytes > at + self._page_bytes or (leaf and flags & ~(_IS_LONG | _TREE_RECORD)):
            raise self.damage("has a record that extends beyond its page", at + offset)
        return Node(self.data[key_at:value_at], flags, number, value_at)

    def value(self, node: Node) -> bytes:
        """Return the value of a leaf's node, which may be in pages of its own."""
        if node.flags & _TREE_RECORD:
            raise self.damage("has a database where a record is expected", node.value_at)
        if not node.flags & _IS_LONG:
            return self.data[node.value_at : node.value_at + node.number]
        page = _LONG.unpack_from(self.data, node.value_at)[0]
        at = self._place(page)
        number, _, flags, pages = _OVERFLOW.unpack_from(self.data, at)
        fits = 0 < pages <= self._last_page + 1 - page and node.number <= pages * self._page_bytes - _PAGE.size
        if number != page or flags & _KINDS != _OVERFLOWS or not fits:
            raise self.damage(f"has an invalid long record in page {page}", at)
        return self.data[at + _PAGE.size : at + _PAGE.size + node.number]

    def damage(self, problem: str, offset: int | None) -> DamageError:
        """Return the error for a file whose tree is invalid; `problem` continues "the file"."""
        return DamageError(f"the file {problem}", path=self._path, offset=offset)

    def _place(self, page: int) -> int:
        if not 1 < page <= self._last_page:
            raise self.damage(f"refers to page {page} of {self._last_page + 1}", None)
        return page * self._page_bytes


def _page_size_at(data: bytes, offset: int) -> int:
    """Return the page size in a meta page at this offset, 0 when the file is too short for one."""
    if offset + _PAGE.size + _META.size > len(data):
        return 0
    return int(_TREE.unpack_from(data, offset + _TREES_AT)[0])


def _meta(data: bytes, offset: int) -> tuple[int, int, int, bytes] | None:
    """Return (commit number, last page, page size, record of the main tree), None for an invalid meta page."""
    page_bytes = _page_size_at(data, offset)
    if page_bytes not in PAGE_SIZES or offset not in (0, page_bytes):
        return None
    flags = _PAGE.unpack_from(data, offset)[2]
    magic, version, last_page, commit = _META.unpack_from(data, offset + _PAGE.size)
    if (magic, version) != (MAGIC, FILE_VERSION) or flags & _KINDS != _IS_META or last_page < 1:
        return None
    at = offset + _TREES_AT + _TREE.size
    return commit, last_page, page_bytes, data[at : at + _TREE.size]


def _root(record: bytes) -> _Root:
    _, flags, depth, _, _, _, entries, page = _TREE.unpack(record)
    return _Root(flags, depth, entries, page)


def _raise(error: DamageError) -> None:
    raise error
