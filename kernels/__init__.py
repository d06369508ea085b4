"""Arithmetic on plain arrays: native code with a NumPy definition beside it (`k3.kernels.reference`).

The package imports nothing of the other rooms.
"""

from k3.kernels._kernels import (
    cpu_variant,
    cpu_variants,
    get_threads,
    set_threads,
    set_variant,
    usable_cpus,
)
from k3.kernels.arrays import KdaVectors
from k3.kernels.experts import (
    ExpertMatrix,
    expert_forward,
)
from k3.kernels.kernel_errors import (
    NonFiniteError,
    ReservedScaleError,
)
from k3.kernels.kernel_weights import (
    INT4_GROUP,
    MX_GROUP,
    EncodedMatrix,
    dequantize_int4,
    dequantize_int8,
    dequantize_mxfp4,
    first_difference,
    matmul,
    matmul_encoded,
    quantize_int4,
    quantize_int4_into,
    quantize_int8,
    quantize_int8_into,
    widen,
    widen_bf16,
    widen_f16,
)
from k3.kernels.layers import (
    absorb_query,
    expand_value,
    kda_heads,
    latent_attention,
)
from k3.kernels.rowops import (
    exp,
    gated,
    residual_mix,
    rms_norm,
    sigmoid,
    silu,
    situ,
    softmax,
    tanh,
    top_k,
)
from k3.kernels.sha256 import Sha256, sha256_side_by_side, sha256_update

__all__ = [
    "INT4_GROUP",
    "MX_GROUP",
    "EncodedMatrix",
    "ExpertMatrix",
    "KdaVectors",
    "NonFiniteError",
    "ReservedScaleError",
    "Sha256",
    "absorb_query",
    "cpu_variant",
    "cpu_variants",
    "dequantize_int4",
    "dequantize_int8",
    "dequantize_mxfp4",
    "exp",
    "expand_value",
    "expert_forward",
    "first_difference",
    "gated",
    "get_threads",
    "kda_heads",
    "latent_attention",
    "matmul",
    "matmul_encoded",
    "quantize_int4",
    "quantize_int4_into",
    "quantize_int8",
    "quantize_int8_into",
    "residual_mix",
    "rms_norm",
    "set_threads",
    "set_variant",
    "sha256_side_by_side",
    "sha256_update",
    "sigmoid",
    "silu",
    "situ",
    "softmax",
    "tanh",
    "top_k",
    "usable_cpus",
    "widen",
    "widen_bf16",
    "widen_f16",
]
