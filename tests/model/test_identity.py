"""Holds up the identity of a model: what means something changes it, what means nothing does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.errors import ConfigError
from k3.checkpoint.snapshot import Snapshot
from k3.model.identity import MEANINGLESS_KEYS, TEXT_FILES, ModelIdentity, config_identity, text_identity
from k3.model.model_config import SPELLINGS
from tests.support.engines import VECTORS

PATH = Path("config.json")
RAW: dict[str, Any] = json.loads((VECTORS / "tiny_s1" / "config.json").read_text())
GENERATION: dict[str, Any] = {"eos_token_id": [1, 2], "temperature": 1.0, "transformers_version": "5"}


def of(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    """Return the identity of a configuration that was written to a file and read."""
    return config_identity(
        json.loads(json.dumps(raw)), None if generation is None else json.dumps(generation).encode(), PATH
    )


def leaves(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """Return the place of every number, word, list element and empty list of a configuration."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = False
    for key, item in items:
        found = True
        yield from leaves(item, *path, key)
    if not found:
        yield path


def changed(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 + 1
    return f"{value}x" if isinstance(value, str) else "something"


def with_change(raw: dict[str, Any], place: tuple[Any, ...], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a copy with another value in one place."""
    copy: dict[str, Any] = json.loads(json.dumps(raw))
    target: Any = copy
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = change(target[place[-1]])
    return copy


FLAT = {**{key: value for key, value in RAW.items() if not key.endswith("_config")}, **RAW["text_config"]}
"""The same configuration as derived checkpoints write it."""

MEANT = [place for place in leaves(FLAT) if not MEANINGLESS_KEYS.intersection(place)]


def test_there_are_places() -> None:
    keys = {place[-1] for place in MEANT}
    assert {"num_experts_per_token", "rms_norm_eps", "activation_situ_beta", "gate_lower_bound"} <= keys
    assert len(MEANT) > 80


def test_every_change_of_a_value_changes_the_identity() -> None:
    names = [of(with_change(FLAT, place, changed)) for place in MEANT]
    assert of(FLAT) not in names
    assert len(set(names)) == len(MEANT)
    for key in set(FLAT) & MEANINGLESS_KEYS:
        assert of({**FLAT, key: "elsewhere"}) == of(FLAT)


def test_keys_that_come_or_go_change_it() -> None:
    for key in FLAT:
        less = {other: value for other, value in FLAT.items() if other != key}
        says_nothing = key in MEANINGLESS_KEYS or FLAT[key] is None
        assert (of(less) == of(FLAT)) == says_nothing, key
    assert of({**FLAT, "a_new_switch": False}) != of(FLAT)


def shuffled(value: Any, draw: Callable[[Any], Any]) -> Any:
    """Return the same configuration with the keys of each table in another order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key], draw) for key in draw(st.permutations(list(value)))}
    return value


@given(st.data())
def test_form_means_nothing(data: st.DataObject) -> None:
    text = json.dumps(
        shuffled(RAW, data.draw),
        indent=data.draw(st.sampled_from([None, 1, 4])),
        ensure_ascii=data.draw(st.booleans()),
    )
    raw = json.loads(text)
    for key in data.draw(st.lists(st.sampled_from(sorted(MEANINGLESS_KEYS)))):
        raw[key] = raw["text_config"][key] = data.draw(st.text(max_size=4))
    raw["text_config"][data.draw(st.sampled_from(["sliding_window", "unheard_of"]))] = None
    assert of(raw) == of(RAW)


def test_spellings_mean_the_same() -> None:
    assert of(FLAT) == of(RAW)
    table = dict(FLAT)
    table[SPELLINGS["num_experts_per_token"][0]] = table.pop("num_experts_per_token")
    assert of(table) == of(FLAT)
    assert of({**RAW, "vision_config": {"depth": 5}}) == of(RAW)  # of a part that is not in the container
    assert config_identity(json.loads('{"a": 1e-5}'), None, PATH) == of({"a": 0.00001})
    assert of({"a": 1}) == of({"a": 1.0}) != of({"a": True})


def test_generation_settings_count() -> None:
    assert of(RAW, GENERATION) != of(RAW)
    assert of(RAW, {**GENERATION, "eos_token_id": [1, 3]}) != of(RAW, GENERATION)
    assert of(RAW, {**GENERATION, "transformers_version": "6"}) == of(RAW, GENERATION)
    assert of(RAW, dict(reversed(GENERATION.items()))) == of(RAW, GENERATION)
    for data in (b"[]", b'{"a": 1, "a": 2}', b"{", b"[" * 100_000):
        with pytest.raises(ConfigError, match="generation settings") as caught:
            config_identity(RAW, data, PATH)
        assert caught.value.path == "generation_config.json"


def test_every_file_of_the_vocabulary_counts() -> None:
    all_of_them = dict.fromkeys(TEXT_FILES, "0" * 32)
    names = {text_identity(all_of_them), text_identity({})}
    for name in TEXT_FILES:
        names.add(text_identity({**all_of_them, name: "1" * 32}))
        names.add(text_identity({other: digest for other, digest in all_of_them.items() if other != name}))
    assert len(names) == 2 + 2 * len(TEXT_FILES)
    assert text_identity({**all_of_them, "README.md": "2" * 32}) == text_identity(all_of_them)


def test_differences_are_named() -> None:
    one, other = ModelIdentity("w", "c", "t"), ModelIdentity("w", "d", "t")
    assert one.differences(one) == ""
    assert one.differences(other) == "config c instead of d"


def test_a_snapshot_tells_its_parts_apart(tmp_path: Path) -> None:
    source = tmp_path / "snapshot"
    shutil.copytree(VECTORS / "tiny_s1", source)
    (source / "tiktoken.model").write_bytes(b"AA== 0\n")
    before = Snapshot.open([source]).identity
    (source / "tiktoken.model").write_bytes(b"AQ== 0\n")
    other_text = Snapshot.open([source]).identity
    assert (other_text.weights, other_text.config) == (before.weights, before.config)
    assert other_text.text != before.text
    (source / "config.json").write_text(json.dumps(with_change(RAW, ("text_config", "rms_norm_eps"), changed)))
    other_config = Snapshot.open([source]).identity
    assert (other_config.weights, other_config.text) == (before.weights, other_text.text)
    assert other_config.config != before.config
