"""Holds up: no kernel reads or writes outside its arrays, or does what C++ leaves undefined, with any variant.

Calls of the kernels are recorded here, with all bytes that they were given and left behind, and made again by
`replay.cpp`: the kernels alone, built with the address and undefined behaviour sanitizers for the variants that
this CPU can run. The results must be the same bytes. The build stays in build/sanitize, so that only what changed
is compiled again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest

from k3 import kernels
from k3.kernels import ExpertMatrix, NonFiniteError, ReservedScaleError, _kernels, reference
from tests.support.arrays import Array

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitize"

RECORDED = (
    "absorb_query", "decode", "elementwise", "expand_value", "expert_forward", "first_difference", "gated",
    "kda_heads", "latent_attention", "matmul", "quantize_int4", "quantize_int8", "residual_mix", "rms_norm",
    "situ", "softmax", "top_k",
)  # fmt: skip
"""What reads and writes at computed places; the others are threads, variants, cgroup files and ceilings."""

EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 257)
"""Around the sizes of registers, tiles and groups."""


class Recorder:
    """Writes every call of a native function to a file, in the form that replay.cpp describes."""

    def __init__(self, file: BinaryIO, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = file
        self.counts = dict.fromkeys(RECORDED, 0)
        for name in RECORDED:
            monkeypatch.setattr(_kernels, name, self._recording(name, getattr(_kernels, name)))

    def _recording(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before = [bytes(item) for item in _arrays(arguments)]
            result = original(*arguments)
            self._file.write(f"call {name} {returned(result)}\n".encode())
            self._write(arguments, iter(before))
            self._file.write(b"end\n")
            self.counts[name] += 1
            return result

        return call

    def hashes(self, messages: list[bytes]) -> None:
        """Write a call that is none of the bindings': messages, and the digests that they have."""
        arrays = [np.frombuffer(message, np.uint8) for message in messages]
        digests = np.frombuffer(b"".join(hashlib.sha256(message).digest() for message in messages), np.uint8)
        self._file.write(b"call sha256 -\n")
        before = [*map(bytes, messages), bytes(len(digests))]
        self._write((arrays, digests), iter(before))
        self._file.write(b"end\n")

    def _write(self, arguments: Any, before: Any) -> None:
        for item in arguments:
            if isinstance(item, np.ndarray):
                self._line("array", item.dtype, *item.shape)
                self._file.write(next(before) + item.tobytes())
            elif isinstance(item, list | tuple):
                self._line("number", len(item))
                self._write(item, before)
            elif isinstance(item, str):
                self._line("text", item)
            elif isinstance(item, float):
                self._line("real", float(np.float32(item)))
            else:
                self._line("none") if item is None else self._line("number", int(item))

    def _line(self, *words: object) -> None:
        self._file.write((" ".join(map(str, words)) + "\n").encode())


def _arrays(arguments: Any) -> list[Array]:
    found = []
    for item in arguments:
        if isinstance(item, np.ndarray):
            found.append(item)
        elif isinstance(item, list | tuple):
            found += _arrays(item)
    return found


def returned(result: Any) -> str:
    """- for None; numbers and names with commas between, without the value that is not finite."""
    if result is None:
        return "-"
    if isinstance(result, int):
        return str(result)
    return ",".join(str(part) for part in result if not isinstance(part, float))


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32)


def bf16(w: Array) -> Array:
    return (w.view(np.uint32) >> 16).astype(np.uint16)


def encoded(encoding: str, w: Array) -> SimpleNamespace:
    data, scales = w, None
    if encoding == "raw":
        data = bf16(w)
    elif encoding == "half":
        encoding, data = "raw", w.astype(np.float16)
    elif encoding in ("int8", "int4"):
        data, scales = (reference.quantize_int8 if encoding == "int8" else reference.quantize_int4)(w)
        data[0, 0] = 0x80 if encoding == "int8" else 0  # the lowest; not written by us, but a byte
    return SimpleNamespace(encoding=encoding, shape=w.shape, data=data, scales=scales)


