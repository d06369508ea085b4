// Arguments of the kernels that update a state in place. They own nothing.
#pragma once

#include <cstdint>

namespace k3 {

constexpr int kMixMax = 64;   // entries of a residual mix
constexpr int kTapsMax = 16;  // taps of a short convolution

constexpr int64_t kKdaTokens = 16;  // tokens whose rows of a head are prepared together
constexpr int64_t kKdaBlock = 2;    // registers of columns of a head's memory that are swept together

enum class Function : int { exp, tanh, sigmoid, silu };

// The heads of a KDA layer between its projections, docs/numerics.md "kda_heads".
//   q, k, v (before the convolution), f, g (before their sigmoids), out float [tokens, heads * dim];
//   b float [tokens, heads]; conv float [3, taps, heads * dim], the last tap meets the newest input;
//   a_log float [heads]; dt_bias float [heads * dim]; norm float [dim]
//   windows float [3, taps - 1, heads * dim] (oldest first) and memory float [heads, dim, dim], in and out
struct KdaHeads {
    const float *q, *k, *v, *f, *b, *g;
    const float *conv, *a_log, *dt_bias, *norm;
    float *windows, *memory, *out;
    float lower_bound, l2_eps, query_scale, norm_eps;
    int64_t tokens, heads, dim, taps;
};

// Floats that a thread needs for them.
constexpr int64_t kda_scratch(int64_t dim) {
    return 5 * kKdaTokens * ((dim + 15) / 16 * 16) + kKdaBlock * 16 * dim;
}

// A latent cache: per position a latent and the columns that all heads share, both of one type. bf16 and f16
// are bit patterns, uint16.
enum class CacheType : int { f32, bf16, f16 };
struct LatentCache {
    CacheType type;
    const void *latent, *rope;  // [rows, latent_width], [rows, rope_width]
    int64_t rows, latent_width, rope_width;
};

// Scores of `heads` queries against `rows` positions, all float32:
//   out[head * out_stride + row] = (q_latent[head] . latent[row] + q_rope[head] . rope[row]) * scale
struct Scores {
    const float *q_latent, *q_rope, *latent, *rope;
    int64_t heads, rows, latent_width, rope_width;
    float scale;
    float* out;
    int64_t out_stride;
};

}  // namespace k3
