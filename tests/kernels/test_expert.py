"""Holds up: one call per expert equals its definition, stays inside its bytes, and refuses reserved scales."""

from __future__ import annotations

from functools import partial

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import ExpertMatrix, ReservedScaleError, reference
from tests.support.arrays import Array, Everyway, SameBits

PARTS = ("w1", "w2", "w3")


class Expert:
    """A random expert [hidden, inner, out] laid out at odd offsets, w1 w2 w3 with gaps between."""

    def __init__(self, inputs: int, inner: int, outputs: int, rng: np.random.Generator, low: int = 112) -> None:
        chunks: list[Array] = [np.full(3, 0xEE, np.uint8)]
        self.matrices: dict[str, ExpertMatrix] = {}
        self.arrays: dict[str, tuple[Array, Array]] = {}
        shapes = ((inner, inputs), (outputs, inner), (inner, inputs))
        for name, (rows, columns) in zip(PARTS, shapes, strict=True):
            packed = rng.integers(0, 256, (rows, columns // 2), np.uint8)
            scale = rng.integers(low, 123, (rows, columns // 32)).astype(np.uint8)
            offset = sum(map(len, chunks))
            self.matrices[name] = ExpertMatrix(offset, offset + packed.size, rows, columns)
            self.arrays[name] = (packed, scale)
            chunks += [packed.ravel(), scale.ravel(), np.full(5, 0xFF, np.uint8)]
        self.payload = np.concatenate(chunks)
        self.payload.flags.writeable = False

    def forward(self, z: Array, exact: bool, beta: float = 4.0, linear_beta: float = 25.0) -> Array:
        w1, w2, w3 = self.matrices.values()
        return kernels.expert_forward(z, self.payload, w1, w2, w3, beta=beta, linear_beta=linear_beta, exact=exact)

    def define(self, z: Array, exact: bool, beta: float = 4.0, linear_beta: float = 25.0) -> Array:
        w1, w2, w3 = self.arrays.values()
        return reference.expert_forward(z, w1, w2, w3, beta=beta, linear_beta=linear_beta, exact=exact)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 4).map(lambda n: 32 * n)] * 2, st.integers(1, 40)),
    rows=st.integers(1, 7),
    exact=st.booleans(),
    low=st.sampled_from([0, 60, 112]),
    seed=st.integers(0, 2**32),
)
def test_equal_to_the_definition_however_it_runs(
    everyway: Everyway,
    same_bits: SameBits,
    sizes: tuple[int, int, int],
    rows: int,
    exact: bool,
    low: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    expert = Expert(*sizes, rng, low)
    z = rng.standard_normal((rows, sizes[0]), np.float32)
    (y,) = everyway(lambda: expert.forward(z, exact))
    same_bits(y, expert.define(z, exact))
    same_bits(y[-1:], expert.forward(z[-1:], exact))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from([32, 96, 512, 544, 1056])] * 2, st.sampled_from([1, 15, 16, 17, 33])),
    rows=st.sampled_from([1, 2, 40, 64, 65]),
    seed=st.integers(0, 2**32),
)
def test_integer_products_at_the_edges_of_tiles(
    everyway: Everyway, same_bits: SameBits, sizes: tuple[int, int, int], rows: int, seed: int
) -> None:
    """Sixteen rows, and scale bytes of sixteen groups (512 columns) at a time; weights of largest magnitude."""
    rng = np.random.default_rng(seed)
    expert = Expert(*sizes, rng)
    w1 = expert.matrices["w1"]
    largest = rng.choice(np.array([0x77, 0xFF, 0x7F, 0x0F], np.uint8), w1.rows * w1.columns // 2)
    expert.payload.flags.writeable = True
    expert.payload[w1.packed_offset : w1.packed_offset + largest.size] = largest
    expert.arrays["w1"] = (largest.reshape(w1.rows, -1), expert.arrays["w1"][1])
    z = rng.choice(np.array([-1, 1], np.float32), (rows, sizes[0]))
    (y,) = everyway(lambda: expert.forward(z, False))
    same_bits(y, expert.define(z, False))


@pytest.mark.parametrize("byte", [0x77, 0xFF, 0x7F, 0xF7, 0x00, 0x88])
@pytest.mark.parametrize("rows", [1, 2])
def test_integer_sums_at_their_limits(everyway: Everyway, same_bits: SameBits, byte: int, rows: int) -> None:
    """Every product of a group is the largest there is, of one sign: no sum in between may run over."""
    rng = np.random.default_rng(8)
    expert = Expert(512, 512, 32, rng)
    payload, arrays = expert.payload.copy(), dict(expert.arrays)
    for name, matrix in expert.matrices.items():
        packed = np.full((matrix.rows, matrix.columns // 2), byte, np.uint8)
        payload[matrix.packed_offset : matrix.packed_offset + packed.size] = packed.ravel()
        arrays[name] = packed, expert.arrays[name][1]
    for sign in (-1, 1):
        z = np.full((rows, 512), sign, np.float32)
        (y,) = everyway(partial(kernels.expert_forward, z, payload, *expert.matrices.values(), exact=False))
        same_bits(y, reference.expert_forward(z, *arrays.values(), exact=False))


def test_betas_are_used() -> None:
    rng = np.random.default_rng(1)
    expert = Expert(64, 32, 8, rng, 120)
    z = rng.standard_normal((2, 64), np.float32)
    for exact in (True, False):
        y = expert.forward(z, exact, beta=2.0, linear_beta=7.0)
        np.testing.assert_array_equal(y, expert.define(z, exact, beta=2.0, linear_beta=7.0))
        assert not np.array_equal(y, expert.forward(z, exact))


def test_int8_activations_stay_close_to_exact() -> None:
    rng = np.random.default_rng(2)
    expert = Expert(256, 192, 64, rng)
    z = rng.standard_normal((8, 256), np.float32)
    exact, rounded = expert.forward(z, True), expert.forward(z, False)
    error = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
    assert 1e-4 < error < 0.03


@pytest.mark.parametrize("exact", [True, False])
@settings(deadline=None)
@given(part=st.sampled_from(PARTS), place=st.integers(0))
def test_a_reserved_scale_byte_is_refused_by_part_row_and_group(exact: bool, part: str, place: int) -> None:
    expert = Expert(160, 288, 40, np.random.default_rng(3))  # whole sets of four groups, and one group more
    matrix = expert.matrices[part]
    groups = matrix.columns // 32
    at = place % (matrix.rows * groups)
    payload = expert.payload.copy()
    payload[matrix.scale_offset + at] = 255
    with pytest.raises(ReservedScaleError) as caught:
        kernels.expert_forward(np.zeros((1, 160), np.float32), payload, *expert.matrices.values(), exact=exact)
    assert (caught.value.part, caught.value.row, caught.value.group) == (part, *divmod(at, groups))
    assert f"{part}, row {at // groups}, group {at % groups}" in str(caught.value)


@pytest.mark.parametrize("scale", [0, 1, 2, 253, 254])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_outermost_scales_count_for_what_they_are(
    everyway: Everyway, same_bits: SameBits, scale: int, exact: bool, rows: int
) -> None:
    """w1 with tiny or huge weights against z that brings the product back to a size where it matters."""
    rng = np.random.default_rng(4)
    expert = Expert(128, 32, 16, rng)
    packed, _ = expert.arrays["w1"]
    packed = packed & 0x99  # magnitudes 0 and 0.5: no overflow under 2^127
    payload = expert.payload.copy()
    matrix = expert.matrices["w1"]
    payload[matrix.packed_offset : matrix.packed_offset + packed.size] = packed.ravel()
    payload[matrix.scale_offset : matrix.scale_offset + 128] = scale
    power = 100 if scale < 100 else 127 - scale if exact else -50  # int8 activations below 1e-20 would be zero
    z = np.ldexp(rng.standard_normal((rows, 128)), power).astype(np.float32)
    arrays = {**expert.arrays, "w1": (packed, np.full((32, 4), scale, np.uint8))}
    (y,) = everyway(lambda: kernels.expert_forward(z, payload, *expert.matrices.values(), exact=exact))
    same_bits(y, reference.expert_forward(z, *arrays.values(), exact=exact))
    assert np.isfinite(y).all()
    assert y.any()


def test_matrices_outside_the_payload_are_refused() -> None:
    expert = Expert(64, 96, 40, np.random.default_rng(5))
    z = np.zeros((1, 64), np.float32)
    w1, w2, w3 = expert.matrices.values()
    size = len(expert.payload)
    for bad in (
        ExpertMatrix(size - w1.rows * w1.columns // 2 + 1, 0, w1.rows, w1.columns),
        ExpertMatrix(0, size - w1.rows * w1.columns // 32 + 1, w1.rows, w1.columns),
        ExpertMatrix(2**62, 0, w1.rows, w1.columns),
        ExpertMatrix(0, 2**62, w1.rows, w1.columns),
        ExpertMatrix(0, 0, 2**40, 2**22),
    ):
        with pytest.raises(ValueError, match="w1 does not lie inside the payload"):
            kernels.expert_forward(z, expert.payload, bad, w2, w3)
    last = ExpertMatrix(size - w1.rows * w1.columns // 2, w1.scale_offset, w1.rows, w1.columns)
    assert kernels.expert_forward(z, expert.payload, last, w2, w3).shape == (1, 40)


def test_shapes_that_do_not_fit_are_refused() -> None:
    expert = Expert(64, 96, 40, np.random.default_rng(6))
    w1, w2, w3 = expert.matrices.values()
    z = np.zeros((1, 64), np.float32)
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.expert_forward(z, expert.payload, w1, w2, ExpertMatrix(0, 0, 96, 32))
    with pytest.raises(ValueError, match="do not fit together"):
        kernels.expert_forward(z, expert.payload, w1, ExpertMatrix(0, 0, 40, 64), w3)
    with pytest.raises(ValueError, match="z must have shape"):
        kernels.expert_forward(z[:, :32].copy(), expert.payload, w1, w2, w3)
    for rows, columns in ((0, 32), (1, 0), (1, 33), (-1, 32)):
        with pytest.raises(ValueError, match="cannot have shape"):
            ExpertMatrix(0, 0, rows, columns)
    with pytest.raises(ValueError, match="negative"):
        ExpertMatrix(-1, 0, 1, 32)


@settings(deadline=None)
@given(z=hnp.arrays(np.float32, (2, 64), elements=st.sampled_from([0.0, 1.0, np.inf, np.nan])))
def test_activations_that_are_not_finite(z: Array) -> None:
    expert = Expert(64, 32, 8, np.random.default_rng(7))
    bad = np.argwhere(~np.isfinite(z))
    if not len(bad):
        assert np.isfinite(expert.forward(z, False)).all()
        return
    with pytest.raises(kernels.NonFiniteError, match=f"input activation at row {bad[0][0]}, column {bad[0][1]}"):
        expert.forward(z, False)