def quantizers(rng: np.random.Generator) -> None:
    for columns, rows in itertools.product(EDGES, (1, 3, 9)):
        w = normal(rng, rows, columns)
        for rows_of_w in (w, bf16(w), w.astype(np.float16)):
            kernels.dequantize_int8(*kernels.quantize_int8(rows_of_w))
            kernels.dequantize_int4(*kernels.quantize_int4(rows_of_w), columns)
        kernels.widen_bf16(bf16(w))
        kernels.widen_f16(w.astype(np.float16))
        w[rows - 1, columns - 1] = np.inf
        for quantize in (kernels.quantize_int8, kernels.quantize_int4):
            with pytest.raises(NonFiniteError):
                quantize(w)
    every = np.arange(1 << 16).astype(np.uint16).reshape(256, 256)
    kernels.widen_bf16(every)
    kernels.quantize_int8(every[:64])
    for rows, groups in itertools.product((1, 3, 17), (1, 2, 5, 17)):
        packed = rng.integers(0, 256, (rows, groups * 16)).astype(np.uint8)
        scale = rng.integers(0, 255, (rows, groups)).astype(np.uint8)
        kernels.dequantize_mxfp4(packed, scale)
        scale[-1, -1] = 255
        with pytest.raises(ReservedScaleError):
            kernels.dequantize_mxfp4(packed, scale)
    for size in (0, 1, 63, 64, 65, 100_003):
        a = rng.integers(0, 256, size).astype(np.uint8)
        b = a.copy()
        kernels.first_difference(a, b)
        if size:
            b[-1] ^= 1
            kernels.first_difference(a, b)


def products(rng: np.random.Generator) -> None:
    encodings = ("raw", "half", "f32", "int8", "int4")
    for encoding, columns, out_rows in itertools.product(encodings, EDGES, (1, 3, 4, 5, 15, 16, 17, 33)):
        w = encoded(encoding, normal(rng, out_rows, columns))
        for exact in (True, False):
            kernels.matmul(normal(rng, int(rng.integers(1, 10)), columns), w, exact)
    for encoding, columns, rows in itertools.product(encodings, (256, 1023), (39, 40, 64, 65, 130)):
        w = encoded(encoding, normal(rng, 65, columns))
        for exact in (True, False):
            kernels.matmul(normal(rng, rows, columns), w, exact)
    for encoding in ("int8", "int4"):
        w = encoded(encoding, normal(rng, 300, 1030))  # pieces for several threads
        kernels.matmul(normal(rng, 5, 1030), w, False)
        x = normal(rng, 3, 1030)
        x[2, 1029] = np.nan
        with pytest.raises(NonFiniteError):
            kernels.matmul(x, w, False)


def experts(rng: np.random.Generator) -> None:
    sizes = [*itertools.product((32, 96, 128), (32, 64), (1, 15, 16, 17, 40)), (544, 512, 33), (1056, 544, 17)]
    for (inputs, inner, outputs), rows, exact in itertools.product(sizes, (1, 2, 7), (True, False)):
        forward(rng, inputs, inner, outputs, rows, exact)
    for rows in (40, 65):
        forward(rng, 544, 512, 33, rows, False)
    for part in range(3):
        with pytest.raises(ReservedScaleError):
            forward(rng, 64, 96, 5, 2, False, reserved=part)
    for value in (np.inf, 1e30):  # of the input; of what lies between
        with pytest.raises(NonFiniteError):
            forward(rng, 64, 96, 5, 2, False, value=value)


