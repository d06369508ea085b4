"""Holds up: a routing trace gives back what was written, and nothing that is not a whole sound trace is read."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from k3.base.errors import DriveError, K3Error, UnsupportedError, VersionError
from k3.engine.cli import main
from k3.engine.forward.moe import LatentMoe, Routing
from k3.store.routing.route_trace import (
    MAGIC,
    Choice,
    RoutedPass,
    RouteHeader,
    RouteTraceError,
    RouteTraceReader,
    RouteTraceWriter,
    TracedLayer,
    write_route_trace,
)
from k3.store.routing.simulate import simulate
from k3.store.routing.trace_requests import Requests
from tests.support.arrays import Array
from tests.support.engines import VECTORS

DOCUMENT = Path(__file__).parents[2] / "docs" / "route_trace.md"
HEADER = RouteHeader("example", 2, (TracedLayer(1, 4, 9792), TracedLayer(2, 4, 9792)))


def u16(*numbers: int) -> Array:
    return np.array(numbers, np.uint16)


def chosen(*tokens: list[int]) -> Choice:
    return Choice(u16(*map(len, tokens)), u16(*(expert for token in tokens for expert in token)))


PASSES = [
    RoutedPass(0, 2, (chosen([0, 3], [1]), chosen([1, 2], [0, 2]))),
    RoutedPass(2, 1, (chosen([1, 3]), chosen([0, 1]))),
]

Plain = list[tuple[int, int, list[list[list[int]]]]]


def plain(passes: list[RoutedPass]) -> Plain:
    return [(p.position, p.tokens, [choice.per_token() for choice in p.choices]) for p in passes]


def read(path: Path) -> Plain:
    with RouteTraceReader(path) as trace:
        return plain(list(trace))


def read_or_refusal(path: Path) -> Plain | K3Error:
    try:
        return read(path)
    except K3Error as error:
        return error


def content(path: Path) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())


def compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    write_route_trace(path, HEADER, PASSES)
    return path


def test_the_documents_example_byte_for_byte(path: Path) -> None:
    example = DOCUMENT.read_text().split("```")[1]
    wanted = bytearray()
    for line in example.strip().splitlines():
        hexadecimal = re.match(r"((?:[0-9a-f]{2} {1,2})*[0-9a-f]{2})(?: {3,}|$)", line)
        wanted += bytes.fromhex(hexadecimal[1]) if hexadecimal else line.encode()
    assert content(path) == bytes(wanted)


@st.composite
def traces(draw: st.DrawFn) -> tuple[RouteHeader, list[RoutedPass]]:
    numbers = draw(st.lists(st.integers(0, 200), min_size=1, max_size=4, unique=True))
    layers = tuple(
        TracedLayer(n, draw(st.integers(3, 65536)), draw(st.integers(1, 1 << 40))) for n in sorted(numbers)
    )
    header = RouteHeader(
        draw(st.text(min_size=1, max_size=20).filter(str.isprintable)), draw(st.integers(1, 3)), layers
    )
    passes = []
    for _ in range(draw(st.integers(0, 4))):
        tokens = draw(st.integers(1, 5))
        choices = []
        for entry in layers:
            ids = st.sets(st.integers(0, entry.experts - 1), min_size=1, max_size=header.top_k)
            choices.append(chosen(*(sorted(draw(ids)) for _ in range(tokens))))
        passes.append(RoutedPass(draw(st.integers(0, (1 << 64) - 1)), tokens, tuple(choices)))
    return header, passes


@settings(max_examples=60, deadline=None)
@given(traces())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, made: tuple[RouteHeader, list[RoutedPass]]) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    header, passes = made
    write_route_trace(path, header, passes)
    with RouteTraceReader(path) as trace:
        assert trace.header == header
        assert plain(list(trace)) == plain(passes)


def test_a_long_trace_is_small_and_whole(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    shape = RouteHeader("m", 16, tuple(TracedLayer(layer, 896, 1) for layer in range(1, 93)))
    counts = np.full(1, 16, np.uint16)
    passes = []
    for position in range(40):
        ids = np.argsort(random.random((92, 896)), axis=1)[:, :16].astype(np.uint16)
        passes.append(RoutedPass(position, 1, tuple(Choice(counts, np.sort(row)) for row in ids)))
    write_route_trace(tmp_path / "t", shape, passes)
    assert read(tmp_path / "t") == plain(passes)
    assert (tmp_path / "t").stat().st_size < 40 * 92 * 16 * 2


def test_every_truncation_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(RouteTraceError) as caught:
            read(path)
        assert caught.value.path == str(path)


def test_truncated_content_in_a_sound_frame_is_refused(path: Path) -> None:
    whole = content(path)
    for length in range(len(whole)):
        path.write_bytes(compressed(whole[:length]))
        with pytest.raises(RouteTraceError):
            read(path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_flipped_bit_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    write_route_trace(path, HEADER, PASSES)
    flipped = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(flipped) * 8 - 1))
    flipped[place // 8] ^= 1 << place % 8
    path.write_bytes(flipped)
    outcome = read_or_refusal(path)  # a few bits of a frame's own header mean nothing
    assert isinstance(outcome, RouteTraceError) or outcome == plain(PASSES)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_content_is_read_or_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Damage inside a frame whose checksum is right again, as a foreign or hostile program may write it."""
    path = tmp_path_factory.mktemp("trace") / "t"
    write_route_trace(path, HEADER, PASSES)
    changed = bytearray(content(path))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(compressed(bytes(changed)))
    outcome = read_or_refusal(path)
    if isinstance(outcome, K3Error):
        assert outcome.path == str(path)
        return
    for _, tokens, layers in outcome:
        for per_token in layers:
            assert len(per_token) == tokens
            assert all(token == sorted(set(token)) and len(token) >= 1 for token in per_token)


