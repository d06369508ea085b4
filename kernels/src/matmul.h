// Weights times activations, S rows at once. Definitions: docs/numerics.md; bit-identical to the NumPy
// reference. A result row depends on its row of x and on W alone. Callable from any thread; rows of W are
// split over the pool.
#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "quantize.h"
#include "variant.h"

namespace k3 {

// y float [rows, w.rows] from x float [rows, w.columns]: float32 throughout.
void matmul_exact(const float* x, int64_t rows, const Matrix& w, float* y);

// Activations as int8 with one scale per row and group, see matrix.h. Owns the memory, which later calls use
// again.
class QuantizedRows {
public:
    // Makes room for [rows, columns] that will meet weights of `encoding`.
    void shape(Encoding encoding, int64_t rows, int64_t columns);

    // shape(), and all of x float [rows, columns] for products by `variant`. The place of the first value
    // that is not finite.
    NonFinite fill(const Kernels& variant, Encoding encoding, const float* x, int64_t rows, int64_t columns);

    const Activations& view() const { return view_; }

private:
    Activations view_{};
    std::vector<int8_t> q_;
    std::vector<float> scales_;
    std::vector<int32_t> starts_;
};

// y float [rows, w.rows] from x float [rows, w.columns] rounded to int8, W in INT8 or INT4. The place of a
// value of x that is not finite; y is then undefined.
NonFinite matmul_int8(const float* x, int64_t rows, const Matrix& w, float* y);

// Weight rows per piece: whole tiles, of about 128k multiplications or more.
int64_t row_grain(int64_t rows, int64_t columns);

}  // namespace k3
