"""`DaemonModel`: the model behind a daemon's socket, as a `ModelSource`. An engine needs nothing but the socket.

Dense tensors are views of memory that the daemon filled and that all engines share: nothing is read and nothing is
copied. Immutable after construction; any thread. The memory stays readable when the daemon ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3.base.errors import ContainerError, UnsupportedError, WireError
from k3.base.huge_pages import HugePages
from k3.model.identity import ModelIdentity
from k3.model.keys import ExpertLayout, Extent
from k3.model.model_config import CONFIG_NAME, parse_config
from k3.model.model_source import DenseInfo, EncodedTensor
from k3.store.protocol.closing import close_descriptor
from k3.store.protocol.model_descriptor import DenseRange, DenseTensor, ExpertLayer, ModelDescriptor
from k3.store.source import Payload

if TYPE_CHECKING:
    from k3.store.client.socket_link import Link


class SharedTensors:
    """A `TensorLoad` with nothing left to read: tensors are views of the daemon's memory."""

    retries = 0
    load_s = 0.0

    def __init__(self, read_tensor: Callable[[str], EncodedTensor]) -> None:
        self.take = read_tensor

    def huge_pages(self) -> HugePages:
        """Return zeros: the memory is the daemon's."""
        return HugePages()

    def close(self) -> None:
        """Do nothing: no read is in flight."""


class DaemonModel:
    """A `ModelSource` from a welcomed link. Close it to let go of the text files."""

    has_extents = False

    def __init__(self, link: Link) -> None:
        """WireError when the daemon's description cannot be understood."""
        self.descriptor: ModelDescriptor = link.descriptor()
        self._dense = link.dense
        self._tensors = {tensor.name: tensor for tensor in self.descriptor.tensors}
        self._text_files: dict[str, int] = {}

    def close(self) -> None:
        """Close the text files. Tensors stay readable."""
        while self._text_files:
            close_descriptor(self._text_files.popitem()[1])

    @cached_property
    def identity(self) -> ModelIdentity:
        """As of the container that the daemon serves. ConfigError when its configuration contradicts itself."""
        return self.descriptor.identity()

    @property
    def home(self) -> Path:
        """Where the daemon has the container; for messages and for those who go there themselves."""
        return Path(self.descriptor.home)

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directory of every root of the container, as the daemon names them."""
        return tuple(map(Path, self.descriptor.roots))

    @property
    def directories(self) -> tuple[Path, ...]:
        """Every directory of the container, as the daemon names them; they may not be readable here."""
        return tuple(dict.fromkeys((self.home, *self.roots)))

    def files(self) -> Iterator[Path]:
        """Every file that the daemon reads experts from, as it names them."""
        yield from map(Path, self.descriptor.files)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json as parsed, untouched."""
        return parse_config(self.descriptor.config.encode(), self.config_path)

    @property
    def config_path(self) -> Path:
        """The config.json in the container's home, as the daemon names it."""
        return self.home / CONFIG_NAME

    def text_file(self, name: str) -> Path | None:
        """Return this process's path of a small file that came with the model: its bytes are in a memfd."""
        data = self.descriptor.text_files.get(name)
        if data is None:
            return None
        descriptor = self._text_files.get(name)
        if descriptor is None:
            descriptor = os.memfd_create(f"k3-{Path(name).name}"[:200], os.MFD_CLOEXEC)
            os.ftruncate(descriptor, len(data))
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], done)
            self._text_files[name] = descriptor
        return Path(f"/proc/self/fd/{descriptor}")

    def text_bytes(self, name: str) -> bytes | None:
        """Return the bytes of a small file, which the daemon has compared with its digest; None without it."""
        return self.descriptor.text_files.get(name)

    def tensor_names(self) -> Sequence[str]:
        """Dense tensors in execution order."""
        return tuple(self._tensors)

    def tensor(self, name: str) -> DenseTensor:
        """Return name, dtype and shape of a dense tensor. KeyError when there is none."""
        return self._tensors[name]

    def dense(self, name: str) -> DenseInfo:
        """Return what is known of a dense tensor, which takes no memory of this process. KeyError without it."""
        tensor = self._tensors[name]
        stored_bytes = tensor.weights.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)
        return DenseInfo(tensor.dtype, tensor.shape, tensor.encoding, stored_bytes, 0, 0)

    def read_tensor(self, name: str) -> EncodedTensor:
        """Return a dense tensor over the shared memory, read-only.

        KeyError when there is none, WireError when the daemon gives it other bytes than its shape needs.
        """
        from k3.model.encoded_tensor import (  # NumPy takes longer to import than a model to be found
            encoded_tensor,
            is_stored_in,
        )

        tensor = self._tensors[name]
        given = [span.nbytes for span in (tensor.weights, tensor.scales) if span is not None]
        if not is_stored_in(given, tensor.encoding, tensor.dtype, tensor.shape):
            raise WireError(
                f"the daemon gives {given} bytes for a tensor {tensor.dtype} {list(tensor.shape)} "
                f"as {tensor.encoding.value}",
                tensor=name,
                advice="The daemon is of another release; run both from the same one",
            )
        scales = None if tensor.scales is None else self._view(tensor.scales)
        weights = self._view(tensor.weights)
        return encoded_tensor(name, tensor.encoding, tensor.dtype, tensor.shape, weights, scales)

    def begin_load(
        self,
        names: Sequence[str],
        *,
        on_read: Callable[[str], None] = lambda name: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> SharedTensors:
        """Return tensors that are in memory already: `on_read` and `on_end` are called before this returns."""
        for name in names:
            on_read(name)
        on_end()
        return SharedTensors(self.read_tensor)

    def loading_bytes(self, names: Sequence[str]) -> int:
        """Return 0: the daemon has loaded the tensors."""
        return 0

    def expert_layers(self) -> Sequence[int]:
        """0-based layers that have routed experts, ascending."""
        return tuple(self.descriptor.layers)

    def expert_count(self, layer: int) -> int:
        """Return the number of routed experts of a layer."""
        return self._layer(layer).experts

    def expert_layout(self, layer: int) -> ExpertLayout:
        """How the payload of the layer's experts is built."""
        return self._layer(layer).layout

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        """Never known here: experts come from the daemon as leases, not as places in files."""
        raise UnsupportedError(
            "a model behind k3-store hands out leases, not places in files",
            layer=layer,
            expert=expert,
            advice="Open the container itself",
        )

    def _layer(self, layer: int) -> ExpertLayer:
        try:
            return self.descriptor.layers[layer]
        except KeyError:
            raise ContainerError("layer has no routed experts here", path=self.home, layer=layer) from None

    def _view(self, span: DenseRange) -> Payload:
        return self._dense[span.offset : span.offset + span.nbytes]
