"""Holds up how the reference model reads: every encoding's meaning, refused configurations, damaged experts."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from k3.base import checksum
from k3.base.errors import ConfigError, DamageError, DriveError, ExpertError, UnsupportedError
from k3.checkpoint.snapshot import Snapshot
from k3.model.keys import Encoding, Extent
from k3.model.model_source import EncodedTensor
from k3.verify.reference.arithmetic import causal_conv, dequantize, dequantize_mxfp4, sigmoid, situ, softmax
from k3.verify.reference.forward import ReferenceModel
from k3.verify.reference.reference_config import ReferenceConfig
from k3.verify.reference.reference_weights import ReferenceWeights

GOLDEN = Path(__file__).parent.parent / "vectors" / "tiny_s0"


@given(
    packed=hnp.arrays(np.uint8, (3, 32)),
    scales=hnp.arrays(np.uint8, (3, 2), elements=st.integers(0, 252)),
)
def test_mxfp4_one_weight_at_a_time(packed: Any, scales: Any) -> None:
    wide = dequantize_mxfp4(packed, scales)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for row in range(3):
        for column in range(64):
            byte = int(packed[row, column // 2])
            nibble = byte & 15 if column % 2 == 0 else byte >> 4
            value = math.ldexp(magnitudes[nibble & 7], int(scales[row, column // 32]) - 127)
            assert wide[row, column] == (-value if nibble & 8 else value)


def test_mxfp4_scale_255_is_no_number() -> None:
    scales = np.full((3, 2), 120, dtype=np.uint8)
    scales[2, 1] = 255
    with pytest.raises(ValueError, match="row 2, group 1"):
        dequantize_mxfp4(np.zeros((3, 32), dtype=np.uint8), scales)


def encoded(encoding: Encoding, dtype: str, shape: tuple[int, ...], data: Any, scales: Any = None) -> Any:
    return dequantize(EncodedTensor("t", encoding, dtype, shape, data, scales))


def test_dense_encodings() -> None:
    bits = np.array([[0x3F80, 0xC000], [0x0000, 0x4049]], dtype=np.uint16)
    np.testing.assert_array_equal(encoded(Encoding.RAW, "BF16", (2, 2), bits), [[1, -2], [0, 3.140625]])
    plain = np.array([1.5, -2.5], dtype=np.float32)
    np.testing.assert_array_equal(encoded(Encoding.RAW, "F32", (2,), plain), plain)
    np.testing.assert_array_equal(encoded(Encoding.F32, "BF16", (2,), plain), plain)

    bytes_ = np.array([[1, 255, 127], [129, 0, 2]], dtype=np.uint8)
    scales = np.array([0.5, 2.0], dtype=np.float32)
    int8 = encoded(Encoding.INT8, "BF16", (2, 3), bytes_, scales)
    np.testing.assert_array_equal(int8, [[0.5, -0.5, 63.5], [-254, 0, 4]])
    with pytest.raises(UnsupportedError, match="F64"):
        encoded(Encoding.RAW, "F64", (2,), plain)


@given(columns=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_int4_groups_and_odd_ends(columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-8, 8, (2, columns))
    scales = rng.uniform(0.1, 2.0, (2, -(-columns // 64))).astype(np.float32)
    padded = np.pad(values, ((0, 0), (0, columns % 2))) + 8
    data = (padded[:, 0::2] | padded[:, 1::2] << 4).astype(np.uint8)
    wide = encoded(Encoding.INT4, "BF16", (2, columns), data, scales)
    assert wide.shape == (2, columns)
    for row in range(2):
        for column in range(columns):
            assert wide[row, column] == np.float32(values[row, column]) * scales[row, column // 64]


def test_elementary_functions_at_their_edges() -> None:
    far = np.array([-1e4, 0, 1e4], dtype=np.float32)
    np.testing.assert_array_equal(sigmoid(far), [0, 0.5, 1])
    assert np.abs(situ(far, far, 4.0, 25.0)).max() <= 100
    shares = softmax(np.array([[0.0, -np.inf, 0.0]], dtype=np.float32))
    np.testing.assert_array_equal(shares, [[0.5, 0, 0.5]])
    steps = causal_conv(np.eye(5, dtype=np.float32)[:, :1], np.array([[[1, 2, 3, 4]]], dtype=np.float32))
    np.testing.assert_array_equal(steps[:, 0], [1, 0])  # the oldest input meets the first tap


def snapshot_with_config(target: Path, change: Callable[[dict[str, Any]], None]) -> Snapshot:
    shutil.copytree(GOLDEN, target)
    config = json.loads((target / "config.json").read_text())
    change(config["text_config"])
    (target / "config.json").write_text(json.dumps(config))
    return Snapshot.open([target])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "silu"),
        ("mla_use_nope", False),
        ("latent_moe_use_norm", False),
        ("moe_router_activation_func", "softmax"),
        ("num_expert_group", 4),
    ],
)
def test_models_that_are_not_k3_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    source = snapshot_with_config(tmp_path / "m", lambda text: text.update({key: value}))
    with pytest.raises(UnsupportedError, match=key):
        ReferenceConfig.of(source)


def test_incomplete_configurations_are_refused(tmp_path: Path) -> None:
    source = snapshot_with_config(tmp_path / "a", lambda text: text.pop("attn_res_block_size"))
    with pytest.raises(ConfigError, match="attn_res_block_size is missing"):
        ReferenceConfig.of(source)
    source = snapshot_with_config(tmp_path / "b", lambda text: text.update(rms_norm_eps="small"))
    with pytest.raises(ConfigError, match="not a number"):
        ReferenceConfig.of(source)
    source = snapshot_with_config(
        tmp_path / "c", lambda text: text["linear_attn_config"].update(kda_layers=[1, 2])
    )
    with pytest.raises(ConfigError, match="each of 5 layers once"):
        ReferenceConfig.of(source)
    with pytest.raises(UnsupportedError, match="6 layers of a model of 5"):
        ReferenceModel(Snapshot.open([GOLDEN]), layers=6)


def test_damaged_experts_are_reported_with_their_place(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "m")
    source = Snapshot.open([tmp_path / "m"])
    layout = source.expert_layout(2)
    (extent,) = source.expert_extents(2, 7)
    with extent.path.open("r+b") as file:
        file.seek(extent.offset + layout.part("w3.weight_scale").offset + 5)
        file.write(b"\xff")
    with pytest.raises(ExpertError, match="is 255") as caught:
        ReferenceWeights(source).expert(2, 7)
    assert (caught.value.layer, caught.value.expert) == (2, 7)

    last = source.expert_extents(2, 9)[0]  # "9" is last in string order
    with last.path.open("r+b") as file:
        file.truncate(last.end - 1)
    with pytest.raises(DriveError, match="1 bytes too early") as cut:
        ReferenceWeights(source).expert(2, 9)
    assert cut.value.path == str(last.path)


class DigestedSource:
    """A snapshot that gives experts in two padded pieces with digests, as a container over drives would."""

    def __init__(self, snapshot: Snapshot, directory: Path) -> None:
        self._snapshot = snapshot
        self._directory = directory

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)

    def expert_extents(self, layer: int, expert: int) -> tuple[Extent, ...]:
        whole = b""
        for extent in self._snapshot.expert_extents(layer, expert):
            with extent.path.open("rb") as file:
                file.seek(extent.offset)
                whole += file.read(extent.payload_bytes)
        pieces = []
        for number, part in enumerate((whole[:4096], whole[4096:])):
            stored = part.ljust(-(-len(part) // 4096) * 4096, b"\0")
            path = self._directory / f"{layer}-{expert}-{number}"
            if not path.exists():
                path.write_bytes(stored)
            pieces.append(Extent(path, 0, len(part), len(stored), checksum.digest(stored)))
        return tuple(pieces)


def test_pieces_are_joined_and_compared_with_their_digests(tmp_path: Path) -> None:
    snapshot = Snapshot.open([GOLDEN])
    source: Any = DigestedSource(snapshot, tmp_path)
    pieces, plain = ReferenceWeights(source).expert(1, 3), ReferenceWeights(snapshot).expert(1, 3)
    for field in dataclasses.fields(plain):
        np.testing.assert_array_equal(getattr(pieces, field.name), getattr(plain, field.name))

    second = tmp_path / "1-3-1"
    damaged = bytearray(second.read_bytes())
    damaged[-1] = 1  # in the padding: still no byte may differ
    second.write_bytes(damaged)
    with pytest.raises(DamageError, match="digest") as caught:
        ReferenceWeights(source).expert(1, 3)
    assert (caught.value.layer, caught.value.expert, caught.value.path) == (1, 3, str(second))
