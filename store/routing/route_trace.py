"""Routing traces: which experts each token chose, pass by pass. docs/route_trace.md is the format.

`RouteTraceWriter` is fed by an engine as it runs and publishes by rename; `RouteTraceReader` hands out the passes
front to back, each of them checked against the header before it is handed out. Memory is one pass, whatever the
length. Neither is for more than one thread.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import zstandard

from k3.base.direct_io import drive_error
from k3.base.errors import ExitCode, K3Error, UnsupportedError, VersionError
from k3.base.output_file import OutputFile
from k3.base.safe_text import is_plain, shown
from k3.base.strict_json import parse_object

Ids = npt.NDArray[np.uint16]

MAGIC = b"K3ROUTE\0"
VERSION = 1
HEADER_BYTES_MAX = 1 << 20
PASS_CHOICES_MAX = 1 << 24
"""Tokens of a pass times top_k: 2^20 tokens of the real model."""
EXPERTS_MAX = 1 << 16
LAYERS_MAX = 1 << 16
PAYLOAD_BYTES_MAX = 1 << 40
"""A thousand billion bytes for one expert: sums over any trace stay numbers that can be shown."""
_PREFIX = struct.Struct("<8sII")  # magic, version, header bytes
_RECORD = struct.Struct("<IIQ")  # tokens, zero, position; or at the end: zero, passes, tokens of all passes
_FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_READ_BYTES = 1 << 12  # a hostile frame grows 30,000-fold at most
_LEVEL = 6
assert (_PREFIX.size, _RECORD.size) == (16, 16)


class RouteTraceError(K3Error):
    """A file that is not a whole and sound routing trace."""

    exit_code = ExitCode.DAMAGED


class NotARouteTraceError(RouteTraceError):
    """A file of another kind, in which no byte of a routing trace is damaged."""

    exit_code = ExitCode.USAGE

    def __init__(self, problem: str, path: Path) -> None:
        super().__init__(problem, path=path, advice="Name a file that k3-run --route-trace wrote")


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer with experts, and the size of each of them."""

    layer: int
    experts: int
    payload_bytes: int

    def __post_init__(self) -> None:
        for name, number, least, most in (
            ("layer", self.layer, 0, LAYERS_MAX - 1),
            ("experts", self.experts, 1, EXPERTS_MAX),
            ("payload_bytes", self.payload_bytes, 1, PAYLOAD_BYTES_MAX),
        ):
            if not least <= number <= most:
                raise ValueError(f"{name} {shown(number)} is not from {least} to {most}")


@dataclass(frozen=True, slots=True)
class RouteHeader:
    """Which model was run, and through which of its layers every pass went. ValueError when it makes no sense."""

    model: str
    top_k: int
    layers: tuple[TracedLayer, ...]

    def __post_init__(self) -> None:
        numbers = [entry.layer for entry in self.layers]
        if not numbers or sorted(set(numbers)) != numbers:
            raise ValueError(f"layers must be some, and ascending, not {shown(numbers)}")
        if not 1 <= self.top_k <= min(entry.experts for entry in self.layers):
            raise ValueError(f"top_k {shown(self.top_k)} does not fit the number of experts")
        if not is_plain(self.model):
            raise ValueError(f"model {shown(self.model)} is not a name")

    @property
    def counts(self) -> dict[int, int]:
        """Layer to number of experts."""
        return {entry.layer: entry.experts for entry in self.layers}

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest expert: what a slot must hold."""
        return max(entry.payload_bytes for entry in self.layers)

    def to_json(self) -> bytes:
        """Return the header as it is stored in the file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_document(cls, document: Mapping[str, object]) -> RouteHeader:
        """Return the header that a JSON object describes. ValueError when it describes none."""
        entries = document.get("layers")
        if not isinstance(entries, list):
            raise ValueError("it has no list of layers")
        model = document.get("model")
        if not isinstance(model, str):
            raise ValueError("model is missing")
        layers = []
        for entry in entries:
            if not isinstance(entry, dict):
                raise ValueError("an entry of layers is not an object")
            layers.append(TracedLayer(*(_whole(entry, key) for key in ("layer", "experts", "payload_bytes"))))
        return cls(model, _whole(document, "top_k"), tuple(layers))


@dataclass(frozen=True, slots=True)
class Choice:
    """What the tokens of one pass chose in one layer: `counts[t]` of `ids` are token t's, token after token."""

    counts: Ids
    ids: Ids

    def wanted(self) -> Ids:
        """Every expert that some token chose, ascending."""
        return np.unique(self.ids)

    def per_token(self) -> list[list[int]]:
        """Return the ids that each token chose."""
        return [part.tolist() for part in np.split(self.ids, np.cumsum(self.counts)[:-1])]


