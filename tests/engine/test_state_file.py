"""Holds up that a state file brings back every bit, and that nothing but the file that was written is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base.checksum import digest
from k3.base.errors import DamageError, DriveError, K3Error, ResumeError, UnsupportedError, VersionError
from k3.engine.definition.state_size import kda_bytes
from k3.engine.forward.state import State, state_tensors
from k3.engine.run import state_file
from k3.engine.run.session import Session
from k3.engine.run.state_file import (
    NUMERICS,
    Binding,
    NotAStateError,
    PromptForm,
    SavedState,
    StateLayout,
    write_state,
)
from k3.model.architecture import KdaConfig, MlaConfig, ModelConfig
from k3.model.keys import ExpertKey
from tests.support.engines import all_logits, golden, loaded, snapshot
from tests.support.faults import FaultySource

IDS = golden("tiny_s1")["input_ids"].tolist()
SUMS = {False: "b972537dc8475f9709bfb961cdce8d8f", True: "8ff6b6a328c5653c20b98fcd35e4c00f"}
"""Of all states and logits after the golden prompt with int8 weights, without and with --exact."""

BINDING = Binding("0000-model", "c0", "7e", "1", "0-2", "false", "1e-06", "1.0", "F32")
RAW = ModelConfig.from_raw(snapshot().config, Path("config.json"))


def small_config(heads: int = 1, width: int = 2, taps: int = 2, latent: int = 3, rope: int = 1) -> ModelConfig:
    return replace(
        RAW, vocab=5, layer_count=3, layers=range(3), kda_layers=frozenset({0, 2}),
        kda=KdaConfig(heads, width, taps, -5.0), mla=MlaConfig(heads, 2, latent, 1, rope, 1),
    )  # fmt: skip


def filled(config: ModelConfig, capacity: int, taken: int, dice: np.random.Generator) -> State:
    """Return a state of random bits: any float32 there is, NaNs and subnormal ones too."""
    state = State(config, capacity)
    for tensor in state_tensors(config, taken):
        bits = dice.integers(0, 1 << 32, tensor.shape, dtype=np.uint32)
        state.layers[tensor.layer].put_rows(tensor.name, 0, bits.view(np.float32))
    state.position = taken
    return state


def rows_of(state: State, config: ModelConfig) -> list[bytes]:
    return [
        state.layers[tensor.layer].rows(tensor.name, 0, tensor.shape[0]).tobytes()
        for tensor in state_tensors(config, state.position)
    ]


@settings(deadline=None, max_examples=60)
@given(
    st.builds(
        small_config, st.integers(1, 3), st.integers(1, 5), st.integers(2, 4), st.integers(1, 40),
        st.integers(1, 9),
    ),
    st.integers(1, 40), st.integers(0, 3), st.integers(0, 50), st.integers(0, 2**32), st.integers(1, 5000),
)  # fmt: skip
def test_any_state_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    config: ModelConfig, taken: int, later: int, room: int, seed: int, block_bytes: int,
) -> None:  # fmt: skip
    """Also into a session of another capacity, and in blocks of any size."""
    dice = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("state") / "state"
    state = filled(config, taken + room, taken, dice)
    tokens = dice.integers(0, 5, taken + later).tolist()
    logits = dice.integers(0, 1 << 32, 5, dtype=np.uint32).view(np.float32)
    before, state_file.BLOCK_BYTES = state_file.BLOCK_BYTES, block_bytes
    try:
        write_state(path, state, config, BINDING, tokens, logits, "text")
        again = State(config, taken + 3)
        with SavedState(path, BINDING, config) as saved:
            assert (saved.tokens, saved.taken, saved.prompt) == (tuple(tokens), taken, "text")
            assert saved.restore(again).tobytes() == logits.tobytes()
    finally:
        state_file.BLOCK_BYTES = before
    assert again.position == taken
    assert rows_of(again, config) == rows_of(state, config)
    first = path.read_bytes()
    write_state(path, again, config, BINDING, tokens, logits, "text")
    assert path.read_bytes() == first
    assert [file.name for file in path.parent.iterdir()] == ["state"]


@pytest.mark.parametrize("exact", [True, False])
def test_resumed_at_any_place_the_logits_are_the_same(exact: bool, tmp_path: Path) -> None:
    with loaded(snapshot(bits=16 if exact else 8), exact=exact) as model:
        wanted = all_logits(model, np.array(IDS), 24)
        begun = Session(model, 24, 5)
        for split in range(1, 24):
            begun.prefill(IDS[split - 1 : split])
            begun.save(tmp_path / "state", later=IDS[split : split + 2])
            resumed = Session(model, 24 + split, 7)
            assert resumed.load(tmp_path / "state") == tuple(IDS[split : split + 2])
            assert (resumed.ids, resumed.position) == (tuple(IDS[:split]), split)
            assert resumed.logits is not None
            assert resumed.logits.tobytes() == wanted[split - 1].tobytes()
            rows = [resumed.prefill([token]) for token in IDS[split:]]
            assert np.array(rows).tobytes() == wanted[split:].tobytes()


def test_another_process_loads_the_same(tmp_path: Path) -> None:
    """Nothing of a state is bound to the objects that it was saved from."""
    with loaded(snapshot()) as model:
        session = Session(model, 10, 10)
        row = session.prefill(IDS[:9])
        session.save(tmp_path / "state")
        wanted = session.step(IDS[9])
    with loaded(snapshot(), cache_bytes=0) as model:
        session = Session(model, 99, 1)
        session.load(tmp_path / "state")
        assert session.logits is not None
        assert session.logits.tobytes() == row.tobytes()
        assert session.step(IDS[9]).tobytes() == wanted.tobytes()


def test_what_a_session_refuses(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with loaded(snapshot()) as model:
        session = Session(model, 8, 8)
        with pytest.raises(ValueError, match="nothing to save"):
            session.save(path)
        session.prefill(IDS[:6])
        with pytest.raises(ValueError, match="outside the vocabulary"):
            session.save(path, later=[512])
        assert not path.exists()
        session.save(path)
        with pytest.raises(ValueError, match="before its first token"):
            session.load(path)
        small = Session(model, 5, 8)
        with pytest.raises(UnsupportedError, match="6 tokens after 0 exceed the context of 5"):
            small.load(path)
        assert small.prefill(IDS[:5]).shape == (512,)  # nothing had been touched
        with pytest.raises(DriveError, match="cannot write the state"):
            session.save(tmp_path / "no" / "state")


def test_a_broken_session_saves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state"
    fault = DriveError("cannot read", path="shard", layer=2, expert=7, offset=4096)
    failures: dict[ExpertKey, K3Error] = {}
    with loaded(snapshot(), wrap=lambda experts: FaultySource(experts, failures=failures)) as model:
        session = Session(model, 24, 24)
        session.prefill(IDS[:4])
        session.save(path)
        before = path.read_bytes()
        model.layers[2].mlp._source._failures.update({ExpertKey(2, e): fault for e in range(16)})  # type: ignore[union-attr]
        with pytest.raises(DriveError):
            session.prefill(IDS[4:])
        assert session.broken
        with pytest.raises(ValueError, match="cannot continue"):
            session.save(path)
        assert path.read_bytes() == before


# --- files that are not what was written ---


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return small_config()


@pytest.fixture(scope="module")
def sound(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "state"
    state = filled(config, 4, 3, np.random.default_rng(1))
    write_state(path, state, config, BINDING, [3, 1, 4, 2], np.arange(5, dtype=np.float32), "ids")
    return path.read_bytes()


@pytest.fixture
def load(config: ModelConfig, tmp_path: Path) -> Callable[[bytes], None]:
    def load_bytes(data: bytes) -> None:
        path = tmp_path / "state"
        path.write_bytes(data)
        with SavedState(path, BINDING, config) as saved:
            saved.restore(State(config, 4))

    return load_bytes


def test_every_flip_is_found_and_located(load: Callable[[bytes], None], sound: bytes, config: ModelConfig) -> None:
    load(sound)
    layout = StateLayout.of(BINDING, config, 4, 3, "ids")
    dice = np.random.default_rng(2)
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 1 << dice.integers(0, 8)
        with pytest.raises(DamageError) as caught:
            load(bytes(damaged))
        assert caught.value.path is not None
        for section in layout.sections:
            if layout.start(section) <= place < layout.start(section) + section.stored_bytes:
                assert caught.value.tensor == section.name
                assert caught.value.offset == layout.start(section)


def test_every_cut_and_every_addition_is_found(load: Callable[[bytes], None], sound: bytes) -> None:
    for length in range(len(sound)):
        with pytest.raises(DamageError):
            load(sound[:length])
    for more in (1, 16, 64, 4096):
        with pytest.raises(DamageError):
            load(sound + bytes(more))


def with_header(sound: bytes, change: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    """Return the file with another header, under a digest that is right."""
    length = int.from_bytes(sound[:8], "little")
    fields = json.loads(sound[8 : 8 + length])
    change(fields)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    header = len(text).to_bytes(8, "little") + text
    return header + sound[8 + length : -16] + digest(header)


def test_a_later_version_is_told_from_damage(load: Callable[[bytes], None], sound: bytes) -> None:
    load(with_header(sound, lambda fields: None))
    with pytest.raises(VersionError, match=r"version 3, this program knows versions up to 2.*Delete it"):
        load(with_header(sound, lambda fields: fields["__metadata__"].update(version="3", new="thing")))


@pytest.mark.parametrize("key", list(asdict(BINDING)))
def test_another_binding_is_refused_with_both_values(
    key: str, load: Callable[[bytes], None], sound: bytes
) -> None:
    with pytest.raises(ResumeError, match=rf"{key} other \(here {BINDING.metadata('ids')[key]}\)") as caught:
        load(with_header(sound, lambda fields: fields["__metadata__"].update({key: "other"})))
    assert caught.value.exit_code == 8
    with pytest.raises(ResumeError, match=f"{key} missing"):
        load(with_header(sound, lambda fields: fields["__metadata__"].pop(key)))


def test_the_first_version_is_refused_because_it_does_not_say_enough(
    load: Callable[[bytes], None], sound: bytes
) -> None:
    def as_it_was(fields: dict[str, dict[str, object]]) -> None:
        fields["__metadata__"].update(version="1")
        del fields["__metadata__"]["config"], fields["__metadata__"]["text"]

    with pytest.raises(ResumeError, match="version 1, which does not say which configuration"):
        load(with_header(sound, as_it_was))


def test_the_vocabulary_binds_a_timeline_of_text_only(config: ModelConfig, tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "state", replace(BINDING, text="other")
    forms: tuple[PromptForm, ...] = ("text", "ids")
    for form in forms:
        state = filled(config, 4, 3, np.random.default_rng(1))
        write_state(path, state, config, BINDING, [3, 1, 4, 2], np.arange(5, dtype=np.float32), form)
        with SavedState(path, BINDING, config) as saved:
            assert saved.prompt == form
        if form == "ids":
            SavedState(path, elsewhere, config).close()
            continue
        with pytest.raises(ResumeError, match=rf"text {BINDING.text} \(here other\)"):
            SavedState(path, elsewhere, config)


HOSTILE: list[Callable[[dict[str, dict[str, object]]], object]] = [
    lambda f: f["__metadata__"].update(taken="4"),
    lambda f: f["__metadata__"].update(taken="9999999999"),
    lambda f: f["__metadata__"].update(taken="0"),
    lambda f: f["__metadata__"].update(taken="-1"),
    lambda f: f["__metadata__"].update(taken="٣"),
    lambda f: f["__metadata__"].update(prompt="song"),
    lambda f: f["__metadata__"].update(version="0"),
    lambda f: f["__metadata__"].update(version="x"),
    lambda f: f["__metadata__"].update(format="k3-container"),
    lambda f: f["__metadata__"].update(more="words"),
    lambda f: f.clear(),
    lambda f: f["tokens"].update(shape=[1 << 40]),
    lambda f: f["tokens"].update(shape=[2, 2]),
    lambda f: f["tokens"].update(dtype="F32"),
    lambda f: f["logits"].update(shape=[5, 1]),
    lambda f: f["layers.0.memory"].update(shape=[4, 1, 1]),
    lambda f: f["layers.1.rows"].update(shape=[4, 3]),
    lambda f: f["digests"].update(shape=[16, 8]),
    lambda f: f.update(renamed=f.pop("layers.2.windows")),
    lambda f: f.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_header_that_lies_under_a_right_digest(number: int, load: Callable[[bytes], None], sound: bytes) -> None:
    with pytest.raises(DamageError):
        load(with_header(sound, HOSTILE[number]))


FOREIGN = [
    b"hello", b"x" * 700, b"GGUF" + bytes(999), b"{}" * 99, bytes(5000), b"\xff" * 5000,
    b"\x08" + bytes(7) + b'{"a":1} ', b"\x20" + bytes(7) + b'{"__metadata__":{"format":"pt"}} ' + bytes(99),
]  # fmt: skip


@pytest.mark.parametrize("data", FOREIGN)
def test_a_file_of_another_kind_is_no_damaged_state(load: Callable[[bytes], None], data: bytes) -> None:
    with pytest.raises(NotAStateError, match="no saved state") as caught:
        load(data)
    assert caught.value.exit_code == 2
    assert "elete" not in str(caught.value)


def test_a_state_that_was_cut_or_changed_is_damage(load: Callable[[bytes], None], sound: bytes) -> None:
    for length in (0, 1, 8, 20, 100, 511, 512, len(sound) - 1):
        with pytest.raises(DamageError) as caught:
            load(sound[:length])
        assert caught.value.exit_code == 1, length
    for place in range(512):
        with pytest.raises(DamageError) as caught:
            load(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert caught.value.exit_code == 1, place


def test_tokens_outside_the_vocabulary_are_refused(config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = filled(config, 4, 3, np.random.default_rng(1))
    for bad in (5, -1):
        write_state(path, state, config, BINDING, [3, bad, 4], np.zeros(5, np.float32), "ids")
        with pytest.raises(DamageError, match=f"token id {bad} at place 1"):
            SavedState(path, BINDING, config)


@pytest.mark.parametrize("exact", [True, False])
def test_the_numbers_are_those_of_this_version(exact: bool) -> None:
    """Red when the arithmetic has changed: a state saved before would go on with tokens that nobody computes.

    Raise `state_file.NUMERICS` if such files can be about, and write what is found into the table.
    """
    with loaded(snapshot(bits=8), exact=exact) as model:
        session = Session(model, 24, 24)
        row = session.prefill(IDS)
    found = digest(b"".join([*rows_of(session.state, model.config), row.tobytes()])).hex()
    assert (NUMERICS, found) == (1, SUMS[exact])


def test_memory_and_cache_are_in_the_file_once(tmp_path: Path) -> None:
    """The file has the rows that are filled, not the room that was reserved."""
    with loaded(snapshot()) as model:
        session = Session(model, 5000, 8)
        session.prefill(IDS[:8])
        session.save(tmp_path / "state")
        memory_bytes = sum(kda_bytes(model.config) for layer in model.config.layers if layer < 3)
        rows_bytes = 2 * 8 * 4 * (model.config.mla.latent + model.config.mla.rope)
        assert 0 <= (tmp_path / "state").stat().st_size - memory_bytes - rows_bytes - 4 * 512 < 4096
