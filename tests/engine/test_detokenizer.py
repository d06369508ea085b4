"""Holds up that streamed text is the decoded whole, and that no character is ever broken between tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.engine.definition.detokenizer import Detokenizer
from k3.engine.definition.tokenizer import Tokenizer
from k3.model.vocabulary import Vocabulary, complete_names, parse_ranks, parse_vocabulary
from tests.support.engines import VECTORS

CONFIG = VECTORS / "tiny_s0" / "tokenizer_config.json"


@pytest.fixture(scope="module")
def bytewise() -> Tokenizer:
    """Return a vocabulary of single bytes: any split of any text is a sequence of its tokens."""
    ranks = VECTORS / "tiny_s0" / "tiktoken.model"
    return Tokenizer(parse_vocabulary(ranks.read_bytes(), ranks, CONFIG.read_bytes(), CONFIG, 512))


@pytest.fixture(scope="module")
def merged() -> Tokenizer:
    path = VECTORS / "synthetic.tiktoken.model"
    ranks = parse_ranks(path.read_bytes(), path)
    return Tokenizer(Vocabulary(ranks, complete_names({}, len(ranks)), frozenset()))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_byte = {tokenizer.token_bytes(token): token for token in range(256)}
    return [by_byte[bytes([byte])] for byte in data]


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_a_text_in_single_bytes_comes_out_whole(bytewise: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(bytewise)
    pieces = [detokenizer.push(token) for token in byte_ids(bytewise, text.encode())]
    assert detokenizer.finish() == ""
    assert "".join(pieces) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_a_text_in_its_own_tokens_comes_out_whole(merged: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(merged)
    assert "".join(map(detokenizer.push, merged.encode(text))) + detokenizer.finish() == text


@given(st.lists(st.integers(0, 4095), max_size=40))
def test_any_ids_equal_decoding_at_once(merged: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(merged)
    pieces = [detokenizer.push(token) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == merged.decode(ids)


def test_a_syllable_and_an_emoji_over_two_tokens(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise)
    pieces = [detokenizer.push(token) for token in byte_ids(bytewise, "한😀".encode())]
    assert pieces == ["", "", "한", "", "", "", "😀"]


def test_an_end_inside_a_character_is_one_replacement(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise)
    assert [detokenizer.push(token) for token in byte_ids(bytewise, "é😀".encode()[:-1])] == ["", "é", "", "", ""]
    assert detokenizer.finish() == "�"
    assert detokenizer.finish() == ""
    assert detokenizer.push(byte_ids(bytewise, b"a")[0]) == "a"


def test_specials_are_named_or_skipped(bytewise: Tokenizer) -> None:
    ids = [*byte_ids(bytewise, b"hi"), bytewise.specials["<|open|>"], bytewise.specials["[EOS]"]]
    assert "".join(map(Detokenizer(bytewise).push, ids)) == "hi<|open|>[EOS]"
    skipping = Detokenizer(bytewise, skip_special=True)
    assert "".join(map(skipping.push, ids)) == "hi<|open|>"


def test_a_special_after_half_a_character(bytewise: Tokenizer) -> None:
    detokenizer = Detokenizer(bytewise)
    ids = [*byte_ids(bytewise, "한".encode()[:2]), bytewise.specials["[EOS]"]]
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == bytewise.decode(ids) == "�[EOS]"


def test_ids_outside_the_vocabulary(bytewise: Tokenizer) -> None:
    with pytest.raises(ValueError, match="outside"):
        Detokenizer(bytewise).push(512)
