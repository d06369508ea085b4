"""The contract of a model on disk or behind a daemon: `ModelSource`.

`container.reader.Container`, `checkpoint.snapshot.Snapshot` and `store.client.daemon_model.DaemonModel` fulfil it.
A new kind of source is one more class with these methods: no user of a source asks for its kind. Users get
`Extent`s and `EncodedTensor`s, and compute no offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from k3.model.identity import ModelIdentity
from k3.model.keys import Encoding, ExpertLayout, Extent

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from k3.base.huge_pages import HugePages


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A dense tensor in memory, as stored.

    `shape` and `dtype` are the source's. `data` holds, by encoding:
    RAW   the source's dtype (BF16 as uint16 bit patterns, F16 as float16), shape `shape`
    F32   float32, shape `shape`
    INT8  uint8 (two's complement), [rows, columns]; `scales` float32 [rows]
    INT4  uint8, [rows, ceil(columns / 2)]; `scales` float32 [rows, ceil(columns / 64)]
    """

    name: str
    encoding: Encoding
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]
    scales: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class DenseInfo:
    """The form of a dense tensor and the memory that it will take, from headers alone.

    `dtype` and `shape` are those of the published tensor, `encoding` is the form in which it is loaded.
    """

    dtype: str
    shape: tuple[int, ...]
    encoding: Encoding
    stored_bytes: int  # weights, scales and padding, wherever that memory is
    resident_bytes: int  # of these, in memory of the process that loads the tensor; 0 for shared memory
    kept_bytes: int  # of `resident_bytes`, not freed with the tensor: one region holds the tensors of a load


class TensorReader(Protocol):
    """Hands out a model's dense tensors while they are being read."""

    def take(self, name: str) -> EncodedTensor:
        """Return a tensor, once. Waits until it is read, and raises what reading it raised."""


class TensorLoad(TensorReader, Protocol):
    """Dense tensors that are read in the background, from the creation of the load until it is closed."""

    @property
    def retries(self) -> int:
        """Reads that failed and succeeded when repeated."""

    @property
    def load_s(self) -> float:
        """Seconds from the beginning of the load to the end of reading, or until now while it lasts."""

    def huge_pages(self) -> HugePages:
        """Return the bytes of the buffers that are in huge pages, and the bytes for which those were requested."""

    def close(self) -> None:
        """Stop reading. Tensors that were taken stay valid."""


class ModelSource(Protocol):
    """A model on disk or in a daemon: configuration, dense tensors, extents of experts. Reads only on request."""

    @property
    def identity(self) -> ModelIdentity:
        """The name of exactly these weights in this form, run with this configuration and vocabulary."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json as parsed."""

    @property
    def config_path(self) -> Path:
        """The path of the config.json that `config` came from, for messages."""

    @property
    def directories(self) -> tuple[Path, ...]:
        """Every directory that holds files of the model, as this process or the daemon names it."""

    def files(self) -> Iterator[Path]:
        """Yield every file that weights are read from; it may be a link to a place outside `directories`."""

    def text_file(self, name: str) -> Path | None:
        """Return the path of a small file of the model (tiktoken.model, generation_config.json), or None."""

    def text_bytes(self, name: str) -> bytes | None:
        """Return the bytes of a small file, None without it. Compares them with the digest on record, if any."""

    def tensor_names(self) -> Sequence[str]:
        """Return the dense tensors in execution order, without vision and experts."""

    def dense(self, name: str) -> DenseInfo:
        """Return form and memory of a dense tensor, without reading it. Raises KeyError when there is none."""

    def read_tensor(self, name: str) -> EncodedTensor:
        """Read one dense tensor. Raises KeyError when there is none, K3Error when its bytes cannot be used."""

    def begin_load(
        self,
        names: Sequence[str],
        *,
        on_read: Callable[[str], None] = lambda name: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> TensorLoad:
        """Start to read dense tensors in the background, in the order of `names`, and return at once.

        `on_read` is called with each tensor's name when it is in memory, `on_end` once, at the end of all reading
        or at `close`. They are called one at a time, perhaps from another thread, perhaps before this returns.
        Imports no NumPy if the source has not.
        """

    def loading_bytes(self, names: Sequence[str]) -> int:
        """Return the most memory that `begin_load` holds in addition to the tensors, until it ends."""

    @property
    def has_extents(self) -> bool:
        """False when experts come as leases of a daemon: `expert_extents` then raises UnsupportedError."""

    def expert_layers(self) -> Sequence[int]:
        """Return the 0-based layers that have routed experts, ascending."""

    def expert_count(self, layer: int) -> int:
        """Return the number of routed experts of a layer; ids run from 0."""

    def expert_layout(self, layer: int) -> ExpertLayout:
        """Return the parts of an expert's payload, the same for all experts of the layer."""

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Return the places of an expert: its payload is the payloads of these extents in order."""

    def close(self) -> None:
        """Close the files. Nothing can be read afterwards; tensors that were read stay valid."""
