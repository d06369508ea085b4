"""Holds up that opening costs the same for the real model: 92 layers of 896 experts, few calls, little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3.base import checksum
from k3.container.catalog import CatalogLayer, CatalogTensor, expert_layout, write_catalog
from k3.container.catalog_record import CatalogExtent
from k3.container.layout import (
    DENSE_NAME,
    FileLayout,
    cut_expert,
    expert_file_layout,
    expert_file_name,
    pack_piece,
)
from k3.container.manifest import DataFile, Geometry, Manifest, Root, SmallFile, SourceShard
from k3.model.keys import Encoding
from k3.model.kinds import CATALOG_NAME, MANIFEST_NAME

LAYERS = range(1, 93)
EXPERTS = 896
SHARES = (1, 1, 1)
PARTS = [
    (f"w{n}.weight_{kind}", "U8", (rows, columns if kind == "packed" else columns // 16))
    for n, rows, columns in ((1, 3072, 1792), (2, 3584, 1536), (3, 3072, 1792))
    for kind in ("packed", "scale")
]
OPEN_CALLS = 3 * len(LAYERS) * EXPERTS // 2
LOOK_UP_CALLS = 200
OPEN_MB = 50


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a container of the real size: its data files are holes, its catalog and manifest are whole."""
    place = tmp_path_factory.mktemp("k3")
    directories = [place / "home", place / "a", place / "b"]
    prefix = "language_model.model.layers.{}.block_sparse_moe.experts"
    layouts = {layer: expert_layout(prefix.format(layer), PARTS) for layer in LAYERS}
    payload = layouts[1].payload_bytes
    assert payload == 17_547_264
    pieces = cut_expert(payload, SHARES)
    files: list[DataFile] = []

    def add(root: int, name: str, kind: str, layout: FileLayout) -> None:
        files.append(DataFile(root, name, kind, layout.size_bytes, len(layout.header), "0" * 32))
        path = directories[root] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(layout.size_bytes)

    dense = [(f"model.layers.{layer}.tensor.{n}.weight", "BF16", (64, 32)) for layer in LAYERS for n in range(28)]
    blob = FileLayout([tensor] for tensor in dense)
    add(0, DENSE_NAME, "dense", blob)
    for layer, layout in layouts.items():
        for piece in pieces:
            add(
                piece.root,
                expert_file_name(layer),
                "experts",
                expert_file_layout(layout, EXPERTS, pieces, piece.root),
            )

    def records() -> Iterator[tuple[int, int, bytes]]:
        for index, layer in enumerate(LAYERS):
            numbers = [1 + len(pieces) * index + n for n in range(len(pieces))]
            for expert in range(EXPERTS):
                yield layer, expert, b"".join(
                    pack_piece(
                        number, files[number].header_bytes + expert * piece.stored_bytes, piece.payload_bytes,
                        piece.stored_bytes, checksum.digest(b"%d %d %d" % (layer, expert, number)),
                    )
                    for number, piece in zip(numbers, pieces, strict=True)
                )  # fmt: skip

    tensors = [
        CatalogTensor(name, dtype, shape, Encoding.RAW, CatalogExtent(0, *extent, bytes(16)), None)
        for (name, dtype, shape), extent in zip(dense, blob.extents, strict=True)
    ]
    layers = [CatalogLayer(layer, EXPERTS, layout) for layer, layout in layouts.items()]
    write_catalog(
        directories[0] / CATALOG_NAME, files, layers, records(), tensors,
        expected_bytes=len(LAYERS) * EXPERTS * 200 + (len(files) + len(tensors)) * 1024,
    )  # fmt: skip
    data = (directories[0] / CATALOG_NAME).read_bytes()
    container = checksum.content_uuid(b"k3")
    roots = []
    for number, directory in enumerate(directories):
        uuid = checksum.root_uuid(container, number)
        roots.append(Root(uuid, "home" if number == 0 else "drive", f"../{directory.name}", 1, None, None))
        if number:
            document = {"format": "k3-container-root", "version": 1, "container": container, "root": uuid}
            (directory / "root.json").write_text(json.dumps({**document, "number": number}))
    manifest = Manifest(
        container=container,
        model={"model_type": "kimi_k3"},
        source=tuple(SourceShard(f"model-{n:05}-of-000096.safetensors", 16 << 30, "0" * 64) for n in range(96)),
        quantization={"bits": 8, "mla_bits": 8, "head_bits": 8},
        geometry=Geometry(((0, 92),), 92, EXPERTS, payload, 4096),
        roots=tuple(roots),
        files=tuple(files),
        text_files=(),
        catalog=SmallFile(CATALOG_NAME, len(data), checksum.digest(data).hex()),
        skipped=tuple(f"vision_tower.blocks.{n}" for n in range(400)),
        unknown=(),
    )
    (directories[0] / MANIFEST_NAME).write_bytes(manifest.render())
    return directories[0]


MEASURE = """
import json, resource, sys
from pathlib import Path
from k3.container.reader import Container

def rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def calls(work):
    "Number of functions, Python's and C's, that are called meanwhile."
    seen = 0
    def count(frame, event, argument):
        nonlocal seen
        seen += event in ("call", "c_call")
    sys.setprofile(count)
    result = work()
    sys.setprofile(None)
    return result, seen

home = Path(sys.argv[1])
before = rss_bytes()
container, opening = calls(lambda: Container.open(home))
grown = rss_bytes() - before
look_ups = [(layer, expert) for layer in range(1, 93) for expert in range(7, 896, 56)]
_, looking = calls(lambda: [container.expert_extents(*key) for key in look_ups])
print(json.dumps({"open_calls": opening, "rss_mb": grown / 1e6, "look_up_calls": looking / len(look_ups)}))
"""


def test_opening_is_quick_and_small(home: Path) -> None:
    """Proving the catalog takes about one call an expert, a look-up a constant number; no clock is used."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(home)], capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads(result.stdout)
    assert found["open_calls"] < OPEN_CALLS
    assert found["rss_mb"] < OPEN_MB
    assert found["look_up_calls"] < LOOK_UP_CALLS
