// Operations on rows and single numbers: norms, softmax, activations, the mix of the residual blocks.
//
// A sum over a row is that of simd/matmul.cpp: lane j takes columns j, j + 16, ... in order, then the tree.
#include "functions.h"
#include "mathfn.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

template <class Term>
K3_INLINE float lane_sum(int64_t columns, const Term& term) {
    F32x16 lanes = splat(0.0f);
    for (int64_t k = 0; k < columns; k += kLanes) lanes = lanes + term(k, columns - k);
    return sum(lanes);
}

K3_INLINE float square_sum(const float* x, int64_t columns) {
    return lane_sum(columns, [&](int64_t k, int64_t left) {
        const F32x16 v = load_some(x + k, left);
        return v * v;
    });
}

K3_INLINE float inverse_rms(const float* x, int64_t columns, float eps) {
    return 1.0f / __builtin_sqrtf(square_sum(x, columns) / (float)columns + eps);
}

template <class Function>
K3_INLINE void each(int64_t count, float* y, const Function& function) {
    for (int64_t k = 0; k < count; k += kLanes) store_some(y + k, function(k, count - k), count - k);
}

}  // namespace

void rms_norm(const float* x, int64_t begin, int64_t end, int64_t columns, const float* w, float eps, float* y) {
    for (int64_t r = begin; r < end; ++r) {
        const float* row = x + r * columns;
        const F32x16 factor = splat(inverse_rms(row, columns, eps));
        each(columns, y + r * columns, [&](int64_t k, int64_t left) {
            return load_some(w + k, left) * (load_some(row + k, left) * factor);
        });
    }
}

void softmax(const float* x, int64_t begin, int64_t end, int64_t columns, float* y) {
    for (int64_t r = begin; r < end; ++r) {
        const float* row = x + r * columns;
        float* out = y + r * columns;
        float top = row[0];
        for (int64_t k = 1; k < columns; ++k) top = row[k] > top ? row[k] : top;
        each(columns, out, [&](int64_t k, int64_t left) { return exp16(load_some(row + k, left) - splat(top)); });
        const F32x16 total =
            splat(lane_sum(columns, [&](int64_t k, int64_t left) { return load_some(out + k, left); }));
        each(columns, out, [&](int64_t k, int64_t left) { return load_some(out + k, left) / total; });
    }
}

void gated(const float* x, const float* gate, int64_t count, float* y) {
    each(count, y, [&](int64_t k, int64_t n) { return load_some(x + k, n) * sigmoid16(load_some(gate + k, n)); });
}

void elementwise(Function function, const float* x, int64_t count, float* y) {
    switch (function) {
        case Function::exp:
            return each(count, y, [&](int64_t k, int64_t n) { return exp16(load_some(x + k, n)); });
        case Function::tanh:
            return each(count, y, [&](int64_t k, int64_t n) { return tanh16(load_some(x + k, n)); });
        case Function::sigmoid:
            return each(count, y, [&](int64_t k, int64_t n) { return sigmoid16(load_some(x + k, n)); });
        case Function::silu:
            return each(count, y, [&](int64_t k, int64_t n) { return silu16(load_some(x + k, n)); });
    }
}

void situ(const float* gate, const float* up, int64_t count, float beta, float linear_beta, float* y) {
    const F32x16 b = splat(beta), l = splat(linear_beta);
    each(count, y,
         [&](int64_t k, int64_t n) { return situ16(load_some(gate + k, n), load_some(up + k, n), b, l); });
}

void residual_mix(const float* const* entries, int count, int64_t begin, int64_t end, int64_t columns,
                  const float* weight, float eps, float* y) {
    float share[kMixMax] = {};
    for (int64_t r = begin; r < end; ++r) {
        float top = 0.0f, total = 0.0f;
        for (int j = 0; j < count; ++j) {
            const float* row = entries[j] + r * columns;
            const F32x16 factor = splat(inverse_rms(row, columns, eps));
            share[j] = lane_sum(columns, [&](int64_t k, int64_t left) {
                return (load_some(row + k, left) * factor) * load_some(weight + k, left);
            });
            top = j == 0 || share[j] > top ? share[j] : top;
        }
        for (int j = 0; j < count; ++j) {
            share[j] = exp1(share[j] - top);
            total = total + share[j];
        }
        for (int j = 0; j < count; ++j) share[j] = share[j] / total;
        each(columns, y + r * columns, [&](int64_t k, int64_t left) {
            F32x16 mixed = splat(share[0]) * load_some(entries[0] + r * columns + k, left);
            for (int j = 1; j < count; ++j) {
                mixed = mixed + splat(share[j]) * load_some(entries[j] + r * columns + k, left);
            }
            return mixed;
        });
    }
}

}  // namespace K3_VARIANT
}  // namespace k3
