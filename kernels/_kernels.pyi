# Types of the native module, written by hand; tests/kernels/test_bindings.py compares the names. Only this package
# calls it: its arguments are checked here for memory safety, in the wrappers for readable errors.

from typing import Any

import numpy as np
import numpy.typing as npt

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Place = tuple[int, int, float]
_Part = tuple[int, int, int, int]

def cpu_variant() -> str: ...
def cpu_variants() -> tuple[str, ...]: ...
def set_variant(name: str) -> None: ...
def get_threads() -> int: ...
def set_threads(n: int) -> None: ...
def usable_cpus() -> int: ...
def quota_cpus(cgroup_file: str, root: str) -> int: ...
def quantize_int8(w: npt.NDArray[Any], q: _Bytes, scales: _Floats) -> _Place | None: ...
def quantize_int4(w: npt.NDArray[Any], q: _Bytes, scales: _Floats) -> _Place | None: ...
def decode(encoding: str, data: npt.NDArray[Any], scales: npt.NDArray[Any] | None, out: _Floats) -> int: ...
def matmul(
    x: _Floats, encoding: str, data: npt.NDArray[Any], scales: _Floats | None, y: _Floats, exact: bool
) -> _Place | None: ...
def probe_dots(rounds: int) -> int: ...
def probe_read(data: _Bytes) -> int: ...
def first_difference(a: _Bytes, b: _Bytes) -> int: ...
def rms_norm(x: _Floats, w: npt.NDArray[Any], eps: float, y: _Floats) -> None: ...
def softmax(x: _Floats, y: _Floats) -> None: ...
def elementwise(name: str, x: _Floats, y: _Floats) -> None: ...
def situ(gate: _Floats, up: _Floats, beta: float, linear_beta: float, y: _Floats) -> None: ...
def gated(x: _Floats, gate: _Floats, y: _Floats) -> None: ...
def top_k(choice: _Floats, ids: npt.NDArray[np.int64]) -> int: ...
def residual_mix(entries: list[_Floats], weight: _Floats, eps: float, y: _Floats) -> None: ...
def expert_forward(
    z: _Floats,
    payload: npt.NDArray[Any],
    w1: _Part,
    w2: _Part,
    w3: _Part,
    beta: float,
    linear_beta: float,
    exact: bool,
    y: _Floats,
) -> tuple[str, int, int] | tuple[str, int, int, float] | None: ...
def kda_heads(
    q: _Floats,
    k: _Floats,
    v: _Floats,
    f: _Floats,
    b: _Floats,
    g: _Floats,
    windows: npt.NDArray[Any],
    memory: npt.NDArray[Any],
    conv: npt.NDArray[Any],
    a_log: _Floats,
    dt_bias: npt.NDArray[Any],
    norm: npt.NDArray[Any],
    lower_bound: float,
    l2_eps: float,
    query_scale: float,
    norm_eps: float,
    out: _Floats,
) -> None: ...
def latent_attention(
    q_latent: _Floats,
    q_rope: _Floats,
    latent: npt.NDArray[Any],
    rope: npt.NDArray[Any],
    scale: float,
    out: _Floats,
) -> None: ...
def absorb_query(
    q: _Floats,
    encoding: str,
    data: npt.NDArray[Any],
    scales: npt.NDArray[Any] | None,
    value_dim: int,
    out: _Floats,
) -> None: ...
def expand_value(
    x: _Floats,
    encoding: str,
    data: npt.NDArray[Any],
    scales: npt.NDArray[Any] | None,
    key_dim: int,
    out: _Floats,
) -> None: ...
