"""What a client must know of the model, as one JSON text: `docs/store_protocol.md` section 5.

The daemon renders it once into a sealed memfd; every client parses it. Offsets point into the dense memfd, where
each extent of the container's dense tensors lies on pages of its own, in execution order. Immutable values; no
I/O.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3.base import checksum
from k3.base.errors import WireError
from k3.base.pages import page_ceil
from k3.base.safe_text import is_plain, shown_text
from k3.base.strict_json import parse_object
from k3.container.catalog import CatalogTensor, expert_layout
from k3.container.reader import Container
from k3.model.identity import GENERATION_CONFIG_NAME, ModelIdentity, config_identity, text_identity
from k3.model.keys import DTYPE_BITS, Encoding, ExpertLayout
from k3.model.model_config import CONFIG_NAME, parse_config


@dataclass(frozen=True, slots=True)
class DenseRange:
    """Bytes of the dense memfd."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A dense tensor and where its payload lies in the dense memfd."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    encoding: Encoding
    weights: DenseRange
    scales: DenseRange | None


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """One layer with routed experts."""

    experts: int
    layout: ExpertLayout


@dataclass(frozen=True, slots=True)
class ModelDescriptor:
    """The model as clients see it. `roots` and `files` are paths as the daemon names them, by number."""

    container: str
    home: str
    config: str
    text_files: Mapping[str, bytes]
    layers: Mapping[int, ExpertLayer]
    tensors: tuple[DenseTensor, ...]
    roots: tuple[str, ...]
    files: tuple[str, ...]

    def identity(self) -> ModelIdentity:
        """Return the model's identity, computed as a container's is.

        ConfigError when its configuration is not sound.
        """
        path = Path(self.home) / CONFIG_NAME
        return ModelIdentity(
            weights=self.container,
            config=config_identity(
                parse_config(self.config.encode(), path), self.text_files.get(GENERATION_CONFIG_NAME), path
            ),
            text=text_identity({name: checksum.digest(data).hex() for name, data in self.text_files.items()}),
        )

    def render(self) -> bytes:
        """Return the JSON text that goes into the memfd."""
        document = {
            "container": self.container,
            "home": self.home,
            "config": self.config,
            "text_files": {name: base64.b64encode(data).decode() for name, data in self.text_files.items()},
            "layers": [
                {
                    "layer": number,
                    "experts": layer.experts,
                    "block": layer.layout.prefix,
                    "parts": [
                        {"name": part.name, "dtype": part.dtype, "shape": part.shape}
                        for part in layer.layout.parts
                    ],
                }
                for number, layer in self.layers.items()
            ],
            "tensors": [_tensor_json(tensor) for tensor in self.tensors],
            "roots": self.roots,
            "files": self.files,
        }
        return json.dumps(document, separators=(",", ":")).encode()


def place_dense(tensors: tuple[CatalogTensor, ...]) -> tuple[tuple[DenseTensor, ...], int]:
    """Return the place of each dense tensor in the dense memfd, and the size in bytes that the memfd must have."""
    placed = []
    end = 0
    for tensor in tensors:
        ranges = []
        for extent in (tensor.weights, tensor.scales):
            if extent is not None:
                ranges.append(DenseRange(end, extent.payload_bytes))
                end += page_ceil(extent.stored_bytes)
        scales = ranges[1] if len(ranges) == 2 else None
        placed.append(DenseTensor(tensor.name, tensor.dtype, tensor.shape, tensor.encoding, ranges[0], scales))
    return tuple(placed), end


def describe(
    container: Container, tensors: tuple[DenseTensor, ...], text_files: Mapping[str, bytes], files: Sequence[Path]
) -> ModelDescriptor:
    """Return the descriptor of an open container whose dense tensors were placed and whose text files were read.

    `files` are those that experts are read from, by the numbers that completions carry. ConfigError for a
    configuration that no client could use.
    """
    config = text_files[CONFIG_NAME]
    parse_config(config, container.home / CONFIG_NAME)
    layers = {
        layer: ExpertLayer(container.expert_count(layer), container.expert_layout(layer))
        for layer in container.expert_layers()
    }
    return ModelDescriptor(
        container=container.manifest.container,
        home=str(container.home.resolve()),
        config=config.decode(),
        text_files=text_files,
        layers=layers,
        tensors=tensors,
        roots=tuple(str(root.directory.resolve()) for root in container.roots),
        files=tuple(map(str, files)),
    )


def parse_descriptor(data: bytes, dense_bytes: int) -> ModelDescriptor:
    """Return the descriptor in `data`, every range of which lies inside a dense memfd of `dense_bytes`.

    WireError when it is not a descriptor.
    """
    advice = "The daemon is of another release; run both from the same one"
    document = parse_object(data, what="the model descriptor", path=Path("memfd"), error=WireError, advice=advice)
    try:
        descriptor = ModelDescriptor(
            container=_text(document["container"]),
            home=_text(document["home"]),
            config=_text(document["config"]),
            text_files={
                name: base64.b64decode(text, validate=True) for name, text in document["text_files"].items()
            },
            layers=dict(_layers(document["layers"])),
            tensors=tuple(_tensor(item, dense_bytes) for item in document["tensors"]),
            roots=tuple(_text(path) for path in document["roots"]),
            files=tuple(_text(path) for path in document["files"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        problem = f"the model descriptor lacks or misuses a key: {shown_text(str(error))}"
        raise WireError(problem, advice=advice) from error
    return descriptor


def _layers(items: Any) -> Iterator[tuple[int, ExpertLayer]]:
    for item in items:
        parts = [(part["name"], part["dtype"], tuple(map(_count, part["shape"]))) for part in item["parts"]]
        yield _count(item["layer"]), ExpertLayer(_count(item["experts"]), expert_layout(item["block"], parts))


def _tensor_json(tensor: DenseTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "encoding": tensor.encoding.value,
        "weights": _range_json(tensor.weights),
        "scales": None if tensor.scales is None else _range_json(tensor.scales),
    }


def _range_json(place: DenseRange) -> dict[str, int]:
    return {"offset": place.offset, "bytes": place.nbytes}


def _tensor(item: Any, dense_bytes: int) -> DenseTensor:
    return DenseTensor(
        _name(item["name"]),
        _dtype(item["dtype"]),
        tuple(map(_count, item["shape"])),
        Encoding(item["encoding"]),
        _range(item["weights"], dense_bytes),
        None if item["scales"] is None else _range(item["scales"], dense_bytes),
    )


def _range(item: Any, dense_bytes: int) -> DenseRange:
    found = DenseRange(_count(item["offset"]), _count(item["bytes"]))
    if found.offset + found.nbytes > dense_bytes:
        raise ValueError(f"bytes {found.offset} to {found.offset + found.nbytes} of a memfd of {dense_bytes}")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not is_plain(value):
        raise TypeError(f"{value!r} is no name")
    return value


def _dtype(value: Any) -> str:
    if not isinstance(value, str) or value not in DTYPE_BITS:
        raise TypeError(f"{value!r} is no dtype")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value