def with_header(path: Path, change: dict[str, object]) -> None:
    header = {**json.loads(HEADER.to_json()), **change}
    text = json.dumps(header).encode()
    body = content(path)[16 + len(HEADER.to_json()) :]
    path.write_bytes(compressed(struct.pack("<8sII", MAGIC, 1, len(text)) + text + body))


@pytest.mark.parametrize(
    "change",
    [
        {"model": 1},
        {"top_k": 0},
        {"top_k": 5},
        {"top_k": True},
        {"layers": []},
        {"layers": 3},
        {"layers": [3]},
        {"layers": [{"layer": 1, "experts": 4}]},
        {
            "layers": [
                {"layer": 2, "experts": 4, "payload_bytes": 1},
                {"layer": 1, "experts": 4, "payload_bytes": 1},
            ]
        },
        {"layers": [{"layer": 1, "experts": 65537, "payload_bytes": 1}]},
        {"layers": [{"layer": -1, "experts": 4, "payload_bytes": 1}]},
        {"layers": [{"layer": 1, "experts": 4, "payload_bytes": 0}]},
        {"layers": [{"layer": 1, "experts": 4, "payload_bytes": (1 << 40) + 1}]},
        {"layers": [{"layer": 1 << 16, "experts": 4, "payload_bytes": 1}]},
        {"layers": [{"layer": 10**400, "experts": 4, "payload_bytes": 1}]},
        {"layers": [{"layer": 1, "experts": 4, "payload_bytes": 10**400}]},
        {"top_k": 10**400},
        {"model": "x" * 100_000},
        {"model": "\x1b[2J"},
        {"model": "\ud800"},
    ],
)
def test_headers_that_make_no_sense(path: Path, change: dict[str, object]) -> None:
    with_header(path, change)
    with pytest.raises(RouteTraceError, match=r"header is not sound|half of a surrogate pair"):
        RouteTraceReader(path)


def test_unknown_keys_are_ignored(path: Path) -> None:
    with_header(path, {"remark": "from a later writer"})
    assert read(path) == plain(PASSES)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a routing trace"),
        (b'{"type": "layer"}\n', "not a routing trace"),
        (compressed(b""), "not a routing trace"),
        (compressed(MAGIC), "not a routing trace"),
        (compressed(b"something else altogether, but compressed"), "not a routing trace"),
        (compressed(struct.pack("<8sII", MAGIC, 0, 2) + b"{}"), "version 0"),
        (compressed(struct.pack("<8sII", MAGIC, 1, 1 << 21) + bytes(1 << 21)), "header of 2097152"),
        (compressed(struct.pack("<8sII", MAGIC, 1, 3) + b"\xff{}"), "header is not UTF-8"),
        (compressed(struct.pack("<8sII", MAGIC, 1, 90000) + b"[" * 90000), "header is nested too deeply"),
    ],
)
def test_foreign_files(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "foreign").write_bytes(data)
    with pytest.raises(RouteTraceError, match=problem) as caught:
        RouteTraceReader(tmp_path / "foreign")
    assert caught.value.path == str(tmp_path / "foreign")
    assert caught.value.exit_code == (2 if problem == "not a routing trace" else 1)


