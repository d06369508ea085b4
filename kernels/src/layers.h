// The parts of the attention layers that carry a state or read a cache. Definitions: docs/numerics.md;
// bit-identical to the NumPy reference; a token's result does not depend on how many tokens a call is given.
// Callable from any thread, not for one state from two threads; heads (channels) are split over the pool.
#pragma once

#include <cstdint>

#include "matrix.h"
#include "state.h"

namespace k3 {

void kda_heads(const KdaHeads& a);

constexpr int64_t kAttentionBlock =
    256;  // cache rows whose weighted sum is formed before it is added to the total

// Causal attention of the last `tokens` positions of a latent cache. The calling thread keeps room for the
// scores of one token, 4 * heads * cache.rows bytes, or of more tokens within 16 MiB.
//   q_latent [tokens, heads, latent_width], q_rope [tokens, heads, rope_width]
//   cache.rows at least `tokens`
//   out [tokens, heads, latent_width]: sum over the positions up to the own one of softmax(score) * latent
void latent_attention(const float* q_latent, const float* q_rope, int64_t tokens, int64_t heads,
                      const LatentCache& cache, float scale, float* out);

// kv_b rows: per head key_dim key rows, then value_dim value rows; `w.rows` = heads * (key_dim + value_dim).
// out [tokens, heads, w.columns] = sum over i of q[.., i] * key row i
void absorb_query(const float* q, int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim,
                  const Matrix& w, float* out);
// out [tokens, heads, value_dim] = value rows times x [tokens, heads, w.columns]
void expand_value(const float* x, int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim,
                  const Matrix& w, float* out);

}  // namespace k3
