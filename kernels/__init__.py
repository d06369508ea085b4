"""Arithmetic on plain arrays: native code with a NumPy definition beside it (`k3.kernels.reference`).

Imports nothing of the other rooms.
"""

from k3.kernels._kernels import (
    cpu_variant,
    cpu_variants,
    get_threads,
    set_threads,
    set_variant,
    usable_cpus,
)
from k3.kernels.errors import (
    NonFiniteError,
    ReservedScaleError,
)
from k3.kernels.experts import (
    ExpertMatrix,
    expert_forward,
)
from k3.kernels.layers import (
    absorb_query,
    expand_value,
    kda_step,
    latent_attention,
    short_conv,
)
from k3.kernels.rowops import (
    exp,
    kda_gate,
    l2_normalize,
    residual_mix,
    rms_norm,
    sigmoid,
    silu,
    situ,
    softmax,
    tanh,
)
from k3.kernels.weights import (
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
    widen_bf16,
)

__all__ = [
    "INT4_GROUP",
    "MX_GROUP",
    "EncodedMatrix",
    "ExpertMatrix",
    "NonFiniteError",
    "ReservedScaleError",
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
    "get_threads",
    "kda_gate",
    "kda_step",
    "l2_normalize",
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
    "short_conv",
    "sigmoid",
    "silu",
    "situ",
    "softmax",
    "tanh",
    "usable_cpus",
    "widen_bf16",
]
