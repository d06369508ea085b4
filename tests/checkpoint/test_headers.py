"""Holds up headers: what we write others read, what is legal is accepted, and a K3 header parses in no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import HeaderError, ShardError
from k3.checkpoint.safetensors_header import Header, build_header, parse_header
from k3.model.keys import DTYPE_BITS, tensor_bytes
from k3.verify.synthetic.snapshot_writer import SyntheticModel, layer_tensors
from tests.support.safetensors_package import deserialize

PATH = Path("shard.safetensors")
DTYPES = sorted(DTYPE_BITS)

entries = st.lists(
    st.tuples(
        st.text(st.characters(categories=("L", "N", "P")), min_size=1, max_size=20),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    unique_by=lambda entry: entry[0],
    max_size=8,
)


def parse(header: bytes, data_bytes: int) -> Header:
    return parse_header(header, len(header) + data_bytes, PATH)


@given(
    entries,
    st.sampled_from([1, 8, 512, 4096]),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
def test_what_is_built_is_parsed_again_and_read_by_the_safetensors_package(
    wanted: list[tuple[str, str, tuple[int, ...]]], align: int, metadata: dict[str, str]
) -> None:
    header = build_header(wanted, metadata, align)
    data_bytes = sum(tensor_bytes(dtype, shape) for _, dtype, shape in wanted)
    assert len(header) % align == 0
    parsed = parse(header, data_bytes)
    assert parsed.header_bytes == len(header)
    assert parsed.metadata == metadata
    assert sorted((t.name, t.dtype, t.shape) for t in parsed.tensors) == sorted(wanted)
    ends = [tensor.offset + tensor.nbytes for tensor in parsed.tensors]
    assert [tensor.offset for tensor in parsed.tensors] == [len(header), *ends[:-1]][: len(ends)]
    theirs = dict(deserialize(header + bytes(data_bytes)))
    assert {name: (info["dtype"], tuple(info["shape"])) for name, info in theirs.items()} == {
        name: (dtype, shape) for name, dtype, shape in wanted
    }


def test_the_written_form_is_compact_ordered_and_padded_with_spaces() -> None:
    header = build_header([("b", "U8", (3,)), ("a", "BF16", (2, 1))], {"z": "1", "y": "2"}, align=128)
    text = (
        '{"__metadata__":{"y":"2","z":"1"},'
        '"b":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},'
        '"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[3,7]}}'
    )
    padded = text.encode() + b" " * (256 - 8 - len(text))
    assert header == (248).to_bytes(8, "little") + padded


@pytest.mark.parametrize(
    "wrong", [[("a", "U8", (1,)), ("a", "U8", (1,))], [("__metadata__", "U8", (1,))]], ids=["twice", "reserved"]
)
def test_names_that_no_file_may_have_are_not_written(wrong: list[tuple[str, str, tuple[int, ...]]]) -> None:
    with pytest.raises(ValueError, match="is taken"):
        build_header(wrong)


@pytest.mark.parametrize(
    ("text", "data_bytes"),
    [
        ('{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', 0),
        (
            '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[0,7],"data_offsets":[4,4]},'
            '"c":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}}',
            6,
        ),
        ('{"w":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}', 8),
        ('{"__metadata__":{"format":"pt"}}', 0),
        ('{"__metadata__":null,"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        ("{}", 0),
        ('{"w":{"data_offsets":[0,1],"shape":[1],"dtype":"BOOL"}}   ', 1),
        (
            '{"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            2,
        ),
        ('{"layers-0.w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
        ('{"\\u00e9\\ud83d\\ude00":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
    ],
    ids=[
        "nothing",
        "nothing-between",
        "scalar",
        "metadata",
        "no-metadata",
        "empty",
        "any-order",
        "unsorted",
        "minus-0-in-name",
        "escapes",
    ],
)
def test_odd_but_legal_headers_are_accepted(text: str, data_bytes: int) -> None:
    raw = len(text).to_bytes(8, "little") + text.encode()
    names = {tensor.name for tensor in parse(raw, data_bytes).tensors}
    assert names == set(json.loads(text)) - {"__metadata__"}
    assert names == {name for name, _ in deserialize(raw + bytes(data_bytes))}


def test_a_length_up_to_the_end_of_the_file_is_no_number_to_allocate() -> None:
    with pytest.raises(HeaderError, match="the limit is"):
        parse_header(b"\xff" * 8 + bytes(92), 100, PATH)
    with pytest.raises(ShardError, match="ends inside its header: 99999907 bytes are missing"):
        parse_header((99_999_999).to_bytes(8, "little") + bytes(92), 100, PATH)


def test_a_cut_file_names_the_first_tensor_that_is_not_whole() -> None:
    header = build_header([("a", "U8", (10,)), ("b", "U8", (10,)), ("c", "U8", (10,))], align=8)
    for present, name, missing in ((0, "a", 30), (9, "a", 21), (10, "b", 20), (19, "b", 11), (29, "c", 1)):
        with pytest.raises(ShardError, match=f"^{missing} bytes are missing") as caught:
            parse(header, present)
        assert caught.value.tensor == name
        assert caught.value.offset == len(header) + present


def test_offsets_in_errors_count_bytes_of_the_file() -> None:
    text = '{"é😀":{"dtype":"U8" oops}'.encode()
    with pytest.raises(HeaderError, match="not JSON") as caught:
        parse(len(text).to_bytes(8, "little") + text, 0)
    assert caught.value.offset == 8 + text.index(b"oops")


def k3_header() -> tuple[bytes, int]:
    tensors = layer_tensors(SyntheticModel.k3(), 4)
    wanted = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    return build_header(wanted, align=8), sum(tensor_bytes(dtype, shape) for _, dtype, shape in wanted)


def test_the_header_of_a_k3_layer_parses_with_few_calls_and_shares_what_is_equal() -> None:
    header, data_bytes = k3_header()
    assert len(header) > 800_000
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        parsed = parse(header, data_bytes)
    finally:
        sys.setprofile(before)
    assert len(parsed.tensors) > 5_000
    assert calls < 40 * len(parsed.tensors)  # work for each tensor does not grow with their number
    # One object for each kind of tensor, not one for each tensor.
    assert len({id(tensor.shape) for tensor in parsed.tensors}) < 40
    assert len({id(tensor.dtype) for tensor in parsed.tensors}) < 40
