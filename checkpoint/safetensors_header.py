"""The header of one safetensors file: parsed completely, refused with its error, and built for writing.

A safetensors file is an 8-byte little-endian length N, N bytes of JSON, and the tensors' bytes. It is valid if the
JSON describes every byte of the data section exactly once and the file holds every byte that it describes. So a
truncated download, a header of another file and a forged header are all found before a tensor is read.

Problems of the JSON are HeaderErrors, problems of the file as a whole (empty, a pointer, truncated, too long)
ShardErrors. Where the format leaves room this parser is stricter than the `safetensors` package: no key twice, no
unknown key in an entry, no dtype of unknown size, no sizes beyond 63 bits, no name that is empty, very long or not
printable.

Pure functions apart from `read_header`, which reads an open file; safe to use from any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3.base.errors import HeaderError, K3Error, ShardError
from k3.base.pages import PAGE_BYTES
from k3.base.placeholder import placeholder
from k3.base.regular_file import RegularFile
from k3.base.safe_text import NAME_CHARACTERS_MAX, is_plain, shown, shown_name
from k3.base.strict_json import parse_object
from k3.model.keys import DTYPE_BITS, tensor_bytes

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""The limit of the `safetensors` package. The largest header of the published K3 has 818 kB."""

_COUNT_MAX = 2**63 - 1
_METADATA = "__metadata__"
_ENTRY_KEYS = frozenset(("dtype", "shape", "data_offsets"))
_REFETCH = "Fetch the file again"
_INCOMPLETE = "The download is incomplete or the file was cut: fetch it again"

