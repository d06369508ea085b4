"""Holds up the configuration: nested and flat, both spellings, and no answer when there are two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3.base.errors import ConfigError
from k3.model.model_config import SPELLINGS, load_config, parse_config, text_config
from k3.verify.synthetic import synthetic_config
from k3.verify.synthetic.shape import SyntheticModel

PATH = Path("config.json")
NESTED = synthetic_config.config(SyntheticModel())
FLAT = {**{key: value for key, value in NESTED.items() if key != "text_config"}, **NESTED["text_config"]}


def test_nested_and_flat_give_the_same_text_model() -> None:
    nested, flat = text_config(NESTED, PATH), text_config(FLAT, PATH)
    assert nested["hidden_size"] == flat["hidden_size"] == 128
    assert {key: nested[key] for key in NESTED["text_config"]} == {key: flat[key] for key in NESTED["text_config"]}


def test_what_is_found_is_flat_and_leaves_the_file_as_it_was() -> None:
    before = repr(NESTED)
    config = text_config(NESTED, PATH)
    config["hidden_size"] = 0
    assert repr(NESTED) == before
    assert "text_config" not in config
    assert "vision_config" not in config
    assert config["model_type"] == "kimi_linear"
    assert config["linear_attn_config"] == NESTED["text_config"]["linear_attn_config"]
    assert config["quantization_config"] == NESTED["text_config"]["quantization_config"]


def test_keys_that_only_the_top_level_has_are_there_too() -> None:
    config = text_config(
        {"text_config": {"hidden_size": 8}, "bos_token_id": 7, "quantization_config": {"a": 1}}, PATH
    )
    assert config == {"hidden_size": 8, "bos_token_id": 7, "quantization_config": {"a": 1}}


def test_equal_values_at_both_levels_are_no_contradiction() -> None:
    raw = {"dtype": "bfloat16", "eos_token_id": 5, "text_config": {"dtype": "bfloat16", "eos_token_id": 5}}
    assert text_config(raw, PATH) == {"dtype": "bfloat16", "eos_token_id": 5}


def test_null_is_no_answer() -> None:
    assert text_config({"pad_token_id": 3, "text_config": {"pad_token_id": None}}, PATH) == {"pad_token_id": 3}
    assert text_config({"pad_token_id": None, "text_config": {"pad_token_id": 3}}, PATH) == {"pad_token_id": 3}
    assert text_config({"text_config": None, "hidden_size": 8}, PATH) == {"hidden_size": 8}


@pytest.mark.parametrize(("name", "other"), [(name, other) for name in SPELLINGS for other in SPELLINGS[name]])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "flat"])
def test_both_spellings_are_one_key(name: str, other: str, nested: bool) -> None:
    def config(**values: Any) -> dict[str, Any]:
        return text_config({"text_config": values} if nested else values, PATH)

    assert config(**{name: 4}) == config(**{other: 4}) == config(**{name: 4, other: 4}) == {name: 4}
    with pytest.raises(ConfigError) as caught:
        config(**{name: 4, other: 5})
    for part in (name, other, "4", "5"):
        assert part in caught.value.problem


@pytest.mark.parametrize(
    ("top", "below"),
    [(1, 2), (1, True), ([1, 2], [2, 1]), ({"a": 1}, {"a": 2}), ("bfloat16", "float32"), (0, False)],
)
def test_two_values_for_one_key_are_refused_naming_both(top: Any, below: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        text_config({"some_key": top, "text_config": {"some_key": below}}, PATH)
    assert caught.value.problem == f"text_config.some_key is {below!r} but some_key is {top!r}"
    assert caught.value.path == "config.json"


def test_a_contradiction_cannot_forge_a_message() -> None:
    with pytest.raises(ConfigError) as caught:
        text_config({"a\x1b[2J\n": 1, "text_config": {"a\x1b[2J\n": "\x1b" * 9999}}, PATH)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(synthetic_config.json_bytes(NESTED))
    assert load_config(path) == NESTED
    assert parse_config(path.read_bytes(), path) == NESTED
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "other.json")
