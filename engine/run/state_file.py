"""The file of a saved timeline, as specified in docs/state_file.md.

`write_state` writes one. `SavedState` is an open one, whose header and tokens were found sound and to belong to
this model and these settings; its arrays are read and checked when they are restored. The layout is a pure
function of the shapes, so a header is checked by building it again. One thread uses an object.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from k3.base.checksum import Hasher, digest
from k3.base.errors import DamageError, ExitCode, ResumeError, SourceError, VersionError
from k3.base.output_file import OutputFile
from k3.base.regular_file import RegularFile
from k3.checkpoint.safetensors_header import Header, build_header, header_length, parse_header
from k3.engine.definition.latent_cache import FORMS
from k3.engine.definition.model_options import ModelOptions
from k3.engine.forward.state import State, StateTensor, state_tensors
from k3.model.architecture import ModelConfig
from k3.model.identity import ModelIdentity
from k3.model.keys import tensor_bytes

Array = npt.NDArray[Any]
PromptForm = Literal["ids", "text"]

FORMAT = "k3-state"
VERSION = 2

NUMERICS = 1
"""Version of the arithmetic, to be raised when the same weights and tokens give other bits than before."""

NO_TEXT = "none"
"""The vocabulary of a timeline of token ids, which depends on no text."""

ALIGN_BYTES = 64
HEADER_BYTES_MAX = 1 << 20
DIGEST_BYTES = 16
BLOCK_BYTES = 8 << 20
"""Size, roughly, of the blocks in which rows are read and written."""

_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}
_COUNT = re.compile(r"^[1-9][0-9]{0,9}$")
_BEGINNING = b'{"__metadata__":{"config":"'
_WORDS = (b'"k3-state"', b'"numerics":"', b'"taken":"')
"""Each of these words is in the first 512 bytes of every state; the beginning follows the header's length."""

_START_ANEW = "Delete it to begin anew"
_NOT_SAVED = (
    "The state was not saved; what was in this place before is unchanged. Free space, or choose another place"
)


