"""Holds up the arithmetic of the format: cuts, file layouts and records place every byte once, on pages."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from k3.base.pages import PAGE_BYTES, page_ceil
from k3.checkpoint.safetensors_header import parse_header
from k3.container.catalog import expert_layout
from k3.container.layout import (
    PIECE_RECORD,
    FileLayout,
    cut_expert,
    expert_file_layout,
    expert_file_name,
    pack_piece,
    unpack_pieces,
)
from k3.model.keys import DTYPE_BITS, tensor_bytes

shares_lists = st.lists(st.integers(0, 1_000_000), min_size=1, max_size=8).filter(any)
payloads = st.integers(1, 40 * PAGE_BYTES) | st.sampled_from([17_547_264, PAGE_BYTES, PAGE_BYTES + 1, 1])
parts_lists = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.integers(0, 40), max_size=3).map(tuple)),
    min_size=1,
    max_size=5,
)


@given(payloads, shares_lists)
def test_a_cut_covers_every_byte_once(payload_bytes: int, shares: list[int]) -> None:
    pieces = cut_expert(payload_bytes, shares)
    position = 0
    for piece in pieces:
        assert piece.payload_offset == position
        assert piece.payload_offset % PAGE_BYTES == 0
        assert piece.stored_bytes % PAGE_BYTES == 0
        assert 0 < piece.payload_bytes <= piece.stored_bytes
        position += piece.stored_bytes
    assert position == page_ceil(payload_bytes)
    assert sum(piece.payload_bytes for piece in pieces) == payload_bytes
    assert all(piece.payload_bytes == piece.stored_bytes for piece in pieces[:-1])
    roots = [piece.root for piece in pieces]
    assert roots == sorted(set(roots))


@given(payloads, shares_lists)
def test_a_cut_follows_the_shares_to_a_page(payload_bytes: int, shares: list[int]) -> None:
    pieces = {piece.root: piece for piece in cut_expert(payload_bytes, shares)}
    pages = page_ceil(payload_bytes) // PAGE_BYTES
    for root, share in enumerate(shares):
        ideal = Fraction(pages * share, sum(shares))
        got = pieces[root].stored_bytes // PAGE_BYTES if root in pieces else 0
        assert abs(got - ideal) <= 1
        if share == 0:
            assert root not in pieces


@given(st.integers(1, 100), st.integers(1, 6))
def test_equal_shares_never_differ_by_more_than_a_page(pages: int, roots: int) -> None:
    pieces = cut_expert(pages * PAGE_BYTES, (1,) * roots)
    sizes = [0] * (roots - len(pieces)) + [piece.stored_bytes for piece in pieces]
    assert max(sizes) - min(sizes) <= PAGE_BYTES


@given(shares_lists, st.integers(1, 50))
def test_a_common_factor_of_the_shares_changes_nothing(shares: list[int], factor: int) -> None:
    assert cut_expert(17_547_264, shares) == cut_expert(17_547_264, [factor * share for share in shares])


@given(st.lists(parts_lists, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_file_is_tiled_and_opens(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[tuple[str, tuple[int, ...]]]]
) -> None:
    named = [
        [(f"t{number}.{index}", dtype, shape) for index, (dtype, shape) in enumerate(group)]
        for number, group in enumerate(groups)
    ]
    layout = FileLayout(named)
    position = len(layout.header)
    assert position % PAGE_BYTES == 0
    assert len(layout.extents) == len(named)
    for (offset, payload, stored), group in zip(layout.extents, named, strict=True):
        assert offset == position
        assert payload == sum(tensor_bytes(dtype, shape) for _, dtype, shape in group)
        assert stored == page_ceil(payload)
        position += stored
    assert layout.size_bytes == position
    header = parse_header(layout.header, layout.size_bytes, Path("x"))
    pads = [tensor for tensor in header.tensors if tensor.name.startswith("__pad__.")]
    assert [pad.name for pad in pads] == [f"__pad__.{number}" for number in range(len(pads))]
    ends = {offset + payload: stored - payload for offset, payload, stored in layout.extents if stored > payload}
    assert {pad.offset: pad.nbytes for pad in pads} == ends
    assert {pad.dtype for pad in pads} <= {"U8"}

    path = tmp_path_factory.mktemp("layout") / "x.safetensors"
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, layout.size_bytes - len(layout.header), dtype=np.uint8).tobytes()
    path.write_bytes(layout.header + data)
    with safe_open(path, framework="numpy") as file:
        opened = set(file.keys())
        assert opened == {name for group in named for name, *_ in group} | {pad.name for pad in pads}
        for group in named:
            for name, dtype, shape in group:
                assert (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())) == (
                    dtype,
                    shape,
                )
    assert list(json.loads(layout.header[8:]))[:1] == [name for group in named for name, *_ in group][:1]


@pytest.mark.parametrize("shares", [(1,), (3, 2), (1, 0), (0, 1), (5, 1, 1), (1000, 1)])
def test_expert_files_hold_what_the_cut_says(shares: tuple[int, ...]) -> None:
    parts = [("w1", "U8", (100, 91)), ("w1_scale", "F8_E8M0", (7,)), ("w2", "BF16", (3, 33))]
    layout = expert_layout("model.layers.3.mlp.experts", parts)
    pieces = cut_expert(layout.payload_bytes, shares)
    for piece in pieces:
        built = expert_file_layout(layout, 4, pieces, piece.root)
        assert [(p, s) for _, p, s in built.extents] == [(piece.payload_bytes, piece.stored_bytes)] * 4
        names = [name for name in json.loads(built.header[8:]) if not name.startswith("__pad__")]
        if len(pieces) == 1:
            assert names == [f"{layout.prefix}.{e}.{name}" for e in range(4) for name, *_ in parts]
        else:
            assert names == [f"{layout.prefix}.{e}.piece.{piece.root}" for e in range(4)]


def test_real_experts_have_no_padding() -> None:
    assert cut_expert(17_547_264, (1,))[0].stored_bytes == 17_547_264 == 4284 * PAGE_BYTES
    assert expert_file_name(92) == "experts/layer-00092.safetensors"


records = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
)  # fmt: skip


@given(st.lists(records, min_size=1, max_size=9), st.data())
def test_records_are_read_back_and_a_broken_one_is_refused(
    items: list[tuple[int, int, int, bytes]], data: st.DataObject
) -> None:
    wanted = []
    for file, offset, stored, digest in items:
        payload = data.draw(st.integers(0, stored))
        wanted.append((file, offset, payload, stored, digest))
    packed = b"".join(pack_piece(*item) for item in wanted)
    assert unpack_pieces(packed) == wanted
    assert PIECE_RECORD.size == 48
    cut = data.draw(st.integers(0, len(packed) - 1).filter(lambda n: n % 48))
    for bad in (b"", packed[:cut], packed + b"\0"):
        with pytest.raises(ValueError, match="not a multiple of 48"):
            unpack_pieces(bad)
    reserved = bytearray(packed)
    reserved[4 + data.draw(st.integers(0, 3))] = 1
    with pytest.raises(ValueError, match="reserved"):
        unpack_pieces(bytes(reserved))


def test_a_payload_larger_than_its_extent_is_refused() -> None:
    with pytest.raises(ValueError, match="payload larger"):
        unpack_pieces(pack_piece(0, 0, 4097, 4096, bytes(16)))