@dataclass(frozen=True, slots=True)
class RoutedPass:
    """One pass: position of its first token, number of tokens, and a choice for each layer of the header."""

    position: int
    tokens: int
    choices: tuple[Choice, ...]


class RouteTraceWriter:
    """Writes a trace. A context manager: left without `publish`, it removes what it wrote.

    `torn` is true after an error or a Ctrl-C in the middle of a write: the file cannot be continued.
    """

    def __init__(self, path: Path, header: RouteHeader) -> None:
        """DriveError when nothing can be written there."""
        self.path = path
        self._header = header
        self._choices: list[Choice] = []
        self._passes = 0
        self._tokens = 0
        self.torn = False
        self._file = OutputFile(path, "the routing trace")
        self._frame = zstandard.ZstdCompressor(_LEVEL, write_checksum=True).compressobj()
        text = header.to_json()
        try:
            self._write(_PREFIX.pack(MAGIC, VERSION, len(text)) + text)
        except BaseException:
            self._file.close()
            raise

    def add(self, layer: int, counts: npt.NDArray[np.integer], ids: npt.NDArray[np.integer]) -> None:
        """Add the choices of the current pass's tokens in one layer; layers come in the header's order.

        `counts` [tokens] says how many of `ids` belong to each token; ids ascend within a token. ValueError
        when a choice breaks the format.
        """
        expected = self._header.layers[len(self._choices) % len(self._header.layers)]
        if layer != expected.layer or len(self._choices) == len(self._header.layers):
            raise ValueError(f"layer {layer} of a pass was traced where {expected.layer} should follow")
        if not 1 <= len(counts) * self._header.top_k <= PASS_CHOICES_MAX:
            raise ValueError(f"a pass of {len(counts)} tokens cannot be traced")
        if self._choices and len(self._choices[0].counts) != len(counts):
            raise ValueError("the layers of a pass have different numbers of tokens")
        if max(counts.max(), ids.max(initial=0)) >= EXPERTS_MAX or min(counts.min(), ids.min(initial=0)) < 0:
            raise ValueError("a count or an id does not fit into 16 bits")
        choice = Choice(counts.astype("<u2"), ids.astype("<u2"))
        problem = _broken(choice, self._header.top_k, expected)
        if problem is not None:
            raise ValueError(f"layer {layer}: {problem}")
        self._choices.append(choice)

    def end_pass(self, position: int) -> None:
        """Write the pass that is over. `position` is that of its first token. Raises DriveError."""
        if len(self._choices) != len(self._header.layers):
            raise ValueError(f"a pass ended after {len(self._choices)} of {len(self._header.layers)} layers")
        tokens = len(self._choices[0].counts)
        arrays = [array.tobytes() for choice in self._choices for array in (choice.counts, choice.ids)]
        self.torn = True
        self._write(_RECORD.pack(tokens, 0, position) + b"".join(arrays))
        self._choices.clear()
        self._passes += 1
        self._tokens += tokens
        self.torn = False

    def publish(self) -> None:
        """Write the end, make it durable and give the file its name. A pass that was begun is left out.

        DriveError, or ValueError when the writer is torn.
        """
        if self.torn:
            raise ValueError("a trace that was torn cannot be published")
        self._write(_RECORD.pack(0, self._passes, self._tokens), last=True)
        self._file.publish()

    def __enter__(self) -> RouteTraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _write(self, data: bytes, *, last: bool = False) -> None:
        packed = self._frame.compress(data)
        if last:
            packed += self._frame.flush()
        self._file.write(packed)