def test_a_newer_version(path: Path) -> None:
    path.write_bytes(compressed(struct.pack("<8sII", MAGIC, 2, 2) + b"{}"))
    with pytest.raises(VersionError, match="version 2"):
        RouteTraceReader(path)


@pytest.mark.parametrize("more", [b"\0", b"more", compressed(b"more"), b"\x50\x2a\x4d\x18\0\0\0\0"])
def test_nothing_may_follow(path: Path, more: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + more)
    with pytest.raises(RouteTraceError, match="follows its end"):
        read(path)
    path.write_bytes(compressed(content_of(whole) + more))
    with pytest.raises(RouteTraceError, match="follows its end"):
        read(path)


def content_of(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(frame)


def test_a_hostile_frame_is_not_inflated_as_a_whole(tmp_path: Path) -> None:
    """A gigabyte of zeros in a few KiB: refused at its first bytes."""
    import tracemalloc

    frame = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(1 << 24)
    data = b"".join(frame.compress(zeros) for _ in range(64)) + frame.flush()
    (tmp_path / "bomb").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(RouteTraceError, match="not a routing trace"):
            RouteTraceReader(tmp_path / "bomb")
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero")
    if kind == "pipe":
        path = tmp_path / "pipe"
        os.mkfifo(path)
    with pytest.raises(UnsupportedError, match="read from a regular file"):
        RouteTraceReader(path)


def test_the_largest_experts_are_added_up_without_end(tmp_path: Path) -> None:
    header = RouteHeader("m", 1, (TracedLayer(65535, 1 << 16, 1 << 40),))
    passes = [RoutedPass(0, 1 << 16, (Choice(u16(*[1] * (1 << 16)), np.arange(1 << 16, dtype=np.uint16)),))] * 130
    result = simulate(Requests.from_passes(header, passes), "belady", 1)
    assert result.bytes_read == result.misses << 40
    assert result.bytes_read > 1 << 63


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DriveError, match="cannot read the routing trace"):
        RouteTraceReader(tmp_path / "missing")


# Writing


def test_nothing_is_there_before_it_is_published(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("what was there before")
    with RouteTraceWriter(path, HEADER) as writer:
        writer.add(1, u16(1), u16(2))
        writer.add(2, u16(1), u16(2))
        writer.end_pass(0)
    assert path.read_text() == "what was there before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace"]
    with pytest.raises(DriveError, match="cannot write the routing trace"):
        RouteTraceWriter(tmp_path / "no" / "trace", HEADER)


@pytest.mark.parametrize(
    ("layer", "counts", "ids"),
    [
        (2, u16(1), u16(0)),  # the wrong layer
        (1, u16(1), u16(4)),  # no such expert
        (1, u16(3), u16(0, 1, 2)),  # more than top_k
        (1, u16(0, 1), u16(1)),  # a token without any
        (1, u16(2), u16(0)),  # too few ids
        (1, u16(2), u16(1, 1)),  # twice the same
        (1, u16(2), u16(1, 0)),  # descending
        (1, u16(), u16()),  # no tokens
        (1, np.array([1]), np.array([-1])),
        (1, np.array([1]), np.array([65536])),
    ],
)
def test_what_the_format_cannot_say_is_not_written(tmp_path: Path, layer: int, counts: Array, ids: Array) -> None:
    with RouteTraceWriter(tmp_path / "trace", HEADER) as writer, pytest.raises(ValueError):  # noqa: PT011
        writer.add(layer, counts, ids)


def test_passes_must_be_whole(tmp_path: Path) -> None:
    with RouteTraceWriter(tmp_path / "trace", HEADER) as writer:
        writer.add(1, u16(1), u16(2))
        with pytest.raises(ValueError, match="different numbers of tokens"):
            writer.add(2, u16(1, 1), u16(2, 3))
        with pytest.raises(ValueError, match="1 of 2 layers"):
            writer.end_pass(0)
        writer.publish()
    assert read(tmp_path / "trace") == []


