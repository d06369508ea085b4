// Arguments of the kernels that update a state in place. They own nothing.
#pragma once

#include <cstdint>

namespace k3 {

constexpr int kMixMax = 64;   // entries of a residual mix
constexpr int kTapsMax = 16;  // taps of a short convolution

enum class Function : int { EXP, TANH, SIGMOID, SILU };

// Per token and head: S = decay * S (rows); e = beta * (v - S^T k); S = S + k e^T; out = S^T q.
//   state float [heads, key_dim, value_dim], in and out
//   q, k, decay float [tokens, heads, key_dim]; v, out float [tokens, heads, value_dim]; beta float [tokens,
//   heads]
struct DeltaRule {
    float* state;
    const float *q, *k, *v, *decay, *beta;
    float* out;
    int64_t tokens, heads, key_dim, value_dim;
};

// Depthwise causal convolution and SiLU. window float [taps - 1, channels] (oldest first), in and out;
// u, out float [tokens, channels]; w float [channels, taps] (the last tap meets the newest input)
struct ShortConv {
    float* window;
    const float *u, *w;
    float* out;
    int64_t tokens, channels, taps;
};

}  // namespace k3
