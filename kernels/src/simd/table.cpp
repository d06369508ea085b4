// Collects this compilation's functions.
#include "functions.h"

namespace k3 {
namespace K3_VARIANT {

#define K3_STRING_OF(name) #name
#define K3_STRING(name) K3_STRING_OF(name)

extern const Kernels table;
const Kernels table = {
    .name = K3_STRING(K3_VARIANT),
    .quantize_int8 = quantize_int8,
    .quantize_int4 = quantize_int4,
    .decode = decode,
    .matmul = matmul,
    .quantize_groups = quantize_groups,
    .matmul_int8 = matmul_int8,
    .rms_norm = rms_norm,
    .softmax = softmax,
    .gated = gated,
    .elementwise = elementwise,
    .situ = situ,
    .residual_mix = residual_mix,
    .kda_heads = kda_heads,
    .weighted_sum = weighted_sum,
    .add_weighted = add_weighted,
    .scores = scores,
    .reduce_max = reduce_max,
    .widen = widen,
    .exp_shifted = exp_shifted,
    .sha256_messages = kSha256Messages,
    .sha256_blocks = sha256_blocks,
    .sha256_blocks_of_one = sha256_blocks_of_one,
    .probe_dots = probe_dots,
    .probe_read = probe_read,
};

}  // namespace K3_VARIANT
}  // namespace k3
