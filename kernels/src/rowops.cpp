#include "rowops.h"

#include <algorithm>

#include "threads.h"
#include "variant.h"

namespace k3 {

namespace {

constexpr int64_t kGrainFloats = 16384;

int64_t grain_of(int64_t columns) {
    return std::max<int64_t>(1, kGrainFloats / std::max<int64_t>(1, columns));
}

}  // namespace

void rms_norm(const float* x, int64_t rows, int64_t columns, const float* w, float eps, float* y) {
    parallel_for(rows, grain_of(columns),
                 [&](int64_t begin, int64_t end) { kernels().rms_norm(x, begin, end, columns, w, eps, y); });
}

void l2_normalize(const float* x, int64_t rows, int64_t columns, float eps, float* y) {
    parallel_for(rows, grain_of(columns),
                 [&](int64_t begin, int64_t end) { kernels().l2_normalize(x, begin, end, columns, eps, y); });
}

void softmax(const float* x, int64_t rows, int64_t columns, float* y) {
    parallel_for(rows, grain_of(columns),
                 [&](int64_t begin, int64_t end) { kernels().softmax(x, begin, end, columns, y); });
}

void elementwise(Function function, const float* x, int64_t count, float* y) {
    parallel_for(count, kGrainFloats, [&](int64_t begin, int64_t end) {
        kernels().elementwise(function, x + begin, end - begin, y + begin);
    });
}

void situ(const float* gate, const float* up, int64_t count, float beta, float linear_beta, float* y) {
    parallel_for(count, kGrainFloats, [&](int64_t begin, int64_t end) {
        kernels().situ(gate + begin, up + begin, end - begin, beta, linear_beta, y + begin);
    });
}

void kda_gate(const float* f, int64_t tokens, int64_t heads, int64_t dim, const float* a_log,
              const float* dt_bias, float lower_bound, float* g) {
    parallel_for(tokens * heads, grain_of(dim), [&](int64_t begin, int64_t end) {
        kernels().kda_gate(f, begin, end, heads, dim, a_log, dt_bias, lower_bound, g);
    });
}

void residual_mix(const float* const* entries, int count, int64_t rows, int64_t columns, const float* weight,
                  float eps, float* y) {
    parallel_for(rows, grain_of(columns * count), [&](int64_t begin, int64_t end) {
        kernels().residual_mix(entries, count, begin, end, columns, weight, eps, y);
    });
}

}  // namespace k3
