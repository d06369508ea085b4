"""The kernels in NumPy: the definition with which the native code must agree, bit for bit.

The code is written for reading, not for speed. Everything is float32, one rounded operation after the
other, in the order that docs/numerics.md states. Nothing of the native code is used here.
"""

from k3.kernels.reference.functions import (
    exp,
    gated,
    kda_gate,
    l2_normalize,
    residual_mix,
    rms_norm,
    sigmoid,
    silu,
    situ,
    softmax,
    tanh,
    top_k,
)
from k3.kernels.reference.lanes import lane_sum
from k3.kernels.reference.layers import (
    absorb_query,
    expand_value,
    kda_heads,
    kda_step,
    latent_attention,
    short_conv,
)
from k3.kernels.reference.product import (
    expert_forward,
    matmul_exact,
    matmul_int4,
    matmul_int8,
    matmul_mxfp4,
    quantize_activations,
)
from k3.kernels.reference.quantize import (
    dequantize_int4,
    dequantize_int8,
    dequantize_mxfp4,
    quantize_int4,
    quantize_int8,
    unpack_int4,
    unpack_mxfp4,
    widen_bf16,
    widen_f16,
)

__all__ = [
    "absorb_query",
    "dequantize_int4",
    "dequantize_int8",
    "dequantize_mxfp4",
    "exp",
    "expand_value",
    "expert_forward",
    "gated",
    "kda_gate",
    "kda_heads",
    "kda_step",
    "l2_normalize",
    "lane_sum",
    "latent_attention",
    "matmul_exact",
    "matmul_int4",
    "matmul_int8",
    "matmul_mxfp4",
    "quantize_activations",
    "quantize_int4",
    "quantize_int8",
    "residual_mix",
    "rms_norm",
    "short_conv",
    "sigmoid",
    "silu",
    "situ",
    "softmax",
    "tanh",
    "top_k",
    "unpack_int4",
    "unpack_mxfp4",
    "widen_bf16",
    "widen_f16",
]
