"""The bytes of a client's ring: `docs/store_protocol.md` section 2 as Python constants, checked when imported.

`store/src/layout.h` states the same for C++ with `static_assert`; `tests/store/test_native_layout.py` compares
the two. Python never touches a ring's indices: only C++ has the atomic operations that they need. These constants
are for tests, for tools that look at a ring, and for whoever writes a client in another language.
"""

from __future__ import annotations

import enum
import struct

PAGE_BYTES = 4096
MAGIC = b"K3RING\0\1"
DEFAULT_ENTRIES = 1024
ENTRIES_MAX = 1 << 16
CLIENTS_MAX = 64
SLOTS_MAX = 1 << 20

# Offsets of the header's words, each (but the first two) on a cache line of its own.
MAGIC_AT = 0
ENTRIES_AT = 8
REQUEST_TAIL_AT = 64
REQUEST_HEAD_AT = 128
COMPLETION_TAIL_AT = 192
COMPLETION_HEAD_AT = 256
DAEMON_ASLEEP_AT = 320
CLIENT_ASLEEP_AT = 384
STATE_AT = 448
HEADER_BYTES = 512
REQUESTS_AT = PAGE_BYTES

REQUEST = struct.Struct("<QB3xIIIQ")
"""tag, op, layer, expert (of a release: slot), generation (of a release), zero."""

REQUEST_FIELDS = {"tag": 0, "op": 8, "layer": 12, "expert": 16, "generation": 20}

COMPLETION = struct.Struct("<QBBBxIIIIIQQQII")
"""tag, op, status, source, layer, expert, slot, generation, file, offset, payload_bytes, file_offset, error, 0."""

COMPLETION_FIELDS = {
    "tag": 0, "op": 8, "status": 9, "source": 10, "layer": 12, "expert": 16, "slot": 20, "generation": 24,
    "file": 28, "offset": 32, "payload_bytes": 40, "file_offset": 48, "error": 56,
}  # fmt: skip


class Op(enum.IntEnum):
    """What a request asks for."""

    LEASE = 1
    RELEASE = 2
    PREFETCH = 3
    CANCEL = 4
    PIN = 5
    UNPIN = 6


class Status(enum.IntEnum):
    """How a request ended."""

    OK = 0
    NO_SUCH_EXPERT = 1
    QUOTA = 2
    BUSY = 3
    DAMAGED = 4
    IO_ERROR = 5
    BAD_REQUEST = 6
    CLOSING = 7
    CANCELLED = 8


class Source(enum.IntEnum):
    """Where a granted expert came from."""

    NONE = 0
    ARENA = 1
    READ = 2
    JOINED = 3


class RingState(enum.IntEnum):
    """The daemon's word on a ring."""

    OPEN = 1
    CLOSED = 2


def completions_at(entries: int) -> int:
    """Where the completion entries of a ring begin."""
    return REQUESTS_AT + REQUEST.size * entries


def ring_bytes(entries: int) -> int:
    """Size of a ring's memfd."""
    end = completions_at(entries) + COMPLETION.size * entries
    return -(-end // PAGE_BYTES) * PAGE_BYTES


def _check() -> None:
    words = (REQUEST_TAIL_AT, REQUEST_HEAD_AT, COMPLETION_TAIL_AT, COMPLETION_HEAD_AT, DAEMON_ASLEEP_AT,
             CLIENT_ASLEEP_AT, STATE_AT)  # fmt: skip
    assert len(MAGIC) == 8
    assert [word // 64 for word in words] == list(range(1, 8))
    assert all(word % 64 == 0 for word in words)
    assert STATE_AT + 64 == HEADER_BYTES <= REQUESTS_AT
    assert REQUEST.size == 32
    assert COMPLETION.size == 64
    assert struct.calcsize("<QB3xI") == REQUEST_FIELDS["expert"]
    assert struct.calcsize("<QBBBxIIIII") == COMPLETION_FIELDS["offset"]
    assert struct.calcsize("<QBBBxIIIIIQQQ") == COMPLETION_FIELDS["error"]
    assert ring_bytes(DEFAULT_ENTRIES) == 102400


_check()
