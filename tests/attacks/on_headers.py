"""Attacks on the JSON of a shard's header."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3.base.errors import HeaderError, ShardError
from tests.attacks.builders import NORM_1, ROUTER_1, SHARD, add, attack, edit_header, join, put_header, split


def _text(name: str, why: str, says: str, change: Callable[[bytes], bytes], **where: Any) -> None:
    """Register an attack that changes the header's text; its data stays as it is."""

    def build(directory: Path) -> None:
        put_header(directory, change(split(directory / SHARD)[0]))

    add(name, why, HeaderError, says, build, **where)


def _entry(name: str, why: str, says: str, change: dict[str, Any], **where: Any) -> None:
    """Register an attack that changes one tensor's entry."""

    def build(directory: Path) -> None:
        edit_header(directory, lambda fields: fields[NORM_1].update(change))

    add(name, why, where.pop("error", HeaderError), says, build, **{"tensor": NORM_1, **where})


def _shift(name: str, why: str, says: str, begin: int, end: int, **where: Any) -> None:
    """Register an attack that moves the ends of one tensor, by bytes relative to where they are."""

    def build(directory: Path) -> None:
        def move(fields: dict[str, Any]) -> None:
            offsets = fields[NORM_1]["data_offsets"]
            fields[NORM_1]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]

        edit_header(directory, move)

    add(name, why, HeaderError, says, build, **{"tensor": True, **where})


# --- the text ---
_text(
    "array_header",
    "A flipped bit turns the brace into a bracket.",
    "does not start with",
    lambda h: b"[" + h[1:],
    offset=8,
)
_text(
    "space_first",
    "The format says that the header begins with a brace.",
    "does not start with",
    lambda h: b" " + h,
    offset=8,
)
_text(
    "byte_order_mark",
    "A mark that some editors put in front.",
    "does not start with",
    lambda h: b"\xef\xbb\xbf" + h,
    offset=8,
)
_text("utf16_header", "Another encoding.", "does not start with", lambda h: h.decode().encode("utf-16"), offset=8)
_text(
    "nul_padding",
    "NUL bytes in place of spaces: JSON parsers stop at different places.",
    "padded with NUL",
    lambda h: h + b"\0\0\0",
    offset=True,
)
_text("json_cut", "The closing brace is missing.", "is not JSON", lambda h: h.rstrip()[:-1], offset=True)
_text(
    "text_behind_json",
    "Something follows after the object: two readers may see two headers.",
    "is not JSON",
    lambda h: h.rstrip() + b"{}",
    offset=True,
)
_text(
    "metadata_outside",
    "A file of nothing but metadata, written wrongly by a known tool.",
    "is not JSON",
    lambda h: b'{},"__metadata__":{"format":"pt"}',
    offset=True,
)
_text(
    "not_utf8",
    "A byte that no UTF-8 text has.",
    "is not UTF-8",
    lambda h: h.replace(b"input_layernorm", b"input_layer\xff\xfem", 1),
    offset=True,
)
_text(
    "overlong_utf8",
    "A slash in a form that UTF-8 forbids, and some decoders accept.",
    "is not UTF-8",
    lambda h: h.replace(b"input_layernorm", b"input\xc0\xaflayernorm", 1),
    offset=True,
)
_text(
    "raw_control_character",
    "A line break inside a name.",
    "is not JSON",
    lambda h: h.replace(b"input_layernorm", b"input\nlayernorm", 1),
    offset=True,
)
_text(
    "half_surrogate",
    "Half a character: no other program can write this name.",
    "surrogate",
    lambda h: h.replace(b"input_layernorm", b"\\ud800", 1),
)
_text(
    "deep_array", "Nested until the parser's stack ends.", "nested too deeply", lambda h: b'{"a":' + b"[" * 100_000
)
_text("deep_object", "The same with objects.", "nested too deeply", lambda h: b'{"a":' * 100_000)
_text(
    "huge_number",
    "A number of 20,000 digits.",
    "number of thousands of digits",
    lambda h: h.replace(b'"shape":[', b'"shape":[' + b"9" * 20_000 + b",", 1),
)
_text(
    "tensor_twice",
    "The same name twice: readers take the first or the last.",
    "twice",
    lambda h: b"{" + h[1:].rstrip()[:-1] + b"," + h[1:],
)
_text(
    "key_twice",
    "One key of an entry twice.",
    "twice",
    lambda h: h.replace(b'{"dtype"', b'{"dtype":"F32","dtype"', 1),
)
_text(
    "metadata_twice",
    "Two tables of metadata.",
    "twice",
    lambda h: b'{"__metadata__":{},"__metadata__":{},' + h[1:],
)
_text(
    "negative_zero",
    "-0 is a whole number for some parsers only.",
    "-0",
    lambda h: h.replace(b'"data_offsets":[0,', b'"data_offsets":[-0,', 1),
)

