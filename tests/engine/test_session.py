"""Holds up that a timeline refuses what does not fit, and does not go on after an error."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from k3.base.errors import DriveError, UnsupportedError
from k3.engine.definition.state_size import state_bytes
from k3.engine.forward.state import KdaState, State
from k3.engine.run.session import Session
from k3.engine.run.trace_file import TraceFile
from k3.engine.run.trace_observers import TraceObserver
from k3.model.keys import ExpertKey
from k3.store.lending.memory_source import MemorySource
from tests.support.engines import all_logits, golden, loaded, snapshot
from tests.support.faults import FaultySource

IDS = golden("tiny_s1")["input_ids"].tolist()


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    with loaded(snapshot()) as model:
        session = Session(model, 10, 4)
        with pytest.raises(UnsupportedError, match="context of 10"):
            session.prefill(IDS[:11])
        for bad in ([], [-1], [3, 512]):
            with pytest.raises(ValueError, match="token"):
                session.prefill(bad)
        session.prefill(IDS[:9])
        row = session.step(IDS[9])
        with pytest.raises(UnsupportedError, match="1 tokens after 10"):
            session.step(0)
        assert session.position == 10
        assert row.tobytes() == all_logits(model, np.array(IDS[:10]), 10)[-1].tobytes()


def test_sessions_are_independent() -> None:
    with loaded(snapshot()) as model:
        one, other = Session(model, 24, 5), Session(model, 24, 5)
        wanted = all_logits(model, np.array(IDS), 24)
        for start in range(0, 24, 6):
            row = one.prefill(IDS[start : start + 6])
            other.prefill(IDS[23 - start : 17 - start if start < 18 else None : -1])
        assert row.tobytes() == wanted[-1].tobytes()


def test_a_session_that_met_an_error_is_over() -> None:
    fault = DriveError("cannot read", path="shard", layer=2, expert=7, offset=4096)
    failures = {ExpertKey(2, expert): fault for expert in range(16)}
    with loaded(snapshot(), wrap=lambda experts: FaultySource(experts, failures=failures)) as model:
        session = Session(model, 24, 24)
        with pytest.raises(DriveError, match="layer 2, expert 7, offset 4096"):
            session.prefill(IDS)
        with pytest.raises(ValueError, match="cannot continue"):
            session.step(1)
        failures.clear()
        model.layers[2].mlp._source._failures.clear()  # type: ignore[union-attr]
        assert Session(model, 24, 24).prefill(IDS).shape == (512,)  # the model itself is still good


def test_state_bytes_are_what_a_state_takes() -> None:
    with loaded(snapshot()) as model:
        taken = 0
        for state in State(model.config, 77).layers.values():
            arrays = [state.memory, state.windows] if isinstance(state, KdaState) else [state.latent, state.rope]
            taken += sum(array.nbytes for array in arrays)
        assert state_bytes(model.config, 77) == taken


def test_a_trace_tells_passes_and_experts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with loaded(snapshot()) as model:
        wanted = all_logits(model, np.array(IDS), 10)
        with TraceFile(path) as file:
            model.observer = TraceObserver(file, MemorySource({}), None)
            assert all_logits(model, np.array(IDS), 10).tobytes() == wanted.tobytes()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    passes = [record for record in records if record["type"] == "pass"]
    layers = [record for record in records if record["type"] == "layer"]
    assert [(record["position"], record["tokens"]) for record in passes] == [(0, 10), (10, 10), (20, 4)]
    assert [record["layer"] for record in layers] == [0, 1, 2, 3, 4] * 3
    assert [record["attention"] for record in layers[:5]] == ["kda"] * 3 + ["mla"] * 2
    assert layers[0]["experts"] is None
    routed = [experts for record in layers if record["layer"] == 3 for experts in record["experts"]]
    assert routed == golden("tiny_s1")["router_idx_l3"].tolist()


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DriveError, match="trace"):
        TraceFile(tmp_path / "no" / "trace")
