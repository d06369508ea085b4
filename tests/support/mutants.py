"""Bytes with seeded damage of several kinds, such as drives, downloads and forgers do to a file."""

from __future__ import annotations

import random
import re

MUTATIONS = ("bit", "byte", "8 bytes", "page heads", "number", "cut", "copy")
"""Kinds of damage that `mutated` does; the same kind, bytes and seed give the same result."""

NASTY = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def mutated(data: bytes, kind: str, rng: random.Random) -> bytes:
    """Return `data` with one damage of this kind; only a cut changes the length."""
    if not data:
        return b"\xff"
    found = bytearray(data)
    at = rng.randrange(len(found))
    if kind == "bit":
        found[at] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        found[at] = rng.randrange(256)
    elif kind == "8 bytes":
        found[at : at + 8] = rng.randbytes(len(found[at : at + 8]))
    elif kind == "page heads":
        page = at // 4096 * 4096
        place = page + rng.randrange(min(64, len(found) - page))
        found[place] = rng.randrange(256)
    elif kind == "number":
        size = rng.choice((1, 2, 4, 8))
        number = rng.choice(NASTY) & ((1 << 8 * size) - 1)
        part = found[at : at + size]
        found[at : at + size] = number.to_bytes(size, "little")[: len(part)]
    elif kind == "cut":
        del found[at:]
    else:
        assert kind == "copy"
        source, length = rng.randrange(len(found)), rng.randrange(1, 200)
        part = found[source : source + length]
        found[at : at + len(part)] = part[: len(found) - at]
    return bytes(found)


JSON_VALUES = (
    "null", "true", "-1", "0", "1e999", "9" * 400, "1" + "0" * 5000, "-0", "0.5", '""', '"\\u001b]0;x\\u0007"',
    '"\\ud800"', '"../../x"', "[]", "{}", "[" * 3000 + "]" * 3000, '"' + "x" * 5000 + '"', '{"a":1,"a":2}', "NaN",
)  # fmt: skip
"""JSON that is no answer to most questions."""

_VALUE = re.compile(rb'(?<=[:\[,])\s*("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)')


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """Return JSON text with one value exchanged for another, one key dropped, or damage to its bytes."""
    values = list(_VALUE.finditer(data))
    if not values or rng.random() < 0.2:
        return mutated(data, rng.choice(MUTATIONS), rng)
    chosen = rng.choice(values)
    if rng.random() < 0.3:
        return data[: chosen.start(1)] + rng.choice(values)[1] + data[chosen.end(1) :]
    return data[: chosen.start(1)] + rng.choice(JSON_VALUES).encode() + data[chosen.end(1) :]
