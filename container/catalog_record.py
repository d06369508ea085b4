"""The JSON records of a catalog; every field is checked for the type, range and form of the format.

A catalog's digest proves that its bytes are those that were written, not that they are valid. Immutable; pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from k3.base.errors import DamageError
from k3.base.safe_text import is_plain, shown
from k3.base.strict_json import parse_object
from k3.model.keys import DTYPE_BITS, Encoding

_T = TypeVar("_T")

OFFSET_MAX = (1 << 63) - 1
"""The largest offset that a file can have on Linux."""

NUMBER_MAX = (1 << 32) - 1
"""The largest number of a root or a file: expert records store it in 32 bits."""

DIMENSIONS_MAX = 8

_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_RESTORE = "Restore the catalog from a copy, or repack"


@dataclass(frozen=True, slots=True)
class CatalogExtent:
    """An extent as catalogued; `file` is the number of a data file, which the reader resolves."""

    file: int
    offset: int
    payload_bytes: int
    stored_bytes: int
    digest: bytes

    def as_json(self) -> dict[str, Any]:
        """Return the extent as an object of a `tensors` record."""
        return {
            "file": self.file, "offset": self.offset, "payload": self.payload_bytes,
            "stored": self.stored_bytes, "digest": self.digest.hex(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class CatalogRecord:
    """One JSON object of a catalog.

    Every method named for a type returns a field, or raises DamageError naming the record and the field.
    """

    fields: Mapping[str, Any]
    what: str
    path: Path

    @staticmethod
    def parse(value: bytes, what: str, path: Path) -> CatalogRecord:
        """Return the record in `value`; `what` names it in messages. Raises DamageError when it is not JSON."""
        return CatalogRecord(
            parse_object(value, what=what, path=path, error=DamageError, advice=_RESTORE), what, path
        )

    def refuse(self, problem: str) -> DamageError:
        """Return the error for this record; `problem` continues its name."""
        return DamageError(f"{self.what} {problem}", path=self.path, advice=_RESTORE)

    def number(self, key: str, largest: int = OFFSET_MAX) -> int:
        """Return a whole number from 0 to `largest`."""
        value = self._get(key)
        if type(value) is not int or not 0 <= value <= largest:
            raise self._odd(key, value)
        return value

    def name(self, key: str) -> str:
        """Return a name of printable characters."""
        value = self._get(key)
        if type(value) is not str or not is_plain(value):
            raise self._odd(key, value)
        return value

    def dtype(self, key: str) -> str:
        """Return the name of a known dtype."""
        value = self.name(key)
        if value not in DTYPE_BITS:
            raise self._odd(key, value)
        return value

    def encoding(self, key: str) -> Encoding:
        """Return the encoding of a dense tensor."""
        value = self.name(key)
        if value not in {encoding.value for encoding in Encoding}:
            raise self._odd(key, value)
        return Encoding(value)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a shape of at most DIMENSIONS_MAX axes, and of no more elements than a file can hold."""
        value = self._get(key)
        if type(value) is not list or len(value) > DIMENSIONS_MAX:
            raise self._odd(key, value)
        if any(type(item) is not int or not 0 <= item <= OFFSET_MAX for item in value):
            raise self._odd(key, value)
        if math.prod(value) > OFFSET_MAX // 64:
            raise self._odd(key, value)
        return tuple(value)

    def list(self, key: str) -> list[CatalogRecord]:
        """Return the records in a list."""
        value = self._get(key)
        if type(value) is not list or any(type(item) is not dict for item in value):
            raise self._odd(key, value)
        return [CatalogRecord(item, f"{self.what}: {key}", self.path) for item in value]

    def extent(self, key: str) -> CatalogExtent:
        """Return an extent with its digest."""
        value = self._get(key)
        if type(value) is not dict:
            raise self._odd(key, value)
        inner = CatalogRecord(value, f"{self.what}: {key}", self.path)
        digest = inner.name("digest")
        if not _DIGEST.fullmatch(digest):
            raise inner._odd("digest", digest)
        payload_bytes, stored_bytes = inner.number("payload"), inner.number("stored")
        offset = inner.number("offset")
        if payload_bytes > stored_bytes or offset + stored_bytes > OFFSET_MAX:
            raise inner.refuse(
                "is not a range of bytes: it is shorter than its payload, or ends beyond every file"
            )
        return CatalogExtent(
            inner.number("file", NUMBER_MAX), offset, payload_bytes, stored_bytes, bytes.fromhex(digest)
        )

    def optional(self, key: str, get: Callable[[str], _T]) -> _T | None:
        """Return None for a field that is null, else the result of `get` for it."""
        return None if self._get(key) is None else get(key)

    def _get(self, key: str) -> Any:
        if key not in self.fields:
            raise self.refuse(f"lacks {key}")
        return self.fields[key]

    def _odd(self, key: str, value: object) -> DamageError:
        return self.refuse(f"has {key} {shown(value)}")