def test_a_torn_trace_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(data: bytes, *, last: bool = False) -> None:
        raise KeyboardInterrupt

    with RouteTraceWriter(tmp_path / "trace", HEADER) as writer:
        writer.add(1, u16(1), u16(2))
        writer.add(2, u16(1), u16(2))
        monkeypatch.setattr(writer, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.end_pass(0)
        monkeypatch.undo()
        assert writer.torn
        with pytest.raises(ValueError, match="torn"):
            writer.publish()
    assert not (tmp_path / "trace").exists()


# k3-run --route-trace

TINY = ["--snapshot", str(VECTORS / "tiny_s1"), "--ngen", "7", "--ignore-eos"]


@pytest.mark.parametrize("more", [[], ["--topp", "0.6"], ["--layers", "1-3"]])
def test_k3_run_writes_what_its_other_trace_says(tmp_path: Path, more: list[str]) -> None:
    files = ["--route-trace", str(tmp_path / "routes"), "--trace", str(tmp_path / "lines")]
    result = CliRunner().invoke(main, [*TINY, *more, *files, "--chunk", "5", "Hello, world"])
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    layers = [line for line in lines if line["type"] == "layer" and line["mlp"] == "moe"]
    with RouteTraceReader(tmp_path / "routes") as trace:
        routed = list(trace)
        assert [entry.layer for entry in trace.header.layers] == sorted({line["layer"] for line in layers})
        assert (trace.header.top_k, trace.header.model[:9]) == (4, "snapshot:")
        assert {entry.experts for entry in trace.header.layers} == {16}
    assert [per_token for p in plain(routed) for per_token in p[2]] == [line["experts"] for line in layers]
    passes = [line for line in lines if line["type"] == "pass"]
    assert [(p.position, p.tokens) for p in routed] == [(line["position"], line["tokens"]) for line in passes]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["lines", "routes"]


def test_k3_run_computes_the_same_with_and_without(tmp_path: Path) -> None:
    runs = []
    for number, more in enumerate(([], ["--route-trace", str(tmp_path / "routes")])):
        logits = tmp_path / f"logits{number}"
        CliRunner().invoke(main, [*TINY, *more, "--logits", str(logits), "Hello"], catch_exceptions=False)
        runs.append(logits.read_bytes())
    assert runs[0] == runs[1]


def test_k3_run_takes_the_name_from_the_environment(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*TINY, "Hello"], env={"K3_ROUTE_TRACE": str(tmp_path / "routes")})
    assert result.exit_code == 0
    assert len(read(tmp_path / "routes")) == 7


def test_k3_run_refuses_a_trace_of_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*TINY, "--layers", "1", "--route-trace", str(tmp_path / "routes"), "Hello"])
    assert (result.exit_code, "no layer of this run" in result.stderr) == (2, True)


def test_k3_run_refuses_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [*TINY, "--route-trace", str(tmp_path / "no" / "routes"), "Hello"])
    assert (result.exit_code, "cannot write the routing trace" in result.stderr) == (6, True)


@pytest.mark.parametrize(
    ("error", "exit_code", "kept"), [(KeyboardInterrupt, 130, 3), (DriveError("gone"), 6, None)]
)
def test_k3_run_keeps_whole_passes_when_interrupted_and_nothing_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int, kept: int | None
) -> None:
    plain_call, calls = LatentMoe.__call__, 0

    def failing(self: LatentMoe, x: Array, on_request: Callable[[Routing], None]) -> Array:
        nonlocal calls
        calls += 1
        if calls == 3 * 4 + 2:  # in the second of four layers with experts of the fourth pass
            raise error
        return plain_call(self, x, on_request)

    monkeypatch.setattr(LatentMoe, "__call__", failing)
    path = tmp_path / "routes"
    result = CliRunner().invoke(main, [*TINY, "--route-trace", str(path), "Hello"])
    assert result.exit_code == exit_code
    assert (len(read(path)) if path.exists() else None) == kept
    assert len(list(tmp_path.iterdir())) == (kept is not None)
