"""Holds up: control messages arrive as they were sent, and nothing else is ever taken for one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import WireError
from k3.store.protocol import wire

numbers = st.integers(0, wire.NUMBER_MAX)
texts = st.text(st.characters(codec="utf-8"), max_size=200)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=64).filter(str.isprintable)
welcomes = st.builds(
    wire.Welcome, st.just(1), numbers, texts, texts, numbers, numbers, numbers, numbers, numbers, numbers, numbers
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
messages = st.one_of(
    st.builds(wire.Hello, st.just(1), names),
    welcomes,
    st.just(wire.StatusRequest()),
    st.builds(wire.Status, st.dictionaries(st.text("abc", max_size=5), st.integers(0, 9), max_size=3)),
    st.builds(wire.Refusal, texts, texts, texts),
    st.builds(wire.Goodbye, texts),
)
HELLO = {"type": "hello", "version": 1, "name": "engine"}


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


@given(messages)
def test_what_is_packed_is_unpacked(message: wire.Message) -> None:
    assert wire.unpack(wire.pack(message)) == message


@given(st.binary(max_size=300))
def test_noise_is_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack(data)


@given(messages, st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_a_sound_message(message: wire.Message, at: int, byte: int) -> None:
    data = bytearray(wire.pack(message))
    data[at % len(data)] = byte
    with contextlib.suppress(WireError):
        assert wire.pack(wire.unpack(bytes(data)))


@given(messages, st.integers(0, 400))
def test_a_cut_message_is_an_error(message: wire.Message, at: int) -> None:
    data = wire.pack(message)
    with pytest.raises(WireError):
        wire.unpack(data[: at % len(data)])


@given(messages, st.data())
def test_a_field_of_another_kind_is_an_error_or_sound(message: wire.Message, data: st.DataObject) -> None:
    fields = json.loads(wire.pack(message))
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(values)
    with contextlib.suppress(WireError):
        assert wire.pack(wire.unpack(json.dumps(fields).encode()))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": 2}, "protocol version 2"),
        ({"version": True}, "whole number"),
        ({"version": -1}, "whole number"),
        ({"version": 1.0}, "whole number"),
        ({"version": 2**63}, "whole number"),
        ({"name": ""}, "cannot be printed"),
        ({"name": "x" * 65}, "at most 64"),
        ({"name": "a\x1b[2J"}, "cannot be printed"),
        ({"name": 7}, "at most 64"),
        ({"more": 1}, "besides"),
        ({"type": "welcome"}, "lacks"),
        ({"type": "Hello"}, "unknown type"),
        ({"type": ["hello"]}, "unknown type"),
    ],
)
def test_refusals_say_why(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(WireError, match=problem):
        wire.unpack(json.dumps(HELLO | change).encode())


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"hello","version":1,"name":"a","name":"b"}',
        b'[{"type":"hello"}]',
        b'{"type":"hello","version":1,"name":"\xff"}',
        b'{"type":"hello","version":1,"name":"\\ud800"}',
        b'{"type":' * 5000,
        b'{"version":1,"name":"a"}',
        b'{"type":"status","x":1}',
        b'{"type":"hello","version":' + b"9" * 5000 + b',"name":"a"}',
        b" " * (wire.MESSAGE_BYTES_MAX + 1),
    ],
)
def test_hostile_texts(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack(data)


def test_a_message_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(WireError, match="larger than the 65536"):
        wire.pack(wire.Status({"x": "y" * wire.MESSAGE_BYTES_MAX}))


def test_descriptors_travel_beside_a_message(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    sent = [os.memfd_create(f"d{n}") for n in range(6)]
    for number, descriptor in enumerate(sent):
        os.write(descriptor, b"x" * number)
    wire.send(here, wire.Goodbye("bye"), sent)
    message, got = wire.receive_with_descriptors(there)
    assert message == wire.Goodbye("bye")
    assert [os.fstat(descriptor).st_size for descriptor in got] == [0, 1, 2, 3, 4, 5]
    assert not any(os.get_inheritable(descriptor) for descriptor in got)
    wire.close_all(sent + got)


def test_descriptors_that_nobody_asked_for_are_not_taken(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    before = len(list(Path("/proc/self/fd").iterdir()))
    wire.send(here, wire.StatusRequest(), [0, 1])
    assert wire.receive(there) == wire.StatusRequest()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_bad_message_with_descriptors_leaves_none_open(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    before = len(list(Path("/proc/self/fd").iterdir()))
    socket.send_fds(here, [b"nonsense"], [0, 1, 2])
    with pytest.raises(WireError):
        wire.receive_with_descriptors(there)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@given(st.dictionaries(texts, st.lists(st.text(max_size=400) | numbers, max_size=60), max_size=12))
def test_a_status_of_any_size_arrives(status: dict[str, Any]) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        wire.send_status(here, status)
        message, descriptors = wire.receive_with_descriptors(there)
    if isinstance(message, wire.LongStatus):
        message = wire.long_status(message, descriptors)
    wire.close_all(descriptors)
    assert message == wire.Status(status)


@pytest.mark.parametrize("length", range(wire.STATUS_BYTES_MAX - 40, wire.STATUS_BYTES_MAX + 40))
def test_a_status_at_the_bound_arrives(length: int) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        wire.send_status(here, {"x": "y" * length})
        message, descriptors = wire.receive_with_descriptors(there)
        assert isinstance(message, wire.LongStatus) == (length + len('{"x":""}') > wire.STATUS_BYTES_MAX)
        wire.close_all(descriptors)


@pytest.mark.parametrize("text", ["\x01" * 9000, "\U0001f600" * 9000, "\udc80" * 9000, '"' * 9000])
def test_every_refusal_can_be_sent_and_understood(text: str) -> None:
    refusal = wire.refusal(WireError(text, advice=text))
    told = wire.unpack(wire.pack(refusal))
    assert isinstance(told, wire.Refusal)
    assert len(told.problem) == len(told.advice) == wire.TEXT_CHARACTERS_MAX


def test_the_end_is_none(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    here.close()
    assert wire.receive(there) is None
    assert wire.receive_with_descriptors(there) == (None, [])


def test_a_process_that_may_open_no_more_files_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    wire.send(here, wire.Goodbye("x"), [0] * 6)
    code = (
        "import os, resource, socket, sys\n"
        "from k3.base.errors import WireError\n"
        "from k3.store.protocol import wire\n"
        "end = socket.socket(fileno=int(sys.argv[1]))\n"
        "used = len(os.listdir('/proc/self/fd'))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, used + 2))\n"
        "try:\n    wire.receive_with_descriptors(end)\n"
        "except WireError as error:\n    print(error)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 20
    ended = subprocess.run(
        [sys.executable, "-c", code, str(there.fileno())],
        pass_fds=[there.fileno()], capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "may open no more files" in ended.stdout


def test_a_name_is_cleaned_so_that_it_is_accepted() -> None:
    for name in ("", "a\nb", "é" * 100, "\x00"):
        cleaned = wire.clean_name(name)
        assert wire.unpack(wire.pack(wire.Hello(1, cleaned))) == wire.Hello(1, cleaned)


def test_the_document_names_exactly_these_messages_and_fields() -> None:
    text = (Path(__file__).parents[2] / "docs" / "store_protocol.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| c → d", "| d → c"))]
    told: dict[tuple[str, str], set[str]] = {}
    for direction, name, fields, *_ in rows:
        found = set(re.findall(r"`([a-z_]+)`", re.sub(r"\(.*?\)|: .*", "", fields)))
        told.setdefault((direction.strip("| "), name.strip("`")), set()).update(found)
    wanted = {
        ("c → d", "hello"): wire.Hello, ("d → c", "welcome"): wire.Welcome,
        ("c → d", "status"): wire.StatusRequest, ("d → c", "status"): wire.Status,
        ("d → c", "long_status"): wire.LongStatus,
        ("d → c", "error"): wire.Refusal, ("d → c", "goodbye"): wire.Goodbye,
    }  # fmt: skip
    assert told == {key: set(kind.__annotations__) for key, kind in wanted.items()}
    for name in wire.DESCRIPTORS:
        assert name.replace("_", " ") in text