class RouteTraceReader:
    """Reads a trace: `header` at once, then each pass by iteration, once. A context manager.

    The constructor and the iteration raise RouteTraceError, VersionError, UnsupportedError or DriveError with the
    path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _opened(path)
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._pending = memoryview(b"")
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[RoutedPass]:
        passes = total = 0
        while True:
            tokens, second, third = _RECORD.unpack(self._take(_RECORD.size))
            if tokens == 0:
                break
            if second != 0 or tokens * self.header.top_k > PASS_CHOICES_MAX:
                raise self._refusal(f"the record of pass {passes} is not sound")
            choices = tuple(self._read_choice(passes, tokens, entry) for entry in self.header.layers)
            yield RoutedPass(third, tokens, choices)
            passes += 1
            total += tokens
        if (second, third) != (passes, total):
            raise self._refusal(f"it has {passes} passes and {total} tokens, its end says {second} and {third}")
        self._check_end()

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> RouteTraceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_header(self) -> RouteHeader:
        start = self._read(_READ_BYTES)
        if not start.startswith(_FRAME_MAGIC):
            raise NotARouteTraceError("this is not a routing trace", self.path)
        self._inflate(start)
        no_prefix = self._frame.eof and len(self._pending) < _PREFIX.size
        magic, version, header_bytes = (b"", 0, 0) if no_prefix else _PREFIX.unpack(self._take(_PREFIX.size))
        if magic != MAGIC:
            raise NotARouteTraceError(
                "this is not a routing trace, though something compressed with zstd", self.path
            )
        if version > VERSION:
            raise VersionError(
                f"a routing trace of version {version}, and this program knows up to {VERSION}", path=self.path
            )
        if version != VERSION or header_bytes > HEADER_BYTES_MAX:
            raise self._refusal(f"version {version} with a header of {header_bytes} bytes is not sound")
        document = parse_object(
            self._take(header_bytes), what="its header", path=self.path, error=RouteTraceError,
            advice="Write or copy the trace again",
        )  # fmt: skip
        try:
            return RouteHeader.from_document(document)
        except ValueError as error:
            raise self._refusal(f"its header is not sound: {error}") from error

    def _read_choice(self, number: int, tokens: int, entry: TracedLayer) -> Choice:
        counts = np.frombuffer(self._take(2 * tokens), "<u2")
        choice = Choice(counts, np.frombuffer(self._take(2 * int(counts.sum(dtype=np.int64))), "<u2"))
        problem = _broken(choice, self.header.top_k, entry)
        if problem is not None:
            raise self._refusal(f"pass {number}: {problem}", layer=entry.layer)
        return choice

    def _check_end(self) -> None:
        """Nothing may follow the end record, neither in the frame nor behind it."""
        while not self._pending and not self._frame.eof:
            data = self._read(_READ_BYTES)
            if not data:
                raise self._refusal("it ends too early: the end of its zstd frame is missing")
            self._inflate(data)
        if self._pending or self._frame.unused_data or self._read(1):
            raise self._refusal("something follows its end")

    def _take(self, nbytes: int) -> bytes:
        """Exactly so many bytes of content."""
        parts = [self._pending]
        have_bytes = len(self._pending)
        while have_bytes < nbytes:
            data = b"" if self._frame.eof else self._read(_READ_BYTES)
            if not data:
                raise self._refusal("it ends too early", advice="It is no whole file; write or copy it again")
            self._inflate(data)
            parts.append(self._pending)
            have_bytes += len(self._pending)
        cut = len(self._pending) - (have_bytes - nbytes)
        parts[-1], self._pending = self._pending[:cut], self._pending[cut:]
        return b"".join(parts)

    def _inflate(self, data: bytes) -> None:
        try:
            self._pending = memoryview(self._frame.decompress(data))
        except zstandard.ZstdError as error:
            raise self._refusal(f"it is damaged: {error}") from error

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._file.read(nbytes)
        except OSError as error:
            raise drive_error("cannot read the routing trace", error, self.path) from error

    def _refusal(self, problem: str, *, layer: int | None = None, advice: str | None = None) -> RouteTraceError:
        return RouteTraceError(problem, path=self.path, layer=layer, advice=advice)


def write_route_trace(path: Path, header: RouteHeader, passes: Sequence[RoutedPass]) -> None:
    """Write a whole trace at once. Errors as `RouteTraceWriter`."""
    with RouteTraceWriter(path, header) as writer:
        for routed in passes:
            for entry, choice in zip(header.layers, routed.choices, strict=True):
                writer.add(entry.layer, choice.counts, choice.ids)
            writer.end_pass(routed.position)
        writer.publish()


def _opened(path: Path) -> BinaryIO:
    """Return a regular file, opened for reading. A pipe is refused: it would be waited for without end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        file = os.fdopen(descriptor, "rb")
        mode = os.fstat(descriptor).st_mode
    except OSError as error:
        raise drive_error("cannot read the routing trace", error, path) from error
    if not stat.S_ISREG(mode):
        file.close()
        raise UnsupportedError(
            "a routing trace is read from a regular file, and this is none",
            path=path,
            advice="Write what comes out of it into a file first",
        )
    return file


def _broken(choice: Choice, top_k: int, entry: TracedLayer) -> str | None:
    """How a choice breaks the format, None when it does not. Its arrays are u16."""
    counts, ids = choice.counts.astype(np.int64), choice.ids.astype(np.int64)
    if counts.min() < 1 or counts.max() > top_k:
        return f"a token chose {counts.min() if counts.min() < 1 else counts.max()} experts, not 1 to {top_k}"
    if counts.sum() != len(ids):
        return f"{len(ids)} ids for {counts.sum()} choices"
    if ids.max() >= entry.experts:
        return f"there is no expert {ids.max()}, only {entry.experts}"
    rises = np.diff(ids) > 0
    rises[np.cumsum(counts)[:-1] - 1] = True  # the next token begins anew
    return None if rises.all() else "a token's experts do not ascend"


def _whole(document: Mapping[str, object], key: str) -> int:
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is missing or not a whole number")
    return value
