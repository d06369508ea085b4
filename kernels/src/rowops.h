// Operations on rows and on single numbers, in float32. Definitions: docs/numerics.md; bit-identical to the
// NumPy reference; every row (number) is computed alone. Callable from any thread; rows are split over the
// pool. Outputs may be the inputs.
#pragma once

#include <cstdint>

#include "state.h"

namespace k3 {

void rms_norm(const float* x, int64_t rows, int64_t columns, const float* w, float eps, float* y);
void l2_normalize(const float* x, int64_t rows, int64_t columns, float eps, float* y);
void softmax(const float* x, int64_t rows, int64_t columns, float* y);  // columns > 0
void elementwise(Function function, const float* x, int64_t count, float* y);
void situ(const float* gate, const float* up, int64_t count, float beta, float linear_beta, float* y);

// f, g [tokens, heads, dim]; a_log [heads]; dt_bias [heads, dim].
void kda_gate(const float* f, int64_t tokens, int64_t heads, int64_t dim, const float* a_log,
              const float* dt_bias, float lower_bound, float* g);

// y [rows, columns] from `count` (1 .. kMixMax) entries of that shape.
void residual_mix(const float* const* entries, int count, int64_t rows, int64_t columns, const float* weight,
                  float eps, float* y);

}  // namespace k3