_OTHER_FORMATS = (
    (b"gguf", "is a GGUF file, not safetensors", "Name the original safetensors snapshot"),
    (b"pk\x03\x04", "is a zip archive or PyTorch file, not safetensors", "Name a safetensors snapshot"),
)


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor of a file; `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A valid header. The data section starts at `header_bytes`; `tensors` are in storage order."""

    header_bytes: int
    file_bytes: int
    metadata: Mapping[str, str]
    tensors: tuple[HeaderTensor, ...]


def read_header(file: RegularFile) -> tuple[bytes, Header]:
    """Return the raw header of an open file, with the 8 bytes of its length, and the parsed one.

    Raises what `parse_header` raises.
    """
    start = file.read(0, min(file.size_bytes, 512))
    length = header_length(start, file.size_bytes, file.path)
    raw = file.read(0, LENGTH_BYTES + length)
    return raw, parse_header(raw, file.size_bytes, file.path)


def header_length(start: bytes, file_bytes: int, path: Path) -> int:
    """Return N, given the first bytes of a file (512 are enough).

    Raises ShardError for empty, short, truncated and foreign files, HeaderError for a length above the limit.
    """
    if file_bytes == 0:
        raise ShardError("is empty", path=path, advice="The download never began: fetch it again")
    instead = placeholder(start)
    if instead is not None:
        raise ShardError(instead[0], path=path, advice=instead[1])
    for magic, problem, advice in _OTHER_FORMATS:
        if start[: len(magic)].lower() == magic:
            raise ShardError(problem, path=path, advice=advice)
    if file_bytes < LENGTH_BYTES:
        raise ShardError(
            f"has {file_bytes} bytes, not even the {LENGTH_BYTES} of the header's length",
            path=path,
            advice=_INCOMPLETE,
        )
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > HEADER_BYTES_MAX:
        raise HeaderError(
            f"says its header has {length} bytes; the limit is {HEADER_BYTES_MAX}",
            path=path,
            offset=0,
            advice=f"This is not a safetensors file, or its start is damaged. {_REFETCH}",
        )
    if LENGTH_BYTES + length > file_bytes:
        raise ShardError(
            f"ends inside its header: {LENGTH_BYTES + length - file_bytes} bytes are missing",
            path=path,
            offset=file_bytes,
            advice=_INCOMPLETE,
        )
    return length


def parse_header(raw: bytes, file_bytes: int, path: Path) -> Header:
    """Return the parsed header of a file of `file_bytes` bytes, given its first 8 + N bytes.

    Raises HeaderError when the header contradicts the format or itself, ShardError when the file has fewer or more
    bytes than the header describes. `path` is for messages only.
    """
    length = header_length(raw, file_bytes, path)
    header_bytes = LENGTH_BYTES + length
    text = raw[LENGTH_BYTES:header_bytes]
    if len(text) != length:
        raise ValueError("parse_header needs all of the header's bytes")
    if text[:1] != b"{":
        raise HeaderError(
            f"the header does not start with '{{' but with {text[:1]!r}",
            path=path,
            offset=LENGTH_BYTES,
            advice=f"This is not a safetensors file, or its start is damaged. {_REFETCH}",
        )
    if text.endswith(b"\0"):
        raise HeaderError(
            "the header is padded with NUL bytes; the format allows only spaces",
            path=path,
            offset=LENGTH_BYTES + len(text.rstrip(b"\0")),
            advice="Write the file again with a current tool, or fetch it again",
        )
    fields = parse_object(
        text, what="the header", path=path, error=HeaderError, advice=_REFETCH, offset=LENGTH_BYTES
    )
    metadata = _metadata(fields.pop(_METADATA, None), path)
    tensors = _tensors(fields, header_bytes, path)
    _check_cover(tensors, header_bytes, file_bytes, path)
    return Header(header_bytes, file_bytes, metadata, tensors)


def build_header(
    entries: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    align: int = PAGE_BYTES,
) -> bytes:
    """Return the bytes before the data section of a file with these tensors, one after the other without gaps.

    `entries` are (name, dtype, shape) in storage order. The JSON is compact, `__metadata__` comes first, and
    spaces pad it so that the result's length is a multiple of `align`. Raises ValueError for a repeated or
    reserved name and a header above the limit, KeyError for an unknown dtype.
    """
    fields: dict[str, object] = {}
    if metadata:
        fields[_METADATA] = dict(sorted(metadata.items()))
    cursor = 0
    for name, dtype, shape in entries:
        if name in fields or name == _METADATA:
            raise ValueError(f"tensor name {name!r} is taken")
        end = cursor + tensor_bytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(LENGTH_BYTES + len(text)) % align)
    if len(text) > HEADER_BYTES_MAX:
        raise ValueError(f"a header of {len(text)} bytes is above the limit of {HEADER_BYTES_MAX}")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _metadata(value: Any, path: Path) -> Mapping[str, str]:
    if value is None:  # null counts as absent, as in the `safetensors` package
        return {}
    if type(value) is not dict or not all(type(text) is str for text in value.values()):
        raise HeaderError(
            "__metadata__ is not a table of strings",
            path=path,
            advice="Write the file again with a current tool, or fetch it again",
        )
    return value


def _tensors(fields: dict[str, Any], header_bytes: int, path: Path) -> tuple[HeaderTensor, ...]:
    """Return the tensors in storage order, each entry checked on its own.

    Tensors with equal shapes and dtypes share one object for them.
    """
    tensors = []
    shared: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    for name, entry in fields.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            sound = (
                len(entry) == 3
                and type(dtype) is str
                and type(shape) is list
                and type(begin) is int
                and type(end) is int
                and all(type(size) is int for size in shape)
            )
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise _entry_error(name, entry, path)
        if not is_plain(name):
            raise HeaderError(
                f"tensor name {shown(name)} is not 1 to {NAME_CHARACTERS_MAX} printable characters",
                path=path,
                advice=_REFETCH,
            )
        key = (dtype, tuple(shape))
        known = shared.get(key)
        if known is None:
            known = shared[key] = (dtype, key[1], _checked_bytes(name, dtype, key[1], path))
        dtype, dims, nbytes = known
        if begin < 0 or end - begin != nbytes or end > _COUNT_MAX:
            raise _offsets_error(name, dtype, dims, begin, end, nbytes, path)
        tensors.append(HeaderTensor(name, dtype, dims, header_bytes + begin, nbytes))
    tensors.sort(key=_place)
    return tuple(tensors)


def _place(tensor: HeaderTensor) -> tuple[int, int]:
    return tensor.offset, tensor.nbytes


def _checked_bytes(name: str, dtype: str, shape: tuple[int, ...], path: Path) -> int:
    """Return the bytes of a tensor. Raises HeaderError for an unknown dtype and for numbers beyond 63 bits."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise HeaderError(
            f"unknown dtype {shown(dtype)}",
            path=path,
            tensor=name,
            advice=f"Known are {', '.join(DTYPE_BITS)}; a newer version of this program may know more",
        )
    elements = 1
    for size in shape:
        if size < 0:
            raise HeaderError(f"negative size in shape {shown(shape)}", path=path, tensor=name, advice=_REFETCH)
        # A size of zero counts as one: another reader may multiply the others first, and overflow.
        elements *= max(size, 1)
        if elements * bits > _COUNT_MAX:
            raise HeaderError(
                f"shape {shown(shape)} has more elements than any file can hold",
                path=path,
                tensor=name,
                advice=_REFETCH,
            )
    return tensor_bytes(dtype, shape)


def _entry_error(name: str, entry: Any, path: Path) -> K3Error:
    """Return the error for an entry that does not have exactly the three fields, each of its type."""
    if type(entry) is not dict:
        problem = "its entry is not an object"
    elif missing := sorted(_ENTRY_KEYS - entry.keys()):
        problem = f"its entry lacks {', '.join(missing)}"
    elif extra := sorted(entry.keys() - _ENTRY_KEYS):
        problem = f"its entry has the unknown key {shown(extra[0])}"
    elif type(entry["dtype"]) is not str:
        problem = "its dtype is not a string"
    elif type(entry["shape"]) is not list or not all(type(size) is int for size in entry["shape"]):
        problem = f"its shape {shown(entry['shape'])} is not a list of whole numbers"
    else:
        problem = f"its data_offsets {shown(entry['data_offsets'])} are not two whole numbers"
    return HeaderError(f"malformed entry: {problem}", path=path, tensor=shown_name(name), advice=_REFETCH)


def _offsets_error(
    name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, nbytes: int, path: Path
) -> K3Error:
    if begin < 0 or end < 0 or end > _COUNT_MAX:
        problem = f"data_offsets [{shown(begin)}, {shown(end)}] are out of range"
    elif end < begin:
        problem = f"data_offsets [{begin}, {end}] end before they begin"
    else:
        problem = f"data_offsets span {end - begin} bytes, but {dtype} {shown(shape)} needs {nbytes}"
    return HeaderError(problem, path=path, tensor=name, advice=_REFETCH)


def _check_cover(tensors: tuple[HeaderTensor, ...], header_bytes: int, file_bytes: int, path: Path) -> None:
    """Check that each byte of the data section belongs to one tensor, and that the file holds all of them."""
    cursor = header_bytes
    before = ""
    cut: HeaderTensor | None = None
    for tensor in tensors:
        if tensor.offset != cursor:
            if tensor.offset < cursor:
                problem = f"the tensor overlaps tensor {shown(before)} by {cursor - tensor.offset} bytes"
            else:
                problem = f"the {tensor.offset - cursor} bytes before this tensor belong to none"
            raise HeaderError(problem, path=path, tensor=tensor.name, offset=tensor.offset, advice=_REFETCH)
        cursor += tensor.nbytes
        before = tensor.name
        if cut is None and cursor > file_bytes:
            cut = tensor
    if cut is not None:
        raise ShardError(
            f"{cursor - file_bytes} bytes are missing at the end: the header describes {cursor}, "
            f"the file has {file_bytes}",
            path=path,
            tensor=cut.name,
            offset=file_bytes,
            advice=_INCOMPLETE,
        )
    if cursor < file_bytes:
        raise ShardError(
            f"{file_bytes - cursor} bytes follow after the last tensor",
            path=path,
            offset=cursor,
            advice=f"Two files were joined, or a longer one was overwritten. {_REFETCH}",
        )
