"""Control messages between the daemon and its clients: pack, check, send, receive.

`docs/store_protocol.md` section 1 is the specification. One packet of SOCK_SEQPACKET is one message: a JSON
object with a `type`. Whatever does not have exactly the fields of its type, each of its type and within its
bounds, is a WireError; nothing is guessed. Descriptors travel beside a message. Experts go through the ring.

No state; any thread.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from k3.base.errors import K3Error, WireError
from k3.base.safe_text import shown
from k3.base.strict_json import parse_object
from k3.store.protocol.closing import close_descriptor

VERSION = 1
MESSAGE_BYTES_MAX = 64 * 1024
STATUS_BYTES_MAX = MESSAGE_BYTES_MAX - 64
"""Bytes of a status that still goes into a packet; its message adds 28."""

LONG_STATUS_BYTES_MAX = 64 << 20
NAME_CHARACTERS_MAX = 64
TEXT_CHARACTERS_MAX = 4096
NUMBER_MAX = 2**63 - 1
DESCRIPTORS = ("arena", "ring", "dense", "model", "request_doorbell", "completion_doorbell")
"""Descriptors beside a welcome, in this order."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_ADVICE = "The two sides speak different versions of the protocol, or one of them is not k3-store"


@dataclass(frozen=True, slots=True)
class Hello:
    """A client asks for a ring."""

    version: int
    name: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The daemon's answer to a hello; DESCRIPTORS travel beside it."""

    version: int
    client: int
    container: str
    home: str
    slot_bytes: int
    slots: int
    quota: int
    ring_bytes: int
    arena_bytes: int
    dense_bytes: int
    model_bytes: int


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Anybody who may connect asks how the daemon is."""


@dataclass(frozen=True, slots=True)
class Status:
    """The object that `k3-store status --json` prints."""

    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LongStatus:
    """A status that is too large for a packet: it is in the memfd that travels beside this, from its beginning."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the daemon ends this connection."""

    error: str
    problem: str
    advice: str


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The daemon ends this connection: it is going ("closing"), or the client broke a rule."""

    reason: str


Message: TypeAlias = Hello | Welcome | StatusRequest | Status | LongStatus | Refusal | Goodbye

_TYPES: dict[str, type[Message]] = {
    "hello": Hello,
    "welcome": Welcome,
    "status": Status,
    "long_status": LongStatus,
    "error": Refusal,
    "goodbye": Goodbye,
}
_NAMES: dict[type[Message], str] = {kind: name for name, kind in _TYPES.items()} | {StatusRequest: "status"}


def clean_name(name: str) -> str:
    """Return a client's name as a hello may carry it: printable, at most NAME_CHARACTERS_MAX characters."""
    return "".join(c if c.isprintable() else "?" for c in name)[:NAME_CHARACTERS_MAX] or "?"


def pack(message: Message) -> bytes:
    """Return a message as one packet. WireError when it is larger than a packet may be."""
    fields = asdict(message)
    data = _text({"type": _NAMES[type(message)], **fields})
    if len(data) > MESSAGE_BYTES_MAX:
        raise WireError(f"a message of {len(data)} bytes is larger than the {MESSAGE_BYTES_MAX} that may be sent")
    return data


def _text(fields: Mapping[str, Any]) -> bytes:
    """Return an object as UTF-8 JSON. Bytes of a path that are not UTF-8 become question marks."""
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def refusal(error: K3Error) -> Refusal:
    """Return the message that tells the other side of an error, its texts cut so that it can always be packed."""
    advice = error.advice or ""
    return Refusal(type(error).__name__, error.problem[:TEXT_CHARACTERS_MAX], advice[:TEXT_CHARACTERS_MAX])