for _name, _value in (
    ("metadata_array", ["pt"]),
    ("metadata_number", {"format": 1}),
    ("metadata_nested", {"format": {"a": "b"}}),
):

    def _metadata(directory: Path, value: Any = _value) -> None:
        edit_header(directory, lambda fields: fields.update(__metadata__=value))

    add(_name, "Metadata is a table of strings, nothing else.", HeaderError, "__metadata__", _metadata)

# --- one entry ---
for _name, _entry_value in (
    ("entry_null", None),
    ("entry_array", ["BF16", [32], [0, 64]]),
    ("entry_string", "BF16"),
):

    def _whole(directory: Path, value: Any = _entry_value) -> None:
        edit_header(directory, lambda fields: fields.update({NORM_1: value}))

    add(_name, "An entry is an object.", HeaderError, "not an object", _whole, tensor=NORM_1)

for _key in ("dtype", "shape", "data_offsets"):

    def _without(directory: Path, key: str = _key) -> None:
        edit_header(directory, lambda fields: fields[NORM_1].pop(key))

    add(
        f"without_{_key}",
        "Each of the three keys is needed.",
        HeaderError,
        f"lacks {_key}",
        _without,
        tensor=NORM_1,
    )

_entry("unknown_key", "A key that we do not know may change what the bytes mean.", "unknown key", {"strides": [1]})
_entry(
    "dtype_unknown",
    "A dtype whose size we do not know: skipping the check is how wrong sizes got in.",
    "unknown dtype 'F4'",
    {"dtype": "F4"},
)
_entry(
    "dtype_lower_case",
    "Dtypes are upper case; guessing is not for a reader of weights.",
    "unknown dtype",
    {"dtype": "bf16"},
)
_entry("dtype_number", "A number in place of a name.", "dtype is not a string", {"dtype": 16})
_entry("dtype_array", "A value that cannot be a key of a table.", "dtype is not a string", {"dtype": ["BF16"]})
_entry("dtype_other_size", "A dtype that contradicts the offsets.", "needs 128", {"dtype": "F32"})

for _name, _shape, _why in (
    ("shape_number", 32, "A shape is a list."),
    ("shape_string", "32", "A shape is a list, and a string is one for careless programs."),
    ("shape_null", None, "A shape is a list."),
    ("shape_of_bool", [True, 32], "True is 1 for Python."),
    ("shape_of_float", [32.0], "32.0 is 32 for Python and JavaScript only."),
    ("shape_of_strings", ["32"], "Sizes are numbers."),
    ("shape_of_nan", [float("nan")], "NaN is no JSON and no size."),
    ("shape_nested", [[32]], "Sizes are numbers."),
):
    _entry(_name, _why, "not a list of whole numbers", {"shape": _shape})

_entry("shape_negative", "Two negative sizes have a positive product.", "negative size", {"shape": [-4, -8]})
_entry("shape_other_product", "The shape does not fit the bytes.", "needs 62", {"shape": [31]})
_entry("shape_overflow", "2^32 times 2^32 is 0 in 64 bits.", "more elements", {"shape": [2**32, 2**32]})
_entry("shape_overflow_to_size", "(2^63 + 16) * 2 is 32 in 64 bits.", "more elements", {"shape": [2**63 + 16, 2]})
_entry(
    "shape_overflow_hidden",
    "A zero hides sizes that overflow in other readers.",
    "more elements",
    {"shape": [2**62, 8, 0]},
)
_entry(
    "shape_overflow_behind_zero",
    "The same with the zero in front.",
    "more elements",
    {"shape": [0, 2**62, 8], "data_offsets": [0, 0]},
)
_entry("shape_enormous", "A size beyond all integers.", "more elements", {"shape": [10**300]})