@dataclass(frozen=True, slots=True)
class Binding:
    """Everything that decides the numbers of a model and their meaning, as the file spells it.

    `text` binds timelines that began as text; those that began as token ids have NO_TEXT.
    """

    model: str
    config: str
    text: str
    numerics: str
    layers: str
    exact: str
    mla_eps: str
    keep_share: str
    latent: str

    @classmethod
    def of(cls, identity: ModelIdentity, config: ModelConfig, options: ModelOptions) -> Binding:
        """Return the binding of runs of a model; `identity` is its source's."""
        return cls(
            model=identity.weights,
            config=identity.config,
            text=identity.text,
            numerics=str(NUMERICS),
            layers=f"{config.layers[0]}-{config.layers[-1]}",
            exact="true" if options.exact else "false",
            mla_eps=repr(float(config.mla.eps)),
            keep_share=repr(float(options.keep_share)),
            latent=FORMS[config.mla.cache].tensor_dtype,
        )

    def metadata(self, prompt: PromptForm) -> dict[str, str]:
        """Return the metadata that a file has for this binding, of a timeline that began in this form."""
        return {**asdict(self), "text": self.text if prompt == "text" else NO_TEXT}

    def check(self, found: dict[str, str], path: Path) -> None:
        """Raise ResumeError naming every difference between a file's metadata and this binding."""
        wanted = self.metadata("text" if found.get("prompt") == "text" else "ids")
        different = [key for key in wanted if found.get(key) != wanted[key]]
        if different:
            listing = ", ".join(f"{key} {_shown(found.get(key))} (here {wanted[key]})" for key in different)
            raise ResumeError(
                f"the state was made with other settings or by another model: {listing}",
                path=path,
                advice=f"Use the model and settings of the saved state, or name another file. {_START_ANEW}",
            )


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor of the file and its padding. `tensor` is its array in the state; None for tokens and logits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    tensor: StateTensor | None

    @property
    def payload_bytes(self) -> int:
        """Bytes without padding."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes with padding."""
        return -(-self.payload_bytes // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def block_rows(self) -> int:
        """Rows that are read or written together."""
        return max(1, BLOCK_BYTES // max(1, self.payload_bytes // self.shape[0]))


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Header and sections of a file, computed from shapes before a byte of it is written or trusted."""

    header: bytes
    sections: tuple[Section, ...]

    @classmethod
    def of(cls, binding: Binding, config: ModelConfig, tokens: int, taken: int, prompt: PromptForm) -> StateLayout:
        """Return the layout for `tokens` tokens, of which `taken` have been taken in. Pure."""
        tensors: list[tuple[str, str, tuple[int, ...], StateTensor | None]] = [
            ("tokens", "I32", (tokens,), None),
            ("logits", "F32", (config.vocab,), None),
        ]
        for tensor in state_tensors(config, taken):
            tensors.append((f"layers.{tensor.layer}.{tensor.name}", tensor.dtype, tensor.shape, tensor))
        entries: list[tuple[str, str, tuple[int, ...]]] = []
        sections = []
        position = pads = 0
        for name, dtype, shape, tensor_or_none in tensors:
            section = Section(name, dtype, shape, position, tensor_or_none)
            entries.append((name, dtype, shape))
            padding = section.stored_bytes - section.payload_bytes
            if padding:
                entries.append((f"__pad__.{pads}", "U8", (padding,)))
                pads += 1
            sections.append(section)
            position += section.stored_bytes
        entries.append(("digests", "U8", (len(sections) + 1, DIGEST_BYTES)))
        metadata = {
            "format": FORMAT, "version": str(VERSION), "taken": str(taken), "prompt": prompt,
            **binding.metadata(prompt),
        }  # fmt: skip
        header = build_header(entries, metadata, ALIGN_BYTES)
        return cls(header, tuple(sections))

    def start(self, section: Section) -> int:
        """Return the offset of a section in the file."""
        return len(self.header) + section.offset

    @property
    def digests_start(self) -> int:
        """The offset of the digests in the file."""
        return len(self.header) + sum(section.stored_bytes for section in self.sections)


def write_state(
    path: Path,
    state: State,
    config: ModelConfig,
    binding: Binding,
    tokens: Sequence[int],
    logits: npt.NDArray[np.float32],
    prompt: PromptForm,
) -> None:
    """Write the state after the first `state.position` of `tokens`, with the `logits` [vocab] after them.

    The file appears, or replaces an earlier one, when all of it is durable. DriveError, SpaceError.
    """
    layout = StateLayout.of(binding, config, len(tokens), state.position, prompt)
    given: dict[str, Array] = {"tokens": np.asarray(tokens, np.int64), "logits": logits}
    with OutputFile(path, "the state", _NOT_SAVED, private=True) as file:
        digests = b""
        file.write(layout.header)
        for section in layout.sections:
            hasher = Hasher()
            for block in _blocks(section, state, given.get(section.name)):
                file.write(block)
                hasher.update(block)
            digests += hasher.digest()
        file.write(digests + digest(layout.header))
        file.publish()


def check_writable(path: Path) -> None:
    """Raise DriveError now if a state could not be written at the end."""
    OutputFile(path, "the state", _NOT_SAVED, private=True).close()


class NotAStateError(DamageError):
    """A file of another kind, in which no byte of a state is damaged."""

    exit_code = ExitCode.USAGE

    def __init__(self, path: Path) -> None:
        """Say so, with advice that does no harm to the file."""
        advice = "Name a file that k3-run --state wrote, or one that does not exist"
        super().__init__("this is no saved state; it is left as it is", path=path, advice=advice)


class SavedState:
    """An open state file. A context manager; nothing can be read after it is closed."""

    def __init__(self, path: Path, binding: Binding, config: ModelConfig) -> None:
        """Open a file, and check everything but the arrays.

        NotAStateError for a file of another kind, DamageError when the bytes are not those that were written,
        VersionError for a later version, ResumeError for another model or other settings, DriveError.
        """
        self.path = path
        self._config = config
        self._file = RegularFile(path, missing=DamageError)
        try:
            self._layout, self.taken, self.prompt = self._read_layout(binding)
            self._digests = self._read(self._layout.digests_start, DIGEST_BYTES * len(self._layout.sections))
            ids = np.empty(self._layout.sections[0].shape, np.int32)
            self._fill(0, ids)
            outside = (ids < 0) | (ids >= config.vocab)
            if outside.any():
                place = int(np.argmax(outside))
                raise self._damage(f"token id {ids[place]} at place {place} is outside the vocabulary", "tokens")
            self.tokens: tuple[int, ...] = tuple(ids.tolist())
        except BaseException:
            self.close()
            raise

    def restore(self, state: State) -> npt.NDArray[np.float32]:
        """Fill `state`, which has room for it, and return the logits [vocab] after the last token taken in.

        After an error `state` must not be used. DamageError, DriveError.
        """
        logits = np.empty(self._config.vocab, np.float32)
        self._fill(1, logits)
        for number, section in enumerate(self._layout.sections):
            if section.tensor is not None:
                self._fill_rows(number, section, section.tensor, state)
        state.position = self.taken
        return logits

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        self._file.close()

    def __enter__(self) -> SavedState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_layout(self, binding: Binding) -> tuple[StateLayout, int, PromptForm]:
        """Read and check the header by steps 1 to 4 of docs/state_file.md section 3."""
        raw, header = self._header()
        metadata = dict(header.metadata)
        if metadata.get("format") != FORMAT:
            raise self._damage("this is no state file", offset=0)
        stored_digest = self._read(header.file_bytes - DIGEST_BYTES, DIGEST_BYTES)
        if stored_digest != digest(raw):
            raise self._damage("the header does not match its digest", offset=0)
        version = metadata.get("version", "")
        if _COUNT.match(version) and int(version) > VERSION:
            raise VersionError(
                f"the state has version {version}, this program knows versions up to {VERSION}",
                path=self.path,
                advice=f"Use a newer version of this program. {_START_ANEW}",
            )
        if version == "1":
            raise ResumeError(
                "the state has version 1, which does not say which configuration and vocabulary it was made with",
                path=self.path,
                advice=f"Nothing proves that it belongs to this model. {_START_ANEW}",
            )
        binding.check(metadata, self.path)
        first, taken, prompt = header.tensors[0], metadata.get("taken", ""), metadata.get("prompt")
        if first.name != "tokens" or len(first.shape) != 1 or not _COUNT.match(taken):
            raise self._damage("the header does not begin with tokens", offset=0)
        if int(taken) > first.shape[0]:
            raise self._damage(f"{taken} tokens taken in of {first.shape[0]}", offset=0)
        form: PromptForm = "text" if prompt == "text" else "ids"
        layout = StateLayout.of(binding, self._config, first.shape[0], int(taken), form)
        if layout.header != raw:
            place = next(
                (i for i, (one, other) in enumerate(zip(raw, layout.header, strict=False)) if one != other),
                min(len(raw), len(layout.header)),
            )
            raise self._damage("the header is not the one that a state of this model has", offset=place)
        return layout, int(taken), form

    def _header(self) -> tuple[bytes, Header]:
        """Read the header, whose length is checked first. DamageError."""
        size_bytes = self._file.size_bytes
        if not size_bytes:
            raise self._damage("the file is empty: it was cut, or never written", offset=0)
        try:
            start = self._file.read(0, min(size_bytes, 512))
            if _is_of_another_kind(start):
                raise NotAStateError(self.path)
            length = header_length(start, size_bytes, self.path)
            if length > HEADER_BYTES_MAX or size_bytes < 8 + length + DIGEST_BYTES:
                raise self._damage(f"its header would have {length} bytes, in a file of {size_bytes}", offset=0)
            raw = self._file.read(0, 8 + length)
            header = parse_header(raw, size_bytes, self.path)
        except SourceError as error:  # its advice is for a download
            raise self._damage(error.problem, error.tensor, offset=error.offset) from error
        if not header.tensors:
            raise self._damage("it holds no tensor", offset=0)
        return raw, header

    def _fill(self, number: int, into: Array) -> None:
        """Read section `number` as one small array."""
        section = self._layout.sections[number]
        data = self._read(self._layout.start(section), section.stored_bytes)
        self._check_digest(number, section, digest(data))
        into[...] = _parsed(section, data[: section.payload_bytes])

    def _fill_rows(self, number: int, section: Section, tensor: StateTensor, state: State) -> None:
        """Read a section block by block into the layer that it belongs to."""
        hasher, offset = Hasher(), self._layout.start(section)
        row_bytes = section.payload_bytes // section.shape[0]
        target = state.layers[tensor.layer]
        for row in range(0, section.shape[0], section.block_rows):
            count = min(section.block_rows, section.shape[0] - row)
            data = self._read(offset + row * row_bytes, count * row_bytes)
            hasher.update(data)
            target.put_rows(tensor.name, row, _parsed(section, data).reshape(count, *section.shape[1:]))
        padding = section.stored_bytes - section.payload_bytes
        hasher.update(self._read(offset + section.payload_bytes, padding))
        self._check_digest(number, section, hasher.digest())

    def _check_digest(self, number: int, section: Section, found: bytes) -> None:
        if found != self._digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]:
            raise self._damage(
                "the bytes do not match their digest", section.name, section.tensor, self._layout.start(section)
            )

    def _read(self, offset: int, length: int) -> bytes:
        try:
            return self._file.read(offset, length)
        except SourceError as error:  # the file was cut after it was opened
            raise self._damage(error.problem, offset=error.offset) from error

    def _damage(
        self, problem: str, name: str | None = None, tensor: StateTensor | None = None, offset: int | None = None
    ) -> DamageError:
        return DamageError(
            f"the state cannot be used: {problem}",
            path=self.path,
            tensor=name,
            layer=None if tensor is None else tensor.layer,
            offset=offset,
            advice=f"Restore it from a copy. {_START_ANEW}",
        )


def _is_of_another_kind(start: bytes) -> bool:
    """Return True if the first bytes of a file are not those of a state, even if one word of it was damaged."""
    if any(word in start for word in _WORDS):
        return False
    length_end, text = start[3:8], start[8 : 8 + len(_BEGINNING)]
    # Less than 1 MiB of header, then its beginning, as far as a file that was cut still has them.
    return any(length_end) or text != _BEGINNING[: len(text)]


def _blocks(section: Section, state: State, given: Array | None) -> Iterator[bytes]:
    """Yield the bytes of a section in blocks, the padding last."""
    for start in range(0, section.shape[0], section.block_rows):
        stop = min(start + section.block_rows, section.shape[0])
        if section.tensor is None:
            assert given is not None
            rows = given[start:stop]
        else:
            rows = state.layers[section.tensor.layer].rows(section.tensor.name, start, stop)
        yield rows.astype(_DTYPES[section.dtype], copy=False).tobytes()
    yield bytes(section.stored_bytes - section.payload_bytes)


def _parsed(section: Section, data: bytes) -> Array:
    """Return little-endian bytes as a flat array of the section's dtype."""
    return np.frombuffer(data, _DTYPES[section.dtype])


def _shown(value: str | None) -> str:
    """Return a value of a file's metadata, which may be anything, for a message."""
    if value is None:
        return "missing"
    text = value.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else text[:77] + "..."
