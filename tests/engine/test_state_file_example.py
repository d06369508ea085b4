"""Holds up docs/state_file.md section 6: its blocks are the bytes, by the page's own rules and by our code."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from safetensors.numpy import load_file

from k3.engine.forward.state import KdaState, MlaState, State
from k3.engine.run.state_file import Binding, SavedState, write_state
from k3.model.architecture import KdaConfig, MlaConfig, ModelConfig
from tests.support.engines import snapshot

PAGE = (Path(__file__).parents[2] / "docs" / "state_file.md").read_text(encoding="utf-8")
BINDING = Binding(
    model="00000000-0000-8000-8000-000000000000", config="0123456789abcdef0123456789abcdef", text="(not for ids)",
    numerics="1", layers="0-2", exact="false", mla_eps="1e-06", keep_share="1.0", latent="F32",
)  # fmt: skip


def block(name: str) -> str:
    """Return the content of the page's fenced block with this name."""
    found = re.findall(rf"^```\w+ worked-example-{name}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == 1, name
    return str(found[0])


def file_by_the_page() -> bytes:
    """Return the file made from the page's blocks and prose alone, without our code."""
    text = block("header").replace("\n", "").encode()
    header = struct.pack("<Q", -(-(8 + len(text)) // 64) * 64 - 8) + text
    header += b" " * (-len(header) % 64)
    sections = [struct.pack("<4i", 3, 1, 4, 2)]
    next_float = 1
    for name, entry in json.loads(text).items():
        if entry.get("dtype") == "F32":
            count = (entry["data_offsets"][1] - entry["data_offsets"][0]) // 4
            sections.append(struct.pack(f"<{count}f", *range(next_float, next_float + count)))
            next_float += count
        assert name == "__metadata__" or (len(header) + entry["data_offsets"][0]) % 4 == 0
    assert next_float == 38
    padded = [section + bytes(-len(section) % 64) for section in sections]
    digests = [xxhash.xxh3_128(part).digest() for part in (*padded, header)]
    return header + b"".join(padded) + b"".join(digests)


def small_config() -> ModelConfig:
    """Return the shapes of the example."""
    config = ModelConfig.from_raw(snapshot().config, Path("config.json"))
    return replace(
        config, vocab=5, layer_count=3, layers=range(3), kda_layers=frozenset({0, 1}),
        kda=KdaConfig(heads=1, head_dim=2, conv_taps=2, gate_lower_bound=-5.0),
        mla=MlaConfig(heads=1, q_rank=2, latent=3, nope=1, rope=1, value=1),
    )  # fmt: skip


def test_the_prose_gives_the_numbers_of_the_example() -> None:
    data = file_by_the_page()
    numbers = dict(re.findall(r"^(\S+) +([0-9a-f]{32})$", block("digests"), re.MULTILINE))
    wanted = [data[-16 * left : len(data) - 16 * (left - 1)].hex() for left in range(len(numbers), 0, -1)]
    assert list(numbers.values()) == wanted
    assert list(numbers)[-1] == "header"
    assert f"The file has {len(data)} bytes" in " ".join(PAGE.split())


def test_our_code_writes_and_reads_the_same_bytes(tmp_path: Path) -> None:
    config, path = small_config(), tmp_path / "state"
    state = State(config, 9)
    values = iter(range(6, 38))
    for number in range(3):
        layer = state.layers[number]
        if isinstance(layer, KdaState):
            for array in (layer.memory, layer.windows):
                array.flat[:] = [next(values) for _ in range(array.size)]
        else:
            rows = np.array([next(values) for _ in range(12)], np.float32).reshape(3, 4)
            layer.put_rows("rows", 0, rows)
    state.position = 3
    write_state(path, state, config, BINDING, (3, 1, 4, 2), np.arange(1, 6, dtype=np.float32), "ids")
    assert path.read_bytes() == file_by_the_page()

    with SavedState(path, BINDING, config) as saved:
        assert (saved.tokens, saved.taken, saved.prompt) == ((3, 1, 4, 2), 3, "ids")
        again = State(config, 3)
        assert saved.restore(again).tolist() == [1, 2, 3, 4, 5]
    layer = again.layers[2]
    assert isinstance(layer, MlaState)
    assert layer.latent[2].tolist() == [34, 35, 36]
    assert layer.rope[2].tolist() == [37]


def test_safetensors_tools_open_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(file_by_the_page())
    tensors = load_file(path)
    assert tensors["tokens"].tolist() == [3, 1, 4, 2]
    assert tensors["layers.2.rows"].tolist()[-1] == [34, 35, 36, 37]
