// Weights times activations, S rows at once. Definitions: docs/numerics.md; bit-identical to the NumPy
// reference. A result row depends on its row of x and on W alone. Callable from any thread; rows of W are
// split over the pool.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "quantize.h"

namespace k3 {

// y float [rows, w.rows] from x float [rows, w.columns]: float32 throughout.
void matmul_exact(const float* x, int64_t rows, const Matrix& w, float* y);

// Activations as int8 with one scale per row and group, see matrix.h. Owns the memory.
class QuantizedRows {
public:
    // Fails (returns the place) when a value is not finite.
    NonFinite fill(const float* x, int64_t rows, int64_t columns, int64_t group);
    Activations view() const;

private:
    int64_t rows_ = 0, groups_ = 0, group_ = 0;
    std::vector<int8_t> q_;
    std::vector<float> scales_;
};

// INT8, INT4 and MXFP4 weights; x.group must be the encoding's.
void matmul_int8(const Activations& x, const Matrix& w, float* y);

}  // namespace k3