def forward(
    rng: np.random.Generator, inputs: int, inner: int, outputs: int, rows: int, exact: bool,
    *, reserved: int | None = None, value: float | None = None,
) -> None:  # fmt: skip
    """One expert, whose matrices lie at odd places and end where its bytes end."""
    payload, parts = [np.zeros(3, np.uint8)], []
    for number, (height, width) in enumerate(((inner, inputs), (outputs, inner), (inner, inputs))):
        packed = rng.integers(0, 256, height * width // 2).astype(np.uint8)
        scale = rng.integers(240 if value == 1e30 else 110, 254 if value == 1e30 else 123, height * width // 32)
        if number == reserved:
            scale[-1] = 255
        begin = sum(map(len, payload))
        parts.append(ExpertMatrix(begin, begin + len(packed), height, width))
        payload += [packed.ravel(), scale.astype(np.uint8).ravel()]
    z = normal(rng, rows, inputs)
    if value is not None:
        z[-1, -1] = value
    kernels.expert_forward(z, np.concatenate(payload), *parts, exact=exact)


def rows_and_numbers(rng: np.random.Generator) -> None:
    for columns, rows in itertools.product((*EDGES, 100, 300), (1, 2, 9)):
        x, y, w = normal(rng, rows, columns), normal(rng, rows, columns), normal(rng, columns)
        kernels.rms_norm(x, w, 1e-5)
        kernels.softmax(x)
        kernels.gated(x, y)
        kernels.situ(x, y)
        for function in (kernels.exp, kernels.tanh, kernels.sigmoid, kernels.silu):
            function(x * np.float32(30))
        for k in {1, (columns + 1) // 2, columns}:
            kernels.top_k(x, k)
        for count in (1, 2, 9):
            kernels.residual_mix([normal(rng, rows, columns) for _ in range(count)], w, 1e-5)
        x[-1, -1] = np.nan
        with pytest.raises(NonFiniteError):
            kernels.top_k(x, 1)
        kernels.rms_norm(x, w, 1e-5)
        kernels.softmax(x)


def layers(rng: np.random.Generator) -> None:
    for tokens, dim, taps in itertools.product((1, 2, 5, 16, 17, 33), (1, 15, 16, 17, 33, 70), (1, 4, 16)):
        heads = int(rng.integers(1, 5))
        width = heads * dim
        vectors = kernels.KdaVectors(
            conv=normal(rng, 3, taps, width), a_log=normal(rng, heads), dt_bias=normal(rng, width),
            norm=normal(rng, dim), lower_bound=-5.0, l2_eps=1e-6, norm_eps=1e-5,
        )  # fmt: skip
        widths = (width, width, width, width, heads, width)
        windows, memory = normal(rng, 3, taps - 1, width), normal(rng, heads, dim, dim)
        q, k, v, f, b, g = (normal(rng, tokens, columns) for columns in widths)
        kernels.kda_heads(q, k, v, f, b, g, windows, memory, vectors)
    for before, width, kind in itertools.product(
        (0, 1, 63, 64, 200, 255, 256, 520), (1, 15, 16, 50, 64, 144), range(3)
    ):
        tokens, heads = int(rng.integers(1, 6)), int(rng.choice([1, 2, 3, 4, 5, 19, 37]))
        rope_width = int(rng.integers(1, 41))
        caches = [normal(rng, before + tokens, columns) for columns in (width, rope_width)]
        latent, rope = ((bf16, np.asarray, lambda a: a.astype(np.float16))[kind](cache) for cache in caches)
        kernels.latent_attention(
            normal(rng, tokens, heads, width), normal(rng, tokens, heads, rope_width), latent, rope, 0.2
        )
    for encoding, width in itertools.product(("raw", "half", "f32", "int8", "int4"), EDGES):
        tokens, heads, key_dim, value_dim = map(int, rng.integers(1, 7, 4))
        kv_b = encoded(encoding, normal(rng, heads * (key_dim + value_dim), width))
        kernels.absorb_query(normal(rng, tokens, heads, key_dim), kv_b, value_dim)
        kernels.expand_value(normal(rng, tokens, heads, width), kv_b, key_dim)


def variants() -> list[str]:
    """Return the variants that this CPU can run, less avx512: all of it is in avx512vnni and avx2."""
    names = kernels.cpu_variants()
    return [name for name in names if name != "avx512" or "avx512vnni" not in names]


def checked(command: list[str], **options: Any) -> str:
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert done.returncode == 0, f"{' '.join(command[:4])} ... failed:\n{done.stdout[-6000:]}"
    return done.stdout


def built() -> Path:
    """Return the program that makes recorded calls again. Fails the test where it cannot be built."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.fail("no compiler, cmake and ninja to build the kernels with")
    if importlib.util.find_spec("nanobind") is None:
        pytest.fail("nanobind is not installed, and CMakeLists.txt asks for it")
    for name in ("libasan.so", "libubsan.so"):
        if not Path(checked([compiler, f"-print-file-name={name}"]).strip()).is_absolute():
            pytest.fail(f"{compiler} comes without {name}")
    settings = {
        "CMAKE_BUILD_TYPE": "None",
        "K3_SANITIZE": "ON",
        "K3_VARIANTS": ",".join(variants()),
        "nanobind_DIR": checked([sys.executable, "-m", "nanobind", "--cmake_dir"]).strip(),
        "Python_EXECUTABLE": sys.executable,
    }
    given = [f"-D{key}={value}" for key, value in settings.items()]
    checked(["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(BUILD), *given])
    checked(["cmake", "--build", str(BUILD), "--target", "replay", "--parallel", str(kernels.usable_cpus())])
    return BUILD / "replay"


@pytest.mark.sanitized
@pytest.mark.timeout(1200)
def test_no_variant_reads_or_writes_astray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = built()
    with open(tmp_path / "calls", "wb") as file, monkeypatch.context() as patch:
        recorder = Recorder(file, patch)
        for kind in (quantizers, products, experts, rows_and_numbers, layers):
            kind(np.random.default_rng(5))
        for count in (1, 2, 3, 5, 8, 16, 17, 64):
            recorder.hashes([np.random.default_rng(size).bytes(size) for size in range(0, 8 * count, 8)])
            recorder.hashes([np.random.default_rng(size).bytes(size) for size in range(60, 60 + count)])
            recorder.hashes([np.random.default_rng(size).bytes(997 - size) for size in range(count)])
    assert all(recorder.counts.values()), recorder.counts
    said = checked(
        [str(program), str(tmp_path / "calls")], env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    )
    assert said.split()[:2] == [str(sum(recorder.counts.values()) + 24), "calls"]
    assert said.split()[3:] == variants()