for _name, _offsets in (
    ("offsets_one", [0]),
    ("offsets_three", [0, 64, 64]),
    ("offsets_number", 64),
    ("offsets_string", "ab"),
    ("offsets_null", None),
    ("offsets_bool", [False, 64]),
    ("offsets_float", [0.0, 64.0]),
    ("offsets_float_end", [0, 64.0]),
    ("offsets_object", {"0": 0, "1": 64}),
):
    _entry(_name, "Offsets are two whole numbers.", "data_offsets", {"data_offsets": _offsets})

_entry(
    "offsets_negative",
    "An offset before the data would read the header.",
    "out of range",
    {"data_offsets": [-64, 0]},
)
_entry(
    "offsets_enormous",
    "The header's size added to this overflows.",
    "out of range",
    {"data_offsets": [2**64 - 65, 2**64 - 1]},
)
_entry(
    "offsets_reversed",
    "The end before the beginning: the size is negative, or enormous.",
    "end before they begin",
    {"data_offsets": [64, 0]},
)
_entry(
    "no_bytes_for_one_number",
    "Shape [1] with equal offsets reads a number that is not there.",
    "needs 2",
    {"shape": [1], "data_offsets": [0, 0]},
)
_shift("offsets_too_wide", "More bytes than the shape needs.", "needs 64", 0, 2)
_shift("offsets_too_narrow", "Fewer bytes than the shape needs.", "needs 64", 0, -2)

# --- all entries together ---
_shift("overlap", "Two tensors share bytes.", "overlaps", -2, -2, offset=True)
_shift("hole", "Bytes that belong to no tensor.", "belong to none", 2, 2, offset=True)
_shift(
    "beyond_the_end",
    "A tensor that starts behind the end of the file.",
    "belong to none",
    10**12,
    10**12,
    offset=True,
)


@attack(HeaderError, "overlaps", tensor=True, offset=True)
def same_bytes_twice(directory: Path) -> None:
    """Two tensors with the same bytes, as tied weights are sometimes written: the format forbids it."""

    def share(fields: dict[str, Any]) -> None:
        fields[NORM_1.replace("input", "post_attention")]["data_offsets"] = fields[NORM_1]["data_offsets"]

    edit_header(directory, share)


@attack(HeaderError, "overlaps", tensor="nothing", offset=True)
def nothing_inside_another(directory: Path) -> None:
    """A tensor of no bytes in the middle of another one."""

    def insert(fields: dict[str, Any]) -> None:
        middle = fields[ROUTER_1]["data_offsets"][0] + 2
        fields["nothing"] = {"dtype": "U8", "shape": [0], "data_offsets": [middle, middle]}

    edit_header(directory, insert)


@attack(HeaderError, "belong to none", tensor="w", offset=True)
def hole_at_the_start(directory: Path) -> None:
    """The first tensor does not start at 0: room for a second, hidden file."""
    header = b'{"w":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}}'
    (directory / SHARD).write_bytes(join(header, bytes(16)))


@attack(ShardError, "bytes follow after the last tensor", offset=True)
def tensors_left_out(directory: Path) -> None:
    """A header that describes nothing, in front of data."""
    put_header(directory, b"{}")


# --- names ---
for _name, _tensor, _why in (
    ("name_empty", "", "A tensor without a name."),
    ("name_very_long", "a" * 100_000, "A name of 100 kB: names become keys and lines on a terminal."),
    ("name_with_escapes", "w\x1b[2J\x1b[31m", "A name that clears the terminal when an error shows it."),
    ("name_with_line_break", "w\nerror: all is well", "A name that forges a line of output."),
    ("name_with_nul", "w\0", "A name that ends early in C."),
    ("name_reversed", "w\u202egpj.", "A name that is shown backwards."),
):

    def _rename(directory: Path, name: str = _tensor) -> None:
        edit_header(directory, lambda fields: fields.update({name: fields.pop(NORM_1)}))

    add(_name, _why, HeaderError, "printable characters", _rename)
