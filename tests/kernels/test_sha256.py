"""Holds up: messages that are hashed side by side have the digests that hashlib gives each alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3 import kernels
from k3.kernels import Sha256, _kernels, sha256_update
from k3.kernels.sha256 import AT_ONCE
from tests.support.arrays import Array

WAYS = [(variant, False) for variant in kernels.cpu_variants()]
if _kernels.has_sha_instructions():
    WAYS.append((kernels.cpu_variant(), True))


@pytest.fixture(params=WAYS, ids=lambda way: way[0] + ("-sha" if way[1] else ""), autouse=True)
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.cpu_variant()
    variant, instructions = request.param
    kernels.set_variant(variant)
    _kernels.want_sha_instructions(instructions)
    yield
    kernels.set_variant(before)
    _kernels.want_sha_instructions(True)


def noise(nbytes: int, seed: int = 0) -> Array:
    return np.frombuffer(np.random.default_rng([nbytes, seed]).bytes(nbytes), np.uint8)


def wanted(data: Array) -> str:
    return hashlib.sha256(data.tobytes()).hexdigest()


def test_one_message_of_every_length() -> None:
    for nbytes in range(300):
        message = Sha256()
        sha256_update([message], [noise(nbytes)])
        assert message.hexdigest() == wanted(noise(nbytes))


def test_many_messages_of_every_length_and_alignment() -> None:
    store = noise(10_000)
    for shift in range(64):
        data = [
            store[shift + 3 * number : shift + 3 * number + length]
            for number, length in enumerate(range(0, 1200, 41))
        ]
        messages = [Sha256() for _ in data]
        sha256_update(messages, data)
        assert [message.hexdigest() for message in messages] == [wanted(part) for part in data]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, AT_ONCE])
def test_any_number_of_messages(count: int) -> None:
    data = [noise(640, seed) for seed in range(count)]
    messages = [Sha256() for _ in data]
    sha256_update(messages, data)
    assert [message.hexdigest() for message in messages] == [wanted(part) for part in data]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 11), st.integers(0, 700)), max_size=12, unique_by=lambda x: x[0]),
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_add_up(turns: list[list[tuple[int, int]]]) -> None:
    """Messages grow by pieces of any length, some of them in every call; a digest between changes nothing."""
    messages = [Sha256() for _ in range(12)]
    whole = [hashlib.sha256() for _ in messages]
    for turn, pieces in enumerate(turns):
        data = [noise(nbytes, turn) for _, nbytes in pieces]
        sha256_update([messages[number] for number, _ in pieces], data)
        for (number, _), part in zip(pieces, data, strict=True):
            whole[number].update(part.tobytes())
        assert [message.hexdigest() for message in messages] == [each.hexdigest() for each in whole]


def test_more_bytes_than_32_bits_of_length() -> None:
    """The length that ends a message counts bits: it passes 2**32 at half a gigabyte."""
    block = np.zeros(1 << 25, np.uint8)
    message, whole = Sha256(), hashlib.sha256()
    for _ in range(17):
        sha256_update([message], [block])
        whole.update(block.data)
    assert message.hexdigest() == whole.hexdigest()


def test_threads_hash_different_messages() -> None:
    data = [noise(100_000, seed) for seed in range(24)]

    def hashed(first: int) -> list[str]:
        own = [Sha256() for _ in range(6)]
        for start in range(0, 100_000, 9973):
            sha256_update(own, [part[start : start + 9973] for part in data[first : first + 6]])
        return [message.hexdigest() for message in own]

    with ThreadPoolExecutor(4) as pool:
        found = [digest for digests in pool.map(hashed, range(0, 24, 6)) for digest in digests]
    assert found == [wanted(part) for part in data]


@pytest.mark.parametrize(
    ("messages", "data"),
    [
        ([Sha256()], []),
        ([Sha256()] * 2, [noise(4)] * 2),
        ([Sha256() for _ in range(AT_ONCE + 1)], [noise(4)] * (AT_ONCE + 1)),
    ],
    ids=["unequal", "twice", "too-many"],
)
def test_what_is_refused(messages: list[Sha256], data: list[Array]) -> None:
    with pytest.raises(ValueError, match="message"):
        sha256_update(messages, data)


@pytest.mark.parametrize(
    "data", [noise(64)[::2], np.zeros(4, np.int8), np.zeros(4, np.float32)], ids=["strided", "int8", "float32"]
)
def test_other_arrays_are_refused(data: Array) -> None:
    with pytest.raises((TypeError, RuntimeError)):
        sha256_update([Sha256()], [data])
