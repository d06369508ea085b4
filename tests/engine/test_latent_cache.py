"""Holds up: caches in bfloat16 and float16 round as stated, keep the stated bound, and lose nothing in silence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.base.errors import ResumeError, UnsupportedError
from k3.engine.definition.latent_cache import FORMS, round_to_cache_type
from k3.engine.definition.state_size import state_bytes
from k3.engine.forward.mla import LatentAttention
from k3.engine.forward.state import MlaState, State
from k3.engine.run.session import Session
from k3.kernels import reference
from k3.model.architecture import LatentType
from tests.support.arrays import Array
from tests.support.engines import all_logits, golden, loaded, rel_l2, snapshot

NARROW: tuple[LatentType, ...] = ("bf16", "f16")
UNIT = {"bf16": 2.0**-8, "f16": 2.0**-11}
IDS = golden("tiny_s1")["input_ids"]


def widened(held: Array) -> Array:
    return held.astype(np.float32) if held.dtype == np.float16 else reference.widen_bf16(held)


@pytest.mark.parametrize("kind", NARROW)
@given(pattern=st.integers(0, 2**32 - 1))
def test_rounding_is_to_the_nearest(kind: LatentType, pattern: int) -> None:
    value = np.array([pattern], np.uint32).view(np.float32)
    finite = bool(np.isfinite(value[0]))
    try:
        held = round_to_cache_type(value, FORMS[kind].dtype)
    except UnsupportedError:
        limit = 65520.0 if kind == "f16" else (2 - 2.0**-8) * 2.0**127
        assert finite
        assert abs(float(value[0])) >= limit
        return
    kept = widened(held)
    if not finite:
        np.testing.assert_array_equal(kept, value)
        return
    near = [held.view(np.uint16) + np.uint16(1), held.view(np.uint16) - np.uint16(1)]
    off = abs(float(kept[0]) - float(value[0]))
    for other in near:  # neighbours of the pattern; where they are no neighbours in value they are far away
        distance = abs(float(widened(other.view(held.dtype))[0]) - float(value[0]))
        assert not distance < off
        assert distance != off or held.view(np.uint16)[0] % 2 == 0


@pytest.mark.parametrize(("kind", "value"), [("f16", 65520.0), ("f16", -1e5), ("bf16", 3.4e38)])
def test_what_does_not_fit_is_refused(kind: LatentType, value: float) -> None:
    with pytest.raises(UnsupportedError, match="latent cache cannot hold"):
        round_to_cache_type(np.array([[1, value]], np.float32), FORMS[kind].dtype)


@pytest.mark.parametrize("kind", NARROW)
@settings(deadline=None)
@given(rows=st.integers(1, 300), spread=st.sampled_from([0.1, 1.0, 3.0]), seed=st.integers(0, 2**32))
def test_the_bound_of_a_narrow_cache(kind: LatentType, rows: int, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, latent_width, rope_width, scale, u = 3, 48, 16, 0.1, UNIT[kind]
    latent, rope = (rng.standard_normal((rows, w), np.float32) for w in (latent_width, rope_width))
    q, r = (
        np.float32(spread) * rng.standard_normal((1, heads, w), np.float32) for w in (latent_width, rope_width)
    )
    plain = kernels.latent_attention(q, r, latent, rope, scale)[0].astype(np.float64)
    held_latent, held_rope = (round_to_cache_type(a, FORMS[kind].dtype) for a in (latent, rope))
    narrow = kernels.latent_attention(q, r, held_latent, held_rope, scale)[0].astype(np.float64)
    moved = u * scale * (np.abs(q[0]) @ np.abs(latent).T + np.abs(r[0]) @ np.abs(rope).T).max(1, keepdims=True)
    scores = scale * (q[0].astype(np.float64) @ latent.T + r[0] @ rope.T)
    share = np.exp(scores - scores.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    small = (
        2.0**-25 * 8 if kind == "f16" else 0.0
    )  # numbers below 2^-14, in latents and, through scores, in weights
    bound = ((1 + u) * np.exp(2 * moved) - 1) * (share @ np.abs(latent)) + small
    assert (np.abs(narrow - plain) <= bound + 1e-5 * (share @ np.abs(latent))).all()


@pytest.mark.parametrize("kind", NARROW)
def test_chunks_give_the_same_bits(kind: LatentType) -> None:
    with loaded(snapshot("tiny_s1")) as model:
        exact = all_logits(model, IDS, 24)
        model.config = model.config.with_latent_cache(kind)
        whole = all_logits(model, IDS, 24)
        for chunk in (1, 7):
            assert all_logits(model, IDS, chunk).tobytes() == whole.tobytes()
        assert 0 < rel_l2(whole, exact) < 8 * UNIT[kind]


@pytest.mark.parametrize("kind", NARROW)
def test_a_narrow_state_takes_half_and_is_saved_as_it_is(kind: LatentType, tmp_path: Path) -> None:
    path = tmp_path / "state"
    with loaded(snapshot("tiny_s1")) as model:
        wide = model.config
        model.config = config = wide.with_latent_cache(kind)
        assert state_bytes(wide, 50) - state_bytes(config, 50) == sum(
            2 * 50 * (config.mla.latent + config.mla.rope)
            for layer in config.layers
            if layer not in config.kda_layers
        )
        for state in State(config, 3).layers.values():
            if isinstance(state, MlaState):
                assert (state.latent.dtype, state.rope.dtype) == (FORMS[kind].dtype,) * 2
                assert state.latent.ctypes.data % 64 == 0
        first = Session(model, 30, 8)
        first.prefill(IDS[:15].tolist())
        first.save(path)
        wanted = first.prefill(IDS[15:].tolist())
        again = Session(model, 30, 4)
        again.load(path)
        assert again.prefill(IDS[15:].tolist()).tobytes() == wanted.tobytes()
        others: set[LatentType] = {"f32", "bf16", "f16"}
        for other in others - {kind}:
            model.config = wide.with_latent_cache(other)
            with pytest.raises(ResumeError, match=rf"latent {FORMS[kind].tensor_dtype} \(here"):
                Session(model, 30, 4).load(path)


def test_a_number_beyond_float16_ends_the_pass_with_advice() -> None:
    with loaded(snapshot("tiny_s1")) as model:
        model.config = model.config.with_latent_cache("f16")
        mla = next(layer for layer in model.layers if layer.index not in model.config.kda_layers)
        attention = mla._attention
        assert isinstance(attention, LatentAttention)
        attention._kv_norm()[:] *= np.float32(1e6)
        with pytest.raises(UnsupportedError, match="--latent-dtype f32"):
            Session(model, 30, 8).prefill(IDS.tolist())
