"""Holds up that we and the safetensors package agree about every file, but where we are stricter on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from k3.base.errors import HeaderError, K3Error
from k3.checkpoint.safetensors_header import Header, build_header, parse_header
from tests.support.safetensors_package import deserialize

PATH = Path("shard.safetensors")
STRICTER = (
    "twice",  # they take the last of two equal keys
    "unknown key",  # they ignore it
    "unknown dtype",  # they know some more
    "printable characters",  # any string is a name for them
    "more elements",  # sizes beyond 63 bits beside a zero
    "does not start with",  # they skip white space in front
)
"""What we refuse and they may accept, as it stands in our message. Anything else is a disagreement."""

SOUND = [
    ("w1", "BF16", (2, 3)),
    ("w2", "U8", (4,)),
    ("none", "F32", (0, 2)),
    ("s", "F32", ()),
    ("w-0", "I8", (2,)),
]
DATA_BYTES = 12 + 4 + 0 + 4 + 2

numbers = st.one_of(
    st.integers(-2, 40),
    st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]),
)
junk = st.one_of(
    numbers,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.lists(numbers, max_size=4),
    st.sampled_from(["F32", "BF16", "U8", "F4", "u8", "F8_E8M0", "C64"]),
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 2), max_size=2),
)


def ours(raw: bytes) -> Header | K3Error:
    try:
        return parse_header(raw, len(raw), PATH)
    except K3Error as error:
        return error


def theirs(raw: bytes) -> dict[str, Any] | None:
    try:
        return dict(deserialize(raw))
    except safetensors.SafetensorError:
        return None


def agree(raw: bytes) -> None:
    """Both accept and see the same, or both refuse, or we refuse for one of the reasons in STRICTER."""
    mine, other = ours(raw), theirs(raw)
    if isinstance(mine, K3Error):
        event("refused")
        assert mine.path == str(PATH)
        assert mine.advice
        assert str(mine).isprintable()
        if other is not None:
            assert isinstance(mine, HeaderError)
            assert any(reason in mine.problem for reason in STRICTER), mine
        return
    event("accepted")
    assert other is not None
    seen = {tensor.name: (tensor.dtype, list(tensor.shape)) for tensor in mine.tensors}
    assert seen == {name: (info["dtype"], list(info["shape"])) for name, info in other.items()}
    for tensor in mine.tensors:
        assert raw[tensor.offset : tensor.offset + tensor.nbytes] == bytes(other[tensor.name]["data"])


def sound() -> bytes:
    return build_header(SOUND, {"format": "pt"}, align=8) + bytes(range(DATA_BYTES))


@settings(max_examples=400)
@given(st.data())
def test_bytes_of_a_sound_file_changed_at_random(data: st.DataObject) -> None:
    raw = bytearray(sound())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["set", "flip", "insert", "delete", "copy", "cut"]))
        if kind == "set":
            raw[place] = data.draw(st.sampled_from(b'0123456789-+.eE[]{},:" \n\t\0\\/aU\xff'))
        elif kind == "flip":
            raw[place] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "insert":
            raw[place:place] = data.draw(st.binary(min_size=1, max_size=3))
        elif kind == "delete":
            del raw[place : place + data.draw(st.integers(1, 4))]
        elif kind == "copy":
            raw[place:place] = raw[place : place + data.draw(st.integers(1, 60))]
        else:
            del raw[place:]
        assume(raw)
    agree(bytes(raw))


@settings(max_examples=400)
@given(st.data())
def test_text_of_a_sound_header_changed_with_the_length_kept_true(data: st.DataObject) -> None:
    whole = sound()
    length = int.from_bytes(whole[:8], "little")
    text = bytearray(whole[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        width = data.draw(st.integers(0, 8))
        text[place : place + width] = data.draw(
            st.one_of(
                st.binary(max_size=3),
                st.just(b"-0"),
                st.just(b"1e0"),
                st.just(b"\\u0041"),
                st.just(b"\\ud800"),
                st.just(b" "),
            )
        )
        assume(text)
    agree(len(text).to_bytes(8, "little") + bytes(text) + whole[8 + length :])


@settings(max_examples=400)
@given(st.data())
def test_values_of_a_sound_header_changed(data: st.DataObject) -> None:
    whole = sound()
    length = int.from_bytes(whole[:8], "little")
    fields = json.loads(whole[8 : 8 + length])
    for _ in range(data.draw(st.integers(1, 2))):
        name = data.draw(st.sampled_from(sorted(fields)))
        entry = fields[name]
        if not isinstance(entry, dict) or data.draw(st.integers(0, 9)) == 0:
            fields[name] = data.draw(junk)
            continue
        key = data.draw(st.sampled_from([*sorted(entry), "other"]))
        if isinstance(entry.get(key), list) and data.draw(st.booleans()):
            entry[key] = [data.draw(st.one_of(st.just(old), numbers)) for old in entry[key]]
        else:
            entry[key] = data.draw(junk)
    text = json.dumps(fields).encode()
    agree(len(text).to_bytes(8, "little") + text + whole[8 + length :])


@given(st.binary(max_size=64))
def test_anything_at_all(raw: bytes) -> None:
    agree(raw)