def unpack(data: bytes) -> Message:
    """Return the message in a packet. WireError for everything that is not exactly one message."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise WireError(f"a message is larger than {MESSAGE_BYTES_MAX} bytes", advice=_ADVICE)
    fields = parse_object(data, what="a control message", path=Path("socket"), error=WireError, advice=_ADVICE)
    name = fields.pop("type", None)
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise WireError(f"a control message has the unknown type {shown(name)}", advice=_ADVICE)
    if kind is Status and not fields:
        return StatusRequest()
    return _checked(kind, name, fields)


def _checked(kind: type[Message], name: str, fields: dict[str, Any]) -> Message:
    """Return the message. WireError unless it has just its fields, each of its type and within its bounds."""
    wanted: dict[str, str] = kind.__annotations__
    if fields.keys() != wanted.keys():
        lacking, unknown = sorted(wanted.keys() - fields.keys()), sorted(fields.keys() - wanted.keys())
        raise WireError(
            f"a {name} message lacks {lacking or 'nothing'} and has {shown(unknown) if unknown else 'nothing'} "
            "besides its fields",
            advice=_ADVICE,
        )
    for field, type_name in wanted.items():
        problem = _problem(field, type_name, fields[field])
        if problem is not None:
            raise WireError(f"a {name} message has the {field} {shown(fields[field])}: {problem}", advice=_ADVICE)
    if fields.get("version", VERSION) != VERSION:
        raise WireError(
            f"a {name} message is of protocol version {fields['version']}, this program speaks {VERSION}",
            advice="Run the daemon and its clients from the same release",
        )
    return kind(**fields)


def _problem(field: str, type_name: str, value: Any) -> str | None:
    """Say why one field is not sound; None when it is."""
    if type_name == "int":
        sound = type(value) is int and 0 <= value <= NUMBER_MAX
        return None if sound else "not a whole number from 0 to 2^63 - 1"
    if type_name == "str":
        limit = NAME_CHARACTERS_MAX if field == "name" else TEXT_CHARACTERS_MAX
        if not isinstance(value, str) or len(value) > limit:
            return f"not a text of at most {limit} characters"
        if field == "name" and not (value and value.isprintable()):
            return "empty, or with characters that cannot be printed"
        return None
    return None if isinstance(value, dict) else "not an object"


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message. OSError when the other side is gone or does not read (BlockingIOError)."""
    data = pack(message)
    ancillary = []
    if descriptors:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sent = connection.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
    assert sent == len(data), "a packet is sent whole or not at all"


def send_status(connection: socket.socket, status: Mapping[str, Any]) -> None:
    """Send a status, beside a packet if it is too large for one. OSError as for `send`."""
    data = _text(status)
    if len(data) <= STATUS_BYTES_MAX:
        send(connection, Status(status))
        return
    descriptor = os.memfd_create("k3-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        send(connection, LongStatus(len(data)), [descriptor])
    finally:
        close_descriptor(descriptor)


def long_status(message: LongStatus, descriptors: Sequence[int]) -> Status:
    """Return the status that came in a memfd beside a packet. WireError when it is missing or is not a status."""
    if len(descriptors) != 1 or message.nbytes > LONG_STATUS_BYTES_MAX:
        raise WireError(
            f"a status of {message.nbytes} bytes came with {len(descriptors)} descriptors", advice=_ADVICE
        )
    data = os.pread(descriptors[0], message.nbytes, 0)
    what = "a status beside a packet"
    return Status(parse_object(data, what=what, path=Path("socket"), error=WireError, advice=_ADVICE))


def receive(connection: socket.socket) -> Message | None:
    """Return the next message, None at the end. WireError for a bad one; OSError as the socket raises it.

    Descriptors sent where none belong never reach this process.
    """
    data = connection.recv(MESSAGE_BYTES_MAX + 1)
    return unpack(data) if data else None


def receive_with_descriptors(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message and the descriptors beside it, which the caller closes. They are closed on exec.

    WireError when descriptors were lost on the way, which happens when this process may open no more files.
    """
    space = socket.CMSG_SPACE(4 * len(DESCRIPTORS))
    data, ancillary, flags, _ = connection.recvmsg(MESSAGE_BYTES_MAX + 1, space, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            descriptors += numbers
    try:
        if flags & socket.MSG_CTRUNC:
            raise WireError(
                "descriptors were lost on the way: this process may open no more files",
                advice=f"Raise the limit (ulimit -n); a client needs {len(DESCRIPTORS) + 1} descriptors",
            )
        return (unpack(data) if data else None), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def close_all(descriptors: Sequence[int]) -> None:
    """Close every one of some descriptors."""
    for descriptor in descriptors:
        close_descriptor(descriptor)
