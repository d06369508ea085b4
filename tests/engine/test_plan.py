"""Holds up that the plan of a run is what the run takes, and that a forecast counts what it says it counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.memory_limit import Limit
from k3.base.pages import PAGE_BYTES
from k3.engine.definition.settings import ModelSettings
from k3.engine.forward import weights
from k3.engine.launch.memory_plan import DENSE_PARTS, MemoryPlan, plan_memory
from k3.engine.launch.model_files import open_model_files
from k3.engine.report.token_cost import forecast_pass, used_experts
from k3.model.architecture import ModelConfig
from k3.model.model_source import EncodedTensor, ModelSource
from k3.model.tensor_names import expected_tensors, tensor_use
from k3.repack.repack_request import RepackRequest
from k3.repack.run import Watcher, repack
from k3.store.lending.file_source import WORKING_SLOTS, FileSource
from tests.support.engines import VECTORS, loaded, snapshot

CONFIG = ModelConfig.from_raw(snapshot().config, Path("config.json"))


def planned(settings: ModelSettings, free_bytes: float = math.inf) -> tuple[ModelSource, MemoryPlan]:
    found = open_model_files(settings)
    plan = plan_memory(
        found, settings, Limit(free_bytes, "a test"),
        capacity=64, chunk=8, every_logit=False,
    )  # fmt: skip
    return found.source, plan


def test_every_tensor_has_its_part() -> None:
    found: dict[str, set[str]] = {part: set() for part in DENSE_PARTS}
    for name in expected_tensors(CONFIG, CONFIG.layers):
        for prefix in ("", "language_model."):
            found[tensor_use(prefix + name, CONFIG)].add(name)
    assert found["embeddings"] == {"model.embed_tokens.weight"}
    assert found["head"] == {"lm_head.weight"}
    layers = {
        part: {int(name.split(".")[2]) for name in names if "layers" in name} for part, names in found.items()
    }
    assert layers["KDA attention"] == set(CONFIG.kda_layers)
    assert layers["MLA attention"] == set(CONFIG.layers) - set(CONFIG.kda_layers)
    assert layers["dense MLP"] == set(CONFIG.layers) - set(CONFIG.moe_layers)
    for part, count in (("shared experts", 3), ("latent projections", 2), ("routers", 1)):
        assert len(found[part]) == count * len(CONFIG.moe_layers)
        assert layers[part] == set(CONFIG.moe_layers)
    shapes = expected_tensors(CONFIG, CONFIG.layers)
    for name in found["norms and other vectors"]:
        assert len(shapes[name]) != 2 or shapes[name][0] == 1
    assert all(len(shapes[name]) == 2 for part in DENSE_PARTS[:-1] for name in found[part])


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_dense_weights_take_what_was_planned(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors are held as float32: what that adds to their stored bytes is counted as it happens."""
    added_bytes, original = 0, weights.to_float32

    def to_float32(tensor: EncodedTensor) -> npt.NDArray[np.float32]:
        nonlocal added_bytes
        values = original(tensor)
        added_bytes += values.nbytes - tensor.data.nbytes
        return values

    settings = ModelSettings(snapshot=(VECTORS / "tiny_s1",), bits=bits, mla_bits=bits, head_bits=bits)
    _, plan = planned(settings)
    monkeypatch.setattr(weights, "to_float32", to_float32)
    with loaded(snapshot(bits=bits)) as model:
        assert plan.need.dense_bytes == model.resident_bytes + added_bytes
    assert sum(plan.parts.values()) == plan.need.dense_bytes


@pytest.mark.parametrize(("free_bytes", "expert_bytes"), [(math.inf, None), (6e6, None), (math.inf, 1_000_000)])
def test_the_cache_holds_what_was_planned(free_bytes: float, expert_bytes: int | None) -> None:
    source, plan = planned(ModelSettings(snapshot=(VECTORS / "tiny_s1",), expert_bytes=expert_bytes), free_bytes)
    assert 0 < plan.cached_experts <= plan.experts == 64
    experts = FileSource(source, cache_bytes=plan.cache_bytes)
    assert experts.stats().slots == WORKING_SLOTS + plan.cached_experts
    experts.close()
    assert plan.need.total_bytes <= free_bytes
    plan.check()


def test_look_ahead_has_room_only_where_experts_are_read() -> None:
    def planned_slots(free_bytes: float = math.inf, **settings: Any) -> tuple[int, int]:
        _, plan = planned(ModelSettings(snapshot=(VECTORS / "tiny_s1",), **settings), free_bytes)
        return plan.prefetch, plan.need.working_bytes // plan.slot_bytes

    top_k = CONFIG.moe.top_k
    assert planned_slots() == (0, WORKING_SLOTS)  # all experts have room in memory
    assert planned_slots(expert_bytes=0) == (top_k, WORKING_SLOTS + top_k)
    assert planned_slots(2.4e6) == (top_k, WORKING_SLOTS + top_k)
    assert planned_slots(prefetch=3) == (3, WORKING_SLOTS + 3)
    assert planned_slots(expert_bytes=0, prefetch=0) == (0, WORKING_SLOTS)


def test_a_container_needs_nothing_on_top_while_it_is_loaded(tmp_path: Path) -> None:
    repack(RepackRequest((VECTORS / "tiny_s1",), tmp_path / "home", direct=False), Watcher())
    source, plan = planned(ModelSettings(container=tmp_path / "home"))
    assert plan.need.load_bytes == 0
    assert plan.need.dense_bytes >= sum(source.dense(name).stored_bytes for name in source.tensor_names())
    assert all(source.dense(name).stored_bytes % PAGE_BYTES == 0 for name in source.tensor_names())
    source.close()


@given(st.integers(1, 60), st.data())
def test_a_forecast_counts_experts(tokens: int, data: st.DataObject) -> None:
    hit_share = data.draw(st.floats(0, 1))
    source = snapshot()
    found = forecast_pass(
        source, CONFIG, list(source.tensor_names()), hit_share=hit_share, tokens=tokens, position=100
    )
    each = source.expert_layout(1).payload_bytes
    assert found.drive_bytes == pytest.approx((1 - hit_share) * found.experts * each)
    most = len(CONFIG.moe_layers) * min(CONFIG.moe.experts, tokens * CONFIG.moe.top_k)
    assert len(CONFIG.moe_layers) * CONFIG.moe.top_k <= round(found.experts, 9) <= most
    one = forecast_pass(source, CONFIG, list(source.tensor_names()), hit_share=0, tokens=1, position=100)
    assert one.experts == pytest.approx(len(CONFIG.moe_layers) * CONFIG.moe.top_k)
    assert one.drive_s(2e9) == pytest.approx(one.experts * each / 2e9)
    assert found.memory_bytes >= one.memory_bytes


def test_tokens_that_choose_freely_use_that_many_experts() -> None:
    dice = np.random.default_rng(0)
    for experts, top_k, tokens in ((64, 16, 3), (96, 4, 20), (8, 8, 2)):
        used = [
            len({expert for _ in range(tokens) for expert in dice.choice(experts, top_k, replace=False)})
            for _ in range(400)
        ]
        assert np.mean(used) == pytest.approx(used_experts(experts, top_k, tokens), rel=0.02)
