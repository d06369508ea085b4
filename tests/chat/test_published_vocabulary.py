"""Holds up that the published vocabulary gives the makers' ids, where the package that holds it is installed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from k3.engine.chat.encoder import chat_prompt, prompt_ids
from k3.engine.definition.tokenizer import Tokenizer
from k3.model.vocabulary import parse_ranks
from tests.support.chat import CASES, rank_lines, request_of, tokenizer_of

PUBLISHED_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
RANK_COUNT = 163_584


@pytest.fixture(scope="module")
def published() -> tuple[bytes, Tokenizer]:
    """Return the published tiktoken.model, rebuilt in memory, and its tokenizer."""
    splintr: Any = pytest.importorskip("splintr", reason="splintr-rs, of the extra dev, holds the vocabulary")
    source = splintr.Tokenizer.from_pretrained("kimi_k3")
    data = rank_lines([bytes(source.decode_token_bytes(rank)) for rank in range(RANK_COUNT)])
    return data, tokenizer_of(parse_ranks(data, Path("tiktoken.model")))


def test_the_file_is_the_published_one(published: tuple[bytes, Tokenizer]) -> None:
    data, tokenizer = published
    assert len(data) == 2_795_286
    assert hashlib.sha256(data).hexdigest() == PUBLISHED_SHA256
    assert (tokenizer.rank_count, tokenizer.vocab_size) == (RANK_COUNT, 163_840)
    assert tokenizer.specials["<|end_of_msg|>"] == 163_586


def test_golden_ids(published: tuple[bytes, Tokenizer]) -> None:
    _, tokenizer = published
    compared = 0
    for case in CASES:
        if "error" not in case:
            ids = prompt_ids(chat_prompt(request_of(case)), tokenizer)
            assert ids == case["ids_real"], case["name"]
            assert tokenizer.decode(ids) == case["text"]
            compared += 1
    assert compared == 74


def test_no_token_holds_more_than_256_bytes(published: tuple[bytes, Tokenizer]) -> None:
    _, tokenizer = published
    pieces = [tokenizer.token_bytes(token) for token in range(RANK_COUNT)]
    assert max(map(len, pieces)) == 256
    assert sum(1 for piece in pieces if not _is_utf8(piece)) == 1172


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True
