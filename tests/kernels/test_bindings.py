"""Holds up: the stub names what the native module has, and nothing that could read or write astray gets in."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3 import kernels
from k3.kernels import _kernels

SOURCES = Path(kernels.__file__).parent


def zeros(*shape: int, dtype: str) -> Any:
    """Return zeros of any type, also of one that no kernel takes."""
    return np.zeros(shape, dtype)


def stub() -> dict[str, list[str]]:
    tree = ast.parse((SOURCES / "_kernels.pyi").read_text())
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def test_the_stub_names_exactly_what_the_module_has() -> None:
    native = {name for name in dir(_kernels) if not name.startswith("_")}
    assert native == set(stub())


def test_the_stub_has_the_module_s_arguments() -> None:
    for name, arguments in stub().items():
        signature = re.search(r"\((.*)\)", getattr(_kernels, name).__doc__.splitlines()[0])
        assert signature is not None
        depth, flat = 0, ""
        for letter in signature[1]:  # drop what is inside brackets, where commas are not separators
            depth += letter in "[("
            flat += letter if depth == 0 else ""
            depth -= letter in "])"
        native = [part.split(":")[0].strip() for part in flat.split(",") if part.strip()]
        assert native == arguments, name


def test_everything_public_is_listed_and_documented() -> None:
    assert len(set(kernels.__all__)) == len(kernels.__all__)
    for name in kernels.__all__:
        thing = getattr(kernels, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert thing.__doc__, name


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.quantize_int8(zeros(2, 3, dtype="int16")),
        lambda: kernels.quantize_int8(zeros(2, 3, dtype="float64")),
        lambda: kernels.quantize_int4(zeros(2, 3, dtype="uint32")),
        lambda: kernels.widen_bf16(np.zeros(3, np.int16)),
        lambda: kernels.dequantize_int8(np.zeros((2, 3), np.int8), np.zeros(2, np.float32)),
        lambda: kernels.first_difference(np.zeros(3, np.int8), np.zeros(3, np.uint8)),
        lambda: kernels.exp(np.zeros(3, np.float64)),
        lambda: kernels.rms_norm(np.zeros((2, 3), np.float32), np.zeros(3, np.uint16), 1e-5),
    ],
)
def test_other_dtypes_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="must be"):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.quantize_int8(np.zeros(3, np.float32)),
        lambda: kernels.quantize_int8(np.zeros((3, 4), np.float32)[:, ::2]),
        lambda: kernels.quantize_int8(np.zeros((3, 4), np.float32).T),
        lambda: kernels.dequantize_int4(np.zeros((2, 3), np.uint8), np.zeros((2, 1), np.float32), 7),
        lambda: kernels.dequantize_int4(np.zeros((2, 3), np.uint8), np.zeros((2, 2), np.float32), 6),
        lambda: kernels.dequantize_int8(np.zeros((2, 3), np.uint8), np.zeros(3, np.float32)),
        lambda: kernels.dequantize_mxfp4(np.zeros((2, 15), np.uint8), np.zeros((2, 1), np.uint8)),
        lambda: kernels.dequantize_mxfp4(np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8)),
        lambda: kernels.quantize_int8_into(
            np.zeros((2, 3), np.float32), np.zeros((2, 4), np.uint8), np.zeros(2, np.float32)
        ),
        lambda: kernels.quantize_int4_into(
            np.zeros((2, 3), np.float32), np.zeros((2, 2), np.uint8), np.zeros((2, 2), np.float32)
        ),
    ],
)
def test_other_shapes_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"shape|matrix|row-major|multiple"):
        call()


def test_read_only_outputs_are_refused() -> None:
    q, scales = np.zeros((2, 3), np.uint8), np.zeros(2, np.float32)
    q.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.quantize_int8_into(np.zeros((2, 3), np.float32), q, scales)


def test_read_only_inputs_are_taken() -> None:
    w = np.ones((2, 3), np.float32)
    w.flags.writeable = False
    q, scales = kernels.quantize_int8(w)
    q.flags.writeable = scales.flags.writeable = False
    np.testing.assert_allclose(kernels.dequantize_int8(q, scales), w, rtol=1e-6)
    np.testing.assert_allclose(kernels.matmul_encoded(w, q, scales, "int8"), w @ w.T, rtol=1e-6)


def test_the_native_module_checks_for_itself() -> None:
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match="shape"):
        _kernels.rms_norm(x, x[0], 1e-5, np.zeros((2, 4), np.float32))
    with pytest.raises(TypeError):
        _kernels.rms_norm(x.astype(np.float64), x[0], 1e-5, x)
    packed, scale = zeros(1, 16, dtype="uint8"), zeros(1, 1, dtype="uint8")
    with pytest.raises(ValueError, match="expert_forward"):
        _kernels.matmul(np.zeros((1, 32), np.float32), "mxfp4", packed, scale, np.zeros((1, 1), np.float32), True)
