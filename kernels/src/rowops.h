// Operations on rows and on single numbers, in float32. Definitions: docs/numerics.md; bit-identical to the
// NumPy reference; every row (number) is computed alone. Callable from any thread; rows are split over the
// pool. Outputs may be the inputs.
#pragma once

#include <cstdint>

#include "state.h"

namespace k3 {

void rms_norm(const float* x, int64_t rows, int64_t columns, const float* w, float eps, float* y);
void softmax(const float* x, int64_t rows, int64_t columns, float* y);  // columns > 0
void elementwise(Function function, const float* x, int64_t count, float* y);
void situ(const float* gate, const float* up, int64_t count, float beta, float linear_beta, float* y);

// y = x * sigmoid(gate)
void gated(const float* x, const float* gate, int64_t count, float* y);

// ids [rows, k], ascending: the columns of the k (1 .. columns) greatest numbers of each row of `choice`; of
// equal ones the lowest. Returns -1, or the place (row * columns + column) of the first number that is not
// finite.
int64_t top_k(const float* choice, int64_t rows, int64_t columns, int64_t k, int64_t* ids);

// y [rows, columns] from `count` (1 .. kMixMax) entries of that shape.
void residual_mix(const float* const* entries, int count, int64_t rows, int64_t columns, const float* weight,
                  float eps, float* y);

}  // namespace k3
