"""The project's one digest, xxh3-128 over bytes, and UUIDs derived from content. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

DIGEST_NAME = "xxh3-128"
ZERO_DIGEST_HEX = "0" * 32

Hasher = xxhash.xxh3_128
"""Incremental form of `digest`: `h = Hasher(); h.update(data); h.digest()`."""


def digest(data: Any) -> bytes:
    """Return the xxh3-128 of a bytes-like object, 16 bytes."""
    return bytes(xxhash.xxh3_128_digest(data))


def canonical_json(value: Any) -> bytes:
    """Return compact UTF-8 JSON with sorted keys: the form that identities are computed from."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def content_uuid(content: bytes) -> str:
    """Return a version 8 UUID made of the first 16 bytes of the SHA-256 of `content`."""
    import hashlib  # slow to import, and only needed to write a container
    import uuid

    raw = bytearray(hashlib.sha256(content).digest()[:16])
    raw[6] = raw[6] & 0x0F | 0x80
    raw[8] = raw[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(raw)))


def container_uuid(identity: Mapping[str, Any]) -> str:
    """Return the container's UUID, computed from its identity (docs/container.md, section 3)."""
    return content_uuid(canonical_json(identity))


def root_uuid(container: str, number: int) -> str:
    """Return the UUID of root `number` of a container."""
    return content_uuid(f"{container}:{number}".encode())
