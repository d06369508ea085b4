"""One routed expert in one call, from its bytes as they lie on disk.

The functions are safe to call from any thread and release the GIL. A row of the result depends on its row of z
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3.kernels import _kernels
from k3.kernels.arrays import Bytes, Floats, activations, stored
from k3.kernels.kernel_errors import NonFiniteError, ReservedScaleError
from k3.kernels.kernel_weights import MX_GROUP


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """The place of one MXFP4 matrix [rows, columns] in an expert's payload; offsets in bytes.

    `packed_offset` is that of the nibbles (rows * columns / 2 bytes), `scale_offset` that of the scale bytes
    (rows * columns / 32).
    """

    packed_offset: int
    scale_offset: int
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows <= 0 or self.columns <= 0 or self.columns % MX_GROUP:
            raise ValueError(f"an MXFP4 matrix cannot have shape [{self.rows}, {self.columns}]")
        if self.packed_offset < 0 or self.scale_offset < 0:
            raise ValueError("offsets into a payload are not negative")

    def astuple(self) -> tuple[int, int, int, int]:
        """Return the fields in order."""
        return self.packed_offset, self.scale_offset, self.rows, self.columns


def expert_forward(
    z: Floats,
    payload: Bytes,
    w1: ExpertMatrix,
    w2: ExpertMatrix,
    w3: ExpertMatrix,
    *,
    beta: float = 4.0,
    linear_beta: float = 25.0,
    exact: bool = True,
) -> Floats:
    """Return W2 situ(W1 z, W3 z) as float32 [S, w2.rows], from z float32 [S, w1.columns] and payload uint8 [n].

    If `exact`, activations are float32 and the matrices are multiplied as `matmul` multiplies what
    `dequantize_mxfp4` returns for them. Otherwise z and the hidden activations are rounded to int8, with one scale
    per row and 32 columns.

    Raises ReservedScaleError (part "w1", "w2" or "w3", row, group) for a scale byte of 255, ValueError when a
    matrix does not lie inside the payload or the shapes do not fit, and, unless exact, NonFiniteError for an
    activation that is infinite or NaN. If `exact`, such activations pass through as IEEE arithmetic defines.
    """
    z = activations("z", z, 2)
    out = np.empty((z.shape[0], w2.rows), np.float32)
    refusal = _kernels.expert_forward(
        z,
        stored("payload", payload, np.uint8),
        w1.astuple(),
        w2.astuple(),
        w3.astuple(),
        beta,
        linear_beta,
        exact,
        out,
    )
    if refusal is None:
        return out
    if len(refusal) == 3:
        raise ReservedScaleError(*refusal)
    stage, row, column, value = refusal
    raise NonFiniteError(row, column, value, what=f"{stage} activation")
