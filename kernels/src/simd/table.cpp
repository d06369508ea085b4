// Collects this compilation's functions.
#include "functions.h"

namespace k3 {
namespace K3_VARIANT {

#define K3_STRING_OF(name) #name
#define K3_STRING(name) K3_STRING_OF(name)

extern const Kernels table;
const Kernels table = {
    K3_STRING(K3_VARIANT),
    quantize_int8,
    quantize_int4,
    decode,
    matmul,
    quantize_groups,
    matmul_int8,
    rms_norm,
    softmax,
    gated,
    elementwise,
    situ,
    residual_mix,
    kda_heads,
    weighted_sum,
    add_weighted,
    scores,
    reduce_max,
    widen,
    exp_shifted,
    probe_dots,
    probe_read,
};

}  // namespace K3_VARIANT
}  // namespace k3
