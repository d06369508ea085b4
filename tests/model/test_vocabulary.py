"""Holds up that the files that give text a meaning are parsed or refused by name, whatever is in them."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from k3.base.errors import ConfigError
from k3.model.vocabulary import (
    SPECIAL_COUNT,
    complete_names,
    parse_eos_ids,
    parse_ranks,
    parse_special_names,
    parse_vocabulary,
)
from tests.support.engines import VECTORS

PATH = Path("/models/k3/file")
LINES = [f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256)]
NAMES = (VECTORS / "tiny_s0" / "tokenizer_config.json").read_bytes()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2796204\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([*LINES[:7], "not*base64 7\n", *LINES[8:]], "line 8"),
        ([*LINES[:7], LINES[8], *LINES[7:]], "line 8"),
        ([*LINES, LINES[3].replace(" 3", " 256")], "line 257"),
        ([*LINES, "YWI= x\n"], "line 257"),
        ([*LINES, "YWI=\n"], "line 257"),
        ([*LINES, "YWI= " + "9" * 5000 + "\n"], "line 257"),
        (LINES[:200], "single bytes"),
        ([], "single bytes"),
        ([POINTER.decode()], "git-lfs pointer"),
        (["<!DOCTYPE html>\n"], "web page"),
    ],
)
def test_broken_vocabularies_are_named(lines: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_ranks("".join(lines).encode(), PATH)
    assert caught.value.path == str(PATH)


@pytest.mark.parametrize("size", [511, 513, 4096])
def test_a_vocabulary_of_another_size_is_named(size: int) -> None:
    with pytest.raises(ConfigError, match=str(size)):
        parse_vocabulary("".join(LINES).encode(), PATH, NAMES, PATH, size)


def added(**entries: object) -> str:
    return json.dumps({"added_tokens_decoder": entries})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ("{}", "added_tokens_decoder"),
        (added(**{"255": {"content": "x"}}), "255"),
        (added(**{"512": {"content": "x"}}), "512"),
        (added(x={"content": "x"}), "'x'"),
        (added(**{"300": {}}), "300"),
        (added(**{"300": {"content": ["x"]}}), "300"),
        (added(**{"300": {"content": "x"}, "301": {"content": "x"}}), "two"),
        (added(**{"300": {"content": "<|reserved_token_356|>"}}), "300 and 356"),
        (added(**{"300": {"content": "x"}, "0300": {"content": "y"}}), "0300"),
        (added(**{"\u0663\u0660\u0660": {"content": "x"}}), "not a named id"),
        (added(**{"9" * 5000: {"content": "x"}}), "not a named id"),
        ('{"added_tokens_decoder": {"300": {"content": "\\ud800"}}}', "surrogate"),
        ('{"added_tokens_decoder": {"300": {"content": "x"}, "300": {"content": "y"}}}', "twice"),
        ('{"added_tokens_decoder": ' + "[" * 200_000, "nested too deeply"),
        ('{"model_max_length": ' + "9" * 5000 + "}", "thousands of digits"),
        (POINTER.decode(), "git-lfs pointer"),
    ],
)
def test_broken_special_names_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_special_names(text.encode(), PATH, 256)
    assert caught.value.path == str(PATH)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a": ' * 200_000, "nested too deeply"),
        ('{"eos_token_id": 1, "eos_token_id": 2}', "twice"),
        ('{"eos_token_id": "1"}', "not a token id"),
        ('{"eos_token_id": []}', "not a token id"),
        ('{"eos_token_id": [1, -1]}', "not a token id"),
        ('{"eos_token_id": true}', "not a token id"),
        ('{"eos_token_id": 1.0}', "not a token id"),
        ('{"eos_token_id": [1, 512]}', "outside the vocabulary"),
        ('{"eos_token_id": ' + "9" * 400 + "}", "not a token id"),
        ('{"\\ud800": 1}', "surrogate"),
        ('{"x": ' + "9" * 5000 + "}", "thousands of digits"),
        ("\x00", "JSON"),
    ],
)
def test_broken_generation_configurations_are_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse_eos_ids(text.encode(), PATH, 512)
    assert caught.value.path == str(PATH)
    assert len(str(caught.value)) < 1000


def test_what_ends_a_generation() -> None:
    assert parse_eos_ids(b'{"eos_token_id": 7}', PATH, 512) == (7,)
    assert parse_eos_ids(b'{"eos_token_id": [7, 9]}', PATH, None) == (7, 9)
    assert parse_eos_ids(b'{"max_length": 1048576}', PATH, 512) is None


def test_an_id_without_a_name_has_the_one_of_its_number() -> None:
    names, skipped = parse_special_names(NAMES, PATH, 256)
    assert len(names) == SPECIAL_COUNT
    assert (names[256], names[300]) == ("[BOS]", "<|reserved_token_300|>")
    assert 256 in skipped
    assert complete_names({}, 256)[511] == "<|reserved_token_511|>"


def test_mutated_files_are_taken_or_refused_by_name() -> None:
    dice = random.Random(9)
    good: list[tuple[bytes, Callable[[bytes], object]]] = [
        ("".join(LINES).encode(), lambda data: parse_ranks(data, PATH)),
        (NAMES, lambda data: parse_special_names(data, PATH, 256)),
        (b'{"max_length": 1048576, "eos_token_id": [1, 2]}', lambda data: parse_eos_ids(data, PATH, 512)),
    ]
    refused = 0
    for turn in range(600):
        text, parse = good[turn % len(good)]
        data = bytearray(text)
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(data))
            data[at : at + dice.randrange(0, 3)] = dice.randbytes(dice.randrange(0, 3))
        try:
            parse(bytes(data))
        except ConfigError:  # anything else fails the test
            refused += 1
    assert refused > 200
